#!/usr/bin/env bash
# A GPT larger than memory: under a memory limit that this script sets, stock Megatron is ended and the plan trains.
#
# The plan keeps gradients and a part of the parameters in host memory, and optimizer states on the drive. The same model
# is also trained without the limit. If the losses are not equal to the last bit, the script fails.
# Settings (environment): LIMIT_MIB (of both ranks together)  LIMIT_BY (cgroup, address-space)  NVME (a directory on the
#   drive)  SLOW_LINKS (see scripts/slow_links.sh; empty: links as they are. Default without GPUs: network, host link and
#   drive are emulated if possible, because copies by a processor are too short to see them overlap)
#   CGROUPS (where cgroups are mounted)  ADDRESS_SPACE_MIB (of a rank without a model)  DEVICE_BYTES HOST_BYTES PINNED_BYTES (limits of the plan)  LAYERS HIDDEN HEADS SEQ ITERS MEASURE_SECONDS NAME
set -euo pipefail
if [ "${1:-}" = --in ]; then # --in CGROUP COMMAND...: run the command there
    echo $$ > "$2/cgroup.procs"
    exec "${@:3}"
fi
cgroups=${CGROUPS:-/sys/fs/cgroup} limit_mib=${LIMIT_MIB:-1250} mib=$((1 << 20))
make_group() { # prints a new cgroup (version 2 or 1) with the limit below our own; prints nothing if that is not allowed
    local own file
    if [ -e "$cgroups/cgroup.controllers" ]; then
        own=$cgroups$(sed -n 's/^0:://p' /proc/self/cgroup) file=memory.max
    else
        own=$cgroups/memory$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup) file=memory.limit_in_bytes
        [ -e "$own/$file" ] || return 0
    fi
    own=${own%/}
    for left in "$own"/larger-than-memory.*; do # left by a script that was killed
        [ ! -d "$left" ] || [ -e "/proc/${left##*.}" ] || rmdir "$left" || true
    done
    mkdir "$own/larger-than-memory.$$" || return 0
    own=$own/larger-than-memory.$$
    if echo $((limit_mib * mib)) > "$own/$file"; then
        [ ! -e "$own/memory.swap.max" ] || echo 0 > "$own/memory.swap.max" || true
        echo "$own"
    else
        rmdir "$own"
    fi
}
if [ "${1:-}" = --make-group ]; then make_group; exit; fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PP=1 DP=2 NAME=${NAME:-larger-than-memory} LAYERS=${LAYERS:-16} HIDDEN=${HIDDEN:-512} HEADS=${HEADS:-8} SEQ=${SEQ:-16}
export MICRO_BATCH_SIZE=1 MICRO_BATCHES=${MICRO_BATCHES:-1} ITERS=${ITERS:-4} TURN_ITERS=${TURN_ITERS:-2} MEASURE_SECONDS=${MEASURE_SECONDS:-20}
export EXTRA="--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer-cpu-offload"
EXTRA+=" --clip-grad 1000" # with 1, the large first gradients would make every step during the backward be taken back
parameters=$((12 * LAYERS * HIDDEN * HIDDEN))
export PLAN_OPTIONS="--zero-stage 3 --limit-device-bytes ${DEVICE_BYTES:-$((parameters * 7 / 4))}"
PLAN_OPTIONS+=" --limit-host-bytes ${HOST_BYTES:-$((parameters * 10))}"
PLAN_OPTIONS+=" --limit-pinned-host-bytes ${PINNED_BYTES:-$((parameters * 6 / 5))}"
# Return freed memory to the system. Otherwise memory needed before the first iteration would count for the whole run.
export MALLOC_MMAP_MAX_=1000000 MALLOC_MMAP_THRESHOLD_=262144 MALLOC_TRIM_THRESHOLD_=1048576

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
fail() { printf 'pretrain_gpt_larger_than_memory: %s\n' "$*" >&2; exit 1; }
run=runs/$NAME drive=${NVME:-runs}/$NAME.drive group=""
mkdir -p runs "$drive"
export NVME=$drive

tidy() {
    kill $(jobs -p) 2> /dev/null && wait
    rmdir "$drive" || true
    # A cgroup can be removed when its last process has ended.
    [ -z "$group" ] || for _ in $(seq 100); do rmdir "$group" 2> /dev/null && break || sleep 0.1; done
}
trap tidy EXIT
trap 'exit 143' TERM INT HUP

[ "${LIMIT_BY:-cgroup}" = address-space ] || group=$(make_group 2> /dev/null)
if [ -n "$group" ]; then
    limit="$limit_mib MiB for both ranks together, by a cgroup" WITHIN="bash scripts/pretrain_gpt_larger_than_memory.sh --in $group"
else
    address_space=$((limit_mib / 2 + ${ADDRESS_SPACE_MIB:-1250}))
    limit="$address_space MiB of address space for each rank, because no cgroup can be made" WITHIN="prlimit --as=$((address_space * mib))"
fi
export WITHIN
say "limit: $limit"
with_script=(setpriv --pdeathsig TERM)
"${with_script[@]}" true 2> /dev/null || with_script=(env) # before util-linux 2.33
"${with_script[@]}" flock runs/.setup.lock scripts/setup.sh & # here, because emulated links reach no package registry
wait $!
if [ -z "${SLOW_LINKS+set}" ] && ! [ -e /dev/nvidiactl ]; then
    SLOW_LINKS="250 250 500"
    scripts/slow_links.sh $SLOW_LINKS true || { say "links cannot be slowed here, see above: copies will be too short to see them overlap"; SLOW_LINKS=""; }
fi
export SLOW_LINKS=${SLOW_LINKS:-}
"${with_script[@]}" scripts/pretrain_gpt_hybrid.sh &
wait $!

export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="$PWD/.megatron" PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
megatron-ext report "$run" --json 2> /dev/null | grep -q '"bitwise_equal": *true' || fail "the losses differ from those without the limit"
[ -z "$(ls -A "$drive")" ] || fail "left on the drive: $(ls -A "$drive")"
peak=$(cat "$group"/memory.{peak,max_usage_in_bytes} 2> /dev/null || true)
say "the plan has trained within the limit${peak:+, holding up to $((peak / mib)) MiB}; losses are equal to the last bit; nothing is left on the drive"

mapfile -t model < "$run/model_options.txt"
limited() { # limited NAME ITERATIONS SCRIPT [ARGUMENTS]: train within the limit; returns whether that succeeded
    $WITHIN python -m megatron_ext.launch.launcher --fork --nproc-per-node $DP "${@:3}" "${model[@]}" --data-path runs/corpus/stdlib \
        --data-cache-path "$run/cache/limited" --train-iters "$2" --metrics-path "$run/$1.json" > "$run/limited.log" 2>&1 &
    wait $!
}
if [ -n "$group" ]; then # the pages of mapped files, which the system takes back, count as address space
    plan=(examples/pretrain_gpt_hybrid.py --user-defined-schedule "$run/schedule.json" --user-defined-schedule-nvme-path "$drive")
    rm -rf "$run/saved"
    limited saving "$ITERS" "${plan[@]}" --save "$run/saved" --save-interval 2 && echo 2 > "$run/saved/latest_checkpointed_iteration.txt" &&
        limited resumed "$ITERS" "${plan[@]}" --load "$run/saved" ||
        { tail -n 5 "$run/limited.log" >&2; fail "a checkpoint could not be saved and loaded within the limit"; }
    rm -rf "$run/saved"
    python - "$run" <<< 'import json, sys
loss = lambda name: json.load(open(f"{sys.argv[1]}/{name}.json"))["loss"]
assert loss("saving")[2:] == loss("resumed") == loss("scheduled.metrics")[2:]' || fail "the losses differ after a checkpoint was loaded"
    say "a checkpoint was saved and loaded within the limit; training went on to the same losses"
fi
under_limit() { # under_limit SCRIPT [ARGUMENTS]: one iteration; whether it was ended for lack of memory
    if limited limited 1 "$@"; then return 1; fi
    grep -qE 'SIGKILL|memory|bad_alloc|MemoryError' "$run/limited.log" ||
        { tail -n 5 "$run/limited.log" >&2; fail "$1 was ended by something other than the limit"; }
}
ended="ended for lack of memory" trains="trains within the limit, too"
under_limit examples/pretrain_gpt_hybrid.py || fail "stock Megatron trains within the limit: set a lower LIMIT_MIB"
say "stock Megatron, optimizer on the host as in the plan: $ended"
# The next two hold fewer copies. A limit of address space may admit them too: it counts all memory that was ever reserved.
for index in "${!model[@]}"; do [ "${model[$index]}" != --optimizer-cpu-offload ] || unset "model[$index]"; done
under_limit examples/pretrain_gpt_hybrid.py && outcome=$ended || outcome=$trains
say "stock Megatron, optimizer on the device: $outcome"
under_limit benchmarks/peer_fsdp.py offload && outcome=$ended || outcome=$trains
say "FSDP2 with CPU offload: $outcome"
