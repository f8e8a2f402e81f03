#!/usr/bin/env bash
# Checks the MPI back end: every collective on 2, 3 and 4 processes against threads, faults, and two network namespaces that stand for
# two machines (where the system lets us make them). Needs: apt-get install libopenmpi-dev openmpi-bin libclang-dev
set -euo pipefail
cd "$(dirname "$0")/../../.."
command -v mpirun >/dev/null || { echo "mpirun is missing: apt-get install libopenmpi-dev openmpi-bin libclang-dev" >&2; exit 1; }
cargo build --quiet --release -p phalanx-comm --features mpi --example mpi_check
check="${CARGO_TARGET_DIR:-target}/release/examples/mpi_check"
run=(mpirun --allow-run-as-root --oversubscribe --mca btl_base_warn_component_unused 0)

for n in 1 2 3 4; do
    echo "== $n processes"
    timeout 300 "${run[@]}" -n "$n" "$check"
done

# Every rank must be told, and mpirun must end with a failure.
expect() {
    local fault=$1 ranks=$2 text=$3 output
    echo "== fault: $fault"
    if output=$(timeout 120 "${run[@]}" -n "$ranks" "$check" "$fault" 2>&1); then
        echo "$output"; echo "a run with a fault ended well" >&2; exit 1
    fi
    local told
    told=$(grep -c "^told: .*$text" <<<"$output" || true)
    grep "^told:" <<<"$output" || true
    if [ "$told" -ne "$ranks" ]; then
        echo "$output"; echo "$told of $ranks ranks were told: $text" >&2; exit 1
    fi
}
expect mismatch 3 "different collectives.*rank 0: all_gather.*mpi_check.rs:.*rank 1: all_reduce.*mpi_check.rs:"
expect message 2 "different numbers of elements.*rank 0: send of 3 f32.*rank 1: recv of 4 f32"
expect missing 3 "waited 0.5 s in group .world., barrier.*rank 1 (nothing has come from there"
expect error 3 "rank 1 failed: no space left on the disk"
expect panic 3 "rank 1 panicked"

echo "== two hosts"
if ! ip netns add phalanx-a 2>/dev/null; then
    echo "skipped: this system does not let us make network namespaces"
    exit 0
fi
agent=$(mktemp)
trap 'ip netns del phalanx-a; ip netns del phalanx-b 2>/dev/null; rm -f "$agent"' EXIT
ip netns add phalanx-b
ip link add phalanx0 netns phalanx-a type veth peer name phalanx1 netns phalanx-b
ip -n phalanx-a addr add 10.77.0.1/24 dev phalanx0
ip -n phalanx-b addr add 10.77.0.2/24 dev phalanx1
for end in a:phalanx0 b:phalanx1; do
    ip -n "phalanx-${end%:*}" link set lo up
    ip -n "phalanx-${end%:*}" link set "${end#*:}" up
done
# Stands for ssh: runs the command in the other namespace, under another host name.
cat >"$agent" <<'AGENT'
#!/bin/sh
shift
exec ip netns exec phalanx-b unshare --uts sh -c "hostname phalanx-b; $*"
AGENT
chmod +x "$agent"
two=(ip netns exec phalanx-a unshare --uts sh -c 'hostname phalanx-a; exec "$@"' sh
    "${run[@]}" --host 10.77.0.1:2,10.77.0.2:2 --mca plm_rsh_agent "$agent" --mca btl tcp,self
    --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24)
timeout 300 "${two[@]}" -n 4 sh -c 'echo "rank $OMPI_COMM_WORLD_RANK on $(hostname)"'
timeout 300 "${two[@]}" -n 4 "$check"
echo "== all well"
