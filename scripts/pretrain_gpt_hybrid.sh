#!/usr/bin/env bash
# The main job: measure, plan, train a real GPT by the schedule next to stock Megatron, and compare.
#
# Settings (environment): ITERS TURN_ITERS PP VP DP MICRO_BATCHES LAYERS HIDDEN HEADS SEQ MICRO_BATCH_SIZE
#   POLICY (hybrid, all-gpu, all-cpu, random:SEED)  NAME (directory under runs/)
#   MEGATRON_PATH (a Megatron-LM checkout to patch and use)  EXTRA (further options of the example)
#   PLAN_OPTIONS (zero stage and limits of the plan, as options of `describe`)  NVME (a directory on the drive)
#   SLOW_LINKS ("NETWORK HOST_LINK DRIVE", rates in MB/s: a rehearsal without GPUs, see scripts/slow_links.sh)
#   WITHIN (a command that starts the training by the schedule, such as one that sets limits)
#   COST_TABLE (use this table, such as one that `megatron-ext cost calibrate` wrote, instead of measuring)
#   ALLOW_DIFFERENCES=1 (use the existing cost table even if it was measured elsewhere)
# An interrupted run continues where it stopped. A complete run is done again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

ITERS=${ITERS:-24} TURN_ITERS=${TURN_ITERS:-3} PP=${PP:-2} DP=${DP:-2}
if [ "$PP" = 1 ]; then VP=${VP:-1}; else VP=${VP:-2}; fi
LAYERS=${LAYERS:-8} HIDDEN=${HIDDEN:-256} HEADS=${HEADS:-4} SEQ=${SEQ:-128} MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-2}
MICRO_BATCHES=${MICRO_BATCHES:-$((2 * PP))} POLICY=${POLICY:-hybrid}
NAME=${NAME:-pp$PP-vp$VP-dp$DP-l$LAYERS-h$HIDDEN-s$SEQ-$POLICY}

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
refuse() { printf 'pretrain_gpt_hybrid: %s\n' "$*" >&2; exit 2; }

# A wrong value is refused before anything is started.
for name in ITERS TURN_ITERS PP VP DP LAYERS HIDDEN HEADS SEQ MICRO_BATCH_SIZE MICRO_BATCHES; do
    [[ ${!name} =~ ^[1-9][0-9]{0,6}$ ]] || refuse "$name = '${!name}': expected a whole number of at least 1"
done
[[ $POLICY =~ ^(hybrid|all-gpu|all-cpu|exact|random:[0-9]+)$ ]] || refuse "POLICY = '$POLICY': expected hybrid, all-gpu, all-cpu, exact or random:SEED"
[[ $NAME =~ ^[A-Za-z0-9._:-]+$ && $NAME != . && $NAME != .. ]] || refuse "NAME = '$NAME': expected letters, digits, '.', '_', ':' and '-'"
[ "$ITERS" -ge 4 ] || refuse "ITERS = '$ITERS': expected at least 4, because two warm up"
[ "$VP" -eq 1 ] || [ "$PP" -gt 1 ] || refuse "VP = '$VP': interleaving needs PP of at least 2"
[ $((LAYERS % (PP * VP))) -eq 0 ] || refuse "LAYERS = '$LAYERS': does not divide into PP x VP = $((PP * VP)) stages"
[ $((HIDDEN % HEADS)) -eq 0 ] || refuse "HEADS = '$HEADS': does not divide HIDDEN = $HIDDEN"
[ "$VP" -eq 1 ] || [ $((MICRO_BATCHES % PP)) -eq 0 ] || refuse "MICRO_BATCHES = '$MICRO_BATCHES': interleaving needs a multiple of PP = $PP"
[ -z "${NVME:-}" ] || [ -d "$NVME" ] || refuse "NVME = '$NVME': no such directory"
[ -z "${COST_TABLE:-}" ] || [ -f "$COST_TABLE" ] || refuse "COST_TABLE = '$COST_TABLE': no such file"
[ -z "${MEGATRON_PATH:-}" ] || [ -d "$MEGATRON_PATH" ] || refuse "MEGATRON_PATH = '$MEGATRON_PATH': no such directory"
[[ ${SLOW_LINKS:-} =~ ^([1-9][0-9]{0,5}( [1-9][0-9]{0,5}){2})?$ ]] || refuse "SLOW_LINKS = '$SLOW_LINKS': expected three whole numbers"
[ $((PP * DP)) -le 64 ] || refuse "PP x DP = $((PP * DP)): more than 64 processes on one machine"

# No process outlives this script. When the script is asked to end, it ends its commands. If it is killed, the kernel does.
with_script=(setpriv --pdeathsig TERM)
"${with_script[@]}" true 2> /dev/null || with_script=(env) # before util-linux 2.33, as in RHEL 8, the kernel does not
run() { # run COMMAND...: in the background, because bash does not hear of a signal while it waits for a command
    "${with_script[@]}" "$@" &
    wait $!
}
stop() { # stop EXIT_CODE
    trap '' TERM INT HUP
    kill $(jobs -p) 2> /dev/null || true
    wait
    exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 143' TERM

# A directory holds one run at a time. It is free again when the last process of the run has ended.
run=runs/$NAME
mkdir -p "$run"
exec 9>> "$run/.lock"
flock --nonblock 9 || [ $? -ne 1 ] || refuse "NAME = '$NAME': $run is in use by process $(cat "$run/.lock")"
echo $$ > "$run/.lock"

exec 8>> runs/.setup.lock
run flock 8 || say "$PWD/runs cannot be locked: do not start two first runs at once"
run scripts/setup.sh
exec 8>&-
export PATH="$PWD/.venv/bin:$PATH" PYTHONPATH="${MEGATRON_PATH:-$PWD/.megatron}${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONWARNINGS=ignore
world=$((PP * DP))
# Runs are compared to the last bit, so on GPUs every sum must have the same order each time. There a run by a schedule
# gives the host's step all processors, and Megatron's own step must get them as well. Measuring uses the same settings.
variables=$(python -c 'import os, sys
from megatron_ext.cpubench import allocator
from megatron_ext.megatron.device_environment import REPEATABLE, SCHEDULED
threads = 1
if allocator.may_have_cuda(os.environ):
    from megatron_ext.runtime import host_threads
    threads = host_threads.of_rank(ranks := int(sys.argv[1]), ranks)
wanted = SCHEDULED | REPEATABLE | {"OMP_NUM_THREADS": threads}
print(*(f"{name}={value}" for name, value in wanted.items() if name not in os.environ))' "$world")
[ -z "$variables" ] || export $variables

model=(--num-layers "$LAYERS" --hidden-size "$HIDDEN" --num-attention-heads "$HEADS" --seq-length "$SEQ"
    --micro-batch-size "$MICRO_BATCH_SIZE" --global-batch-size $((MICRO_BATCH_SIZE * DP * MICRO_BATCHES))
    --pipeline-model-parallel-size "$PP" --data-parallel-size "$DP" --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --transformer-impl local)
[ "$VP" -gt 1 ] && model+=(--num-virtual-stages-per-pipeline-rank "$VP")
# These options may change the model, so describing and measuring get them as well as training.
read -r -a extra <<< "${EXTRA:-}"
model+=(${extra[@]+"${extra[@]}"})
read -r -a plan_options <<< "${PLAN_OPTIONS:-}"
read -r -a within <<< "${WITHIN:-}"

sharing=$(python -m megatron_ext.launch.device_sharing "$world") || exit 2
[ -z "$sharing" ] || say "$sharing"

links=()
if [ -n "${SLOW_LINKS:-}" ]; then
    devices=$(python -c 'from megatron_ext.launch import device_sharing; print(device_sharing.visible_devices())')
    [ "$devices" = 0 ] || refuse "SLOW_LINKS = '$SLOW_LINKS': links are slowed only if ranks have no GPU; set CUDA_VISIBLE_DEVICES= to hide GPUs"
    links=(scripts/slow_links.sh $SLOW_LINKS)
    "${links[@]}" true || refuse "SLOW_LINKS = '$SLOW_LINKS': this machine cannot slow its links, see above"
    say "EMULATED links: network, host link and drive carry $SLOW_LINKS MB/s"
fi

printf '%s\n' "${model[@]}" "$ITERS" "$POLICY" "${MEGATRON_PATH:-}" ${PLAN_OPTIONS:+"$PLAN_OPTIONS"} > "$run/.settings.new"
if [ -n "${COST_TABLE:-}" ]; then # which may lie in this directory
    cp "$COST_TABLE" "$run/.cost_table.given"
    sha256sum < "$COST_TABLE" >> "$run/.settings.new"
fi
if [ -e "$run/report.md" ] || ! cmp -s "$run/.settings.new" "$run/.settings"; then
    # The calibrated cost table stays: the next run may plan with it.
    find "$run" -maxdepth 1 \( -name '*.json' -o -name '*.md' -o -name '*.png' -o -name '*.log' \) ! -name calibrated.cost_table.json -delete
fi
[ -z "${COST_TABLE:-}" ] || mv "$run/.cost_table.given" "$run/cost_table.json"
mv "$run/.settings.new" "$run/.settings"
printf '%s\n' "${model[@]}" > "$run/model_options.txt"

if [ ! -e "$run/workload.json" ]; then
    say "describing the workload"
    # The model is always the example's, even if megatron.core comes from a checkout.
    run env -u MEGATRON_PATH megatron-ext describe --out "$run/workload.json" "${model[@]}" ${plan_options[@]+"${plan_options[@]}"}
fi

corpus=runs/corpus/stdlib
if [ ! -e $corpus.idx ]; then
    say "building a corpus from the Python standard library's source"
    run python examples/corpus.py $corpus
fi

# Costs of an earlier run are used again only if they hold for this machine and these sizes.
if [ -e "$run/cost_table.json" ]; then
    if ! run ${links[@]+"${links[@]}"} megatron-ext cost check "$run/cost_table.json" --workload "$run/workload.json" --this-machine ${ALLOW_DIFFERENCES:+--allow-differences} >&2; then
        say "the cost table does not hold here: measuring again (ALLOW_DIFFERENCES=1 would use it)"
        rm -f "$run"/{cost_table,schedule,gathers_only.schedule}.json "$run"/*.metrics.json "$run"/*.trace.json
    fi
fi
if [ ! -e "$run/cost_table.json" ]; then
    say "measuring what gathers, copies and compute cost on $world ranks"
    read -r largest whole likely < <(python -m megatron_ext.workload.measured_sizes "$run/workload.json")
    on_host=$(grep -o '"on_host": *true' "$run/workload.json" || true)
    run ${links[@]+"${links[@]}"} megatron-ext measure --out "$run/cost_table.json" --dp "$DP" --pp "$PP" --hidden-size "$HIDDEN" --seq-length "$SEQ" \
        --micro-batch-size "$MICRO_BATCH_SIZE" --min-bytes 512 --max-bytes "$largest" --max-rank-bytes "$whole" ${likely:+--also-sizes "$likely"} \
        --seconds "${MEASURE_SECONDS:-60}" ${on_host:+--optimizer-on-host} ${NVME:+--nvme-path "$NVME"} \
        --modules examples/example_layers.py:layer_runners -- "${model[@]}" --data-path $corpus --num-workers 0
fi

if [ ! -e "$run/schedule.json" ]; then
    say "planning ($POLICY)"
    run megatron-ext plan --cost-table "$run/cost_table.json" --workload "$run/workload.json" --policy "$POLICY" --out "$run/schedule.json" \
        ${ALLOW_DIFFERENCES:+--allow-differences}
fi

# Stock Megatron has no zero stage 3. There the other run trains by the best plan that uses all-gathers alone.
other=(stock) what="Megatron as shipped"
if grep -q '"zero_stage": *3' "$run/workload.json"; then
    gathers=$run/gathers_only.schedule.json
    if [ ! -e "$gathers" ]; then
        say "planning by all-gathers alone"
        run megatron-ext plan --cost-table "$run/cost_table.json" --workload "$run/workload.json" --policy gathers-only --out "$gathers" \
            ${ALLOW_DIFFERENCES:+--allow-differences} || say "no plan by all-gathers alone fits: comparing with Megatron as shipped, zero stage 1"
    fi
    [ ! -e "$gathers" ] || other+=(--user-defined-schedule "$gathers") what="the best plan by all-gathers alone"
fi

train() { # train KIND OPTIONS...: one training run; replaces the subshell in which it is called
    # Runs that start together have separate sample indices, because each maps its files while it writes them.
    local kind=$1 limited=()
    shift
    [ "$kind" != scheduled ] || limited=(${within[@]+"${within[@]}"})
    exec "${with_script[@]}" ${links[@]+"${links[@]}"} ${limited[@]+"${limited[@]}"} python -m megatron_ext.launch.launcher --fork --nproc-per-node "$world" examples/pretrain_gpt_hybrid.py "${model[@]}" \
        --data-path $corpus --data-cache-path "$run/cache/$kind" --train-iters "$ITERS" \
        ${NVME:+--user-defined-schedule-nvme-path "$NVME"} --metrics-path "$run/$kind.metrics.json" "$@"
}

# Stock and schedule take turns of a few iterations, so that clock drift favours neither. If one run is missing, both train.
if [ ! -e "$run/stock.metrics.json" ] || [ ! -e "$run/scheduled.metrics.json" ]; then
    say "training $ITERS iterations of each, in turns of $TURN_ITERS: $what, and by the schedule"
    rm -rf "$run"/{stock,scheduled}.metrics.json "$run"/{stock,scheduled}.trace.json "$run/turns"
    mkdir "$run/turns"
    pair=()
    train "${other[@]}" --user-defined-schedule-trace "$run/stock.trace.json" --interleave "$run/turns,0,$TURN_ITERS" > "$run/stock.log" 2>&1 &
    pair+=($!)
    train scheduled --user-defined-schedule "$run/schedule.json" --user-defined-schedule-trace "$run/scheduled.trace.json" \
        --interleave "$run/turns,1,$TURN_ITERS" --progress-bar "stock and scheduled" &
    pair+=($!)
    for _ in "${pair[@]}"; do
        code=0
        wait -n || code=$?
        # If one run fails, the other would wait for its turn for ever.
        [ "$code" = 0 ] || { tail -n 5 "$run/stock.log" >&2; stop "$code"; }
    done
    rm -rf "$run/turns"
fi
if [ ! -e "$run/reference.metrics.json" ]; then
    say "training $ITERS iterations: Megatron's own gather at the schedule's bucket layout, for equality"
    MEGATRON_EXT_STOCK_GATHER=1 train reference --user-defined-schedule "$run/schedule.json" --progress-bar reference &
    wait $!
fi

say "reporting"
run megatron-ext report "$run"
