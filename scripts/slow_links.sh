#!/usr/bin/env bash
# Run a command on slower links: slow_links.sh NETWORK HOST_LINK DRIVE COMMAND..., rates in MB/s.
#
# Rehearses a machine with slow links on a machine without GPUs. The command gets a network of its own that reaches
# nothing outside: a loopback whose rate the kernel limits (tc-tbf(8)). All ranks together share this rate.
# This needs root or user namespaces, and iproute2. HOST_LINK and DRIVE are rates per rank, see
# scripts/slow_links.py.
set -euo pipefail
if [ "$1" = --inside ]; then
    ip link set lo up
    tc qdisc add dev lo root tbf rate "$2mbps" burst 200kb limit 10mb
    # Entering a user namespace clears the death signal that the caller may have set. torch warns that it finds no host names.
    with_caller=(setpriv --pdeathsig TERM)
    "${with_caller[@]}" true 2> /dev/null || with_caller=(env) # before util-linux 2.33
    TORCH_CPP_LOG_LEVEL=ERROR exec "${with_caller[@]}" "${@:3}"
fi
as_root=()
[ "$(id -u)" = 0 ] || as_root=(--map-root-user)
export MEGATRON_EXT_SLOW_LINKS="network_mb=$1,host_link_mb=$2,drive_mb=$3"
export PYTHONPATH="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/tests/helpers/at_start${PYTHONPATH:+:$PYTHONPATH}"
exec unshare "${as_root[@]}" --net bash "${BASH_SOURCE[0]}" --inside "$1" "${@:4}"
