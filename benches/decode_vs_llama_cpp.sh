#!/usr/bin/env bash
# Generation speed beside llama.cpp's, on one GGUF file with its own quantised weights, alternating on one machine: PAIRS runs of each, medians and their ratios.
#
#   benches/decode_vs_llama_cpp.sh PYTHON GGUF [PAIRS] [THREADS]
#
# PYTHON is an interpreter with xllamacpp (pip install xllamacpp==2026.10.11549, in a virtual environment).
# One sequence: a prompt of 128 tokens, then 64 tokens, greedy. Prints the JSON line of every run, then one with the ratios.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
usage="usage: benches/decode_vs_llama_cpp.sh PYTHON GGUF [PAIRS] [THREADS]"
python=${1:?$usage}
model=${2:?$usage}
pairs=${3:-3}
threads=${4:-2}
cargo build --quiet --release --manifest-path "$root/Cargo.toml" -p phalanx-cli
bin=${CARGO_TARGET_DIR:-$root/target}/release/phalanx
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
for _ in $(seq "$pairs"); do
    "$bin" bench decode "$model" --batch 1 --threads "$threads" --json | tee -a "$lines"
    "$python" "$root/benches/peers/llama_cpp_bench.py" "$model" --threads "$threads" 2>/dev/null | tee -a "$lines"
done
"$python" - "$lines" <<'PY'
import json, statistics, sys
rows = [json.loads(l) for l in open(sys.argv[1])]
ours = [r for r in rows if "peer" not in r]
peer = [r for r in rows if "peer" in r]
med = lambda rs, k: statistics.median(r[k] for r in rs)
out = {"peer": peer[0]["peer"], "version": peer[0]["version"], "threads": peer[0]["threads"], "pairs": len(peer)}
for kind in ("prefill", "decode"):
    key = f"{kind}_tokens_per_s"
    out[key], out[f"peer_{key}"] = med(ours, key), med(peer, key)
    out[f"{kind}_ratio"] = round(med(ours, key) / med(peer, key), 3)
print(json.dumps(out))
PY
