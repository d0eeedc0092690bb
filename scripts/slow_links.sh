#!/usr/bin/env bash
# Run a command on slower links: slow_links.sh NETWORK HOST_LINK DRIVE COMMAND..., rates in MB/s.
#
# A rehearsal of a machine with slow links on one without GPUs. The command gets a network of its own, which reaches
# nothing outside: a loopback whose rate the kernel bounds (tc-tbf(8)), for what all ranks send each other together.
# That needs root or user namespaces, and iproute2. HOST_LINK and DRIVE are rates of each rank, see
# scripts/slow_links.py.
set -euo pipefail
if [ "$1" = --inside ]; then
    ip link set lo up
    tc qdisc add dev lo root tbf rate "$2mbps" burst 200kb limit 10mb
    # A user namespace forgets the signal that our caller may have asked for, and torch looks in vain for host names.
    TORCH_CPP_LOG_LEVEL=ERROR exec setpriv --pdeathsig TERM "${@:3}"
fi
as_root=()
[ "$(id -u)" = 0 ] || as_root=(--map-root-user)
export MEGATRON_EXT_SLOW_LINKS="network_mb=$1,host_link_mb=$2,drive_mb=$3"
export PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/tests/helpers/at_start${PYTHONPATH:+:$PYTHONPATH}"
exec unshare "${as_root[@]}" --net bash "${BASH_SOURCE[0]}" --inside "$1" "${@:4}"
