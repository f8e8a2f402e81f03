#!/usr/bin/env python3
"""Phalanx beside its peers on this machine: whole training steps (PyTorch), matrix products (the `gemm` crate), generation (llama.cpp).

    python benches/side_by_side.py [--rounds 3] [--threads 2] [--only train,gemm,generate] [--gguf MODEL.gguf] [--steps 3]

Run it with an interpreter that has torch, numpy and transformers, and xllamacpp for --gguf (pip install torch numpy transformers xllamacpp==2026.10.11549).
Every round runs each program once, one after the other; medians over the rounds are compared. Prints the table, and, unless --only leaves something out,
writes it into docs/benchmarks.md and every run into docs/benchmarks.jsonl. (One shape of training, with any arguments: train_vs_torch.sh.) Nothing else should run meanwhile: on a busy machine two threads wait for each other, and the ratio says little.
"""
import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TRAIN = ["--batch", "4", "--seq", "512", "--warmup", "1"]
# What is compared: a name, arguments of `phalanx bench train`, those of the peer (or of a second run of our own), and the bar of the ratio.
TRAINING = [
    ("smol-135m, f32 / PyTorch f32", ["--shape", "smol-135m", *TRAIN], ["--shape", "smol-135m", *TRAIN], "torch"),
    ("smol-135m, f32 / PyTorch f32 --compile", ["--shape", "smol-135m", *TRAIN], ["--shape", "smol-135m", *TRAIN, "--compile"], "torch"),
    ("smol-135m, bf16 / PyTorch bf16", ["--shape", "smol-135m", *TRAIN, "--dtype", "bf16"], ["--shape", "smol-135m", *TRAIN, "--dtype", "bf16"], "torch"),
    ("smol-135m, bf16 and int8_block / PyTorch bf16", ["--shape", "smol-135m", *TRAIN, "--dtype", "bf16", "--arithmetic", "int8_block"],
     ["--shape", "smol-135m", *TRAIN, "--dtype", "bf16"], "torch"),
    ("smol-135m, int8_block / own f32", ["--shape", "smol-135m", *TRAIN, "--arithmetic", "int8_block"], ["--shape", "smol-135m", *TRAIN], "own"),
    ("smol-135m, bf16 products / own f32", ["--shape", "smol-135m", *TRAIN, "--arithmetic", "bf16"], ["--shape", "smol-135m", *TRAIN], "own"),
    ("qwen3-600m-4l, f32, batch 2 / PyTorch f32", ["--shape", "qwen3-600m-4l", "--batch", "2", "--seq", "512", "--warmup", "1"],
     ["--shape", "qwen3-600m-4l", "--batch", "2", "--seq", "512", "--warmup", "1"], "torch"),
]
PRODUCTS = [f"{kind} {size}" for size, kinds in {
    "2048x2048x2048": "forward dgrad wgrad", "1024x768x768": "forward dgrad", "768x768x1024": "wgrad", "1024x3072x768": "forward",
    "1024x768x3072": "dgrad", "3072x768x1024": "wgrad", "512x32000x768": "forward", "512x768x32000": "dgrad", "32000x768x512": "wgrad",
}.items() for kind in kinds.split()]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--steps", type=int, default=3, help="measured training steps of a run")
parser.add_argument("--only", default="")
parser.add_argument("--gguf", help="a GGUF file for the comparison with llama.cpp")
args = parser.parse_args()
only = args.only.split(",") if args.only else ["train", "gemm", "generate"]
threads = ["--threads", str(args.threads)]
# Some machines set OpenBLAS's core type for old builds; it slows a current numpy and says nothing about torch.
environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
runs, rows = [], []


def run(command, **note):
    """The JSON lines that a command prints, kept with a note of what they are of."""
    done = subprocess.run([str(c) for c in command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    lines = [json.loads(l) for l in done.stdout.splitlines() if l.startswith("{")]
    for line in lines:
        runs.append({**note, **line})
        print(json.dumps(runs[-1]), flush=True)
    return lines


def shown(argument):
    """An argument as others can repeat it: a file by its name."""
    return pathlib.Path(argument).name if pathlib.Path(argument).is_file() else argument


def median(lines, key):
    return statistics.median(l[key] for l in lines)


def row(section, name, ours, peer, unit, memory=""):
    rows.append((section, name, f"{ours:.1f}", f"{peer:.1f}", unit, f"{ours / peer:.2f}", memory))


subprocess.run(["cargo", "build", "--release", "-p", "phalanx-cli"], cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
phalanx = target / "release" / "phalanx"
doctor = run([phalanx, "doctor", "--json", *threads], of="machine")[0]

if "train" in only:
    steps = ["--steps", args.steps, *threads]
    torch = [sys.executable, "benches/peers/torch_train_bench.py"]
    for name, ours, theirs, kind in TRAINING:
        a, b = [], []
        for _ in range(args.rounds):
            a += run([phalanx, "bench", "train", "--json", *ours, *steps], of=name)
            b += run([*(torch if kind == "torch" else [phalanx, "bench", "train", "--json"]), *theirs, *steps], of=name)
        memory = f"{median(a, 'peak_rss_mib') / median(b, 'peak_rss_mib'):.2f}"
        row("Training steps", name, median(a, "tokens_per_s"), median(b, "tokens_per_s"), "tokens/s", memory)
        if ours == TRAINING[0][1] and theirs == TRAINING[0][2]:
            share = median(a, "model_gflops") / doctor["peak_fma_gflops"]
            rows.append(("Training steps", "smol-135m, f32: model arithmetic of the multiply-add peak", f"{median(a, 'model_gflops'):.0f}",
                         f"{doctor['peak_fma_gflops']:.0f}", "GFLOP/s", f"{share:.2f}", ""))

if "gemm" in only:
    subprocess.run(["cargo", "build", "--release", "--manifest-path", ROOT / "benches/peers/gemm_crate/Cargo.toml"], check=True, stderr=subprocess.DEVNULL)
    folder = pathlib.Path(os.environ["CARGO_TARGET_DIR"]) if "CARGO_TARGET_DIR" in os.environ else ROOT / "benches/peers/gemm_crate/target"
    peer = folder / "release" / "gemm-crate-bench"
    for n in dict.fromkeys([1, args.threads]):
        ratios = []
        for shape in PRODUCTS:
            a, b = [], []
            for _ in range(args.rounds):
                a += run([phalanx, "bench", "gemm", "--json", "--rounds", 3, "--threads", n, *shape.split()], of=shape)
                b += run([peer, n, 3, shape], of=shape)
            ratios.append(median(a, "gflops") / median(b, "gflops"))
            fraction = f"{median(a, 'fraction_of_peak'):.2f} of peak"
            row("Products, f32", f"{shape}, {n} thread{'s' * (n > 1)} / `gemm` crate", median(a, "gflops"), median(b, "gflops"), "GFLOP/s", fraction)
        rows.append(("Products, f32", f"median of the twelve, {n} thread{'s' * (n > 1)}", "", "", "", f"{statistics.median(ratios):.2f}", ""))

if "generate" in only and args.gguf:
    a, b = [], []
    for _ in range(args.rounds):
        a += run([phalanx, "bench", "decode", args.gguf, "--batch", 1, "--json", *threads], of="generation")
        b += run([sys.executable, "benches/peers/llama_cpp_bench.py", args.gguf, *threads], of="generation")
    name = pathlib.Path(args.gguf).name
    for what in ["prefill", "decode"]:
        row("Generation, one sequence", f"{name}: {what} / llama.cpp", median(a, f"{what}_tokens_per_s"), median(b, f"{what}_tokens_per_s"), "tokens/s")

commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True, stdout=subprocess.PIPE).stdout.strip()
page = ["# Beside others\n",
        f"Written by `python benches/side_by_side.py {' '.join(map(shown, sys.argv[1:]))}` on {datetime.date.today()}, commit {commit}; every run is in [benchmarks.jsonl](benchmarks.jsonl).",
        f"{doctor.get('cpu', 'processor unknown')}, {args.threads} threads, {doctor['isa']}, f32 multiply-add peak {doctor['peak_fma_gflops']:.0f} GFLOP/s, reading "
        f"{doctor['read_bandwidth_gbs']:.0f} GB/s. Medians of {args.rounds} rounds that alternate.",
        "Memory is ours over the peer's (peak resident), where it was measured."]
for section in dict.fromkeys(r[0] for r in rows):
    last = "of the peak" if section.startswith("Products") else "memory"
    page += [f"\n## {section}\n", f"| ours / peer | ours | peer | | ratio | {last} |", "|---|---|---|---|---|---|"]
    page += [f"| {' | '.join(r[1:])} |" for r in rows if r[0] == section]
print("\n".join(page))
if not args.only:
    (ROOT / "docs/benchmarks.md").write_text("\n".join(page) + "\n")
    (ROOT / "docs/benchmarks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in runs))
