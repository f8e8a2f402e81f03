#!/usr/bin/env bash
# Training speed beside PyTorch's, alternating on one machine: PAIRS runs of each, medians and their ratio.
#
#   benches/train_vs_torch.sh PYTHON [PAIRS] [arguments of both benches, e.g. --shape smol-135m --batch 4 --seq 512 --threads 2]
#
# PYTHON is an interpreter with torch, numpy and transformers (pip install torch numpy transformers, in a virtual environment).
# Prints the JSON line of every run, then one with the ratios.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${1:?usage: benches/train_vs_torch.sh PYTHON [PAIRS] [bench arguments]}
pairs=${2:-3}
shift $(($# < 2 ? $# : 2))
cargo build --quiet --release --manifest-path "$root/Cargo.toml" -p phalanx-cli
bin=${CARGO_TARGET_DIR:-$root/target}/release/phalanx
lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
for _ in $(seq "$pairs"); do
    "$bin" bench train --json "$@" | tee -a "$lines"
    # Some machines set OpenBLAS's core type for old builds; it slows a current numpy and says nothing about torch.
    env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE "$python" "$root/benches/peers/torch_train_bench.py" "$@" | tee -a "$lines"
done
"$python" - "$lines" <<'PY'
import json, statistics, sys
rows = [json.loads(l) for l in open(sys.argv[1])]
ours = [r for r in rows if r["peer"].startswith("phalanx")]
peer = [r for r in rows if not r["peer"].startswith("phalanx")]
med = lambda rs, k: statistics.median(r[k] for r in rs)
print(json.dumps({
    "shape": ours[0]["shape"], "dtype": ours[0]["dtype"], "batch": ours[0]["batch"], "seq": ours[0]["seq"], "threads": ours[0]["threads"],
    "tokens_per_s": med(ours, "tokens_per_s"), "peer_tokens_per_s": med(peer, "tokens_per_s"), "peer": peer[0]["peer"],
    "speed_ratio": round(med(ours, "tokens_per_s") / med(peer, "tokens_per_s"), 3),
    "peak_rss_mib": med(ours, "peak_rss_mib"), "peer_peak_rss_mib": med(peer, "peak_rss_mib"),
    "memory_ratio": round(med(ours, "peak_rss_mib") / med(peer, "peak_rss_mib"), 3)}))
PY
