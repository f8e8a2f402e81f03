#!/usr/bin/env python3
"""Prefill and decode speed of llama.cpp, through the bindings of xllamacpp (pip install xllamacpp==2026.10.11549).

    python benches/peers/llama_cpp_bench.py MODEL.gguf [--threads 2] [--prompt 128] [--tokens 64] [--rounds 3]

Prints one JSON line: peer, version, prefill_tokens_per_s, decode_tokens_per_s, threads (medians of the rounds). The rates are llama.cpp's own timings of one
request: the whole prompt in one batch, then token by token, greedy, one sequence.
"""
import argparse
import importlib.metadata
import json
import statistics

import xllamacpp

args = argparse.ArgumentParser()
args.add_argument("model")
args.add_argument("--threads", type=int, default=2)
args.add_argument("--prompt", type=int, default=128)
args.add_argument("--tokens", type=int, default=64)
args.add_argument("--rounds", type=int, default=3)
args = args.parse_args()

params = xllamacpp.CommonParams()
params.model.path = args.model
params.n_ctx = args.prompt + args.tokens + 8
params.n_parallel = 1
params.n_gpu_layers = 0
params.cpuparams.n_threads = args.threads
params.cpuparams_batch.n_threads = args.threads
params.cache_ram_mib = 0
params.verbosity = -1
server = xllamacpp.Server(params)


def request(seed):
    """Timings of one request; the prompt is the one of `phalanx bench decode`, moved by the seed so that no cache helps."""
    answer = server.handle_completions({
        "prompt": [(t * 31 + seed * 977 + 5) % 32000 for t in range(args.prompt)],
        "n_predict": args.tokens,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
        "stream": False,
    })
    return answer["timings"]


request(0)  # warm up
timings = [request(seed + 1) for seed in range(args.rounds)]
assert all(t["prompt_n"] == args.prompt and t["predicted_n"] == args.tokens for t in timings), timings
print(json.dumps({
    "peer": "llama.cpp",
    "version": "xllamacpp " + importlib.metadata.version("xllamacpp"),
    "prefill_tokens_per_s": round(statistics.median(t["prompt_per_second"] for t in timings), 1),
    "decode_tokens_per_s": round(statistics.median(t["predicted_per_second"] for t in timings), 1),
    "threads": args.threads,
}))
