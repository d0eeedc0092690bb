#!/usr/bin/env bash
# A GPU owner's command: NOT YET RUN ON A GPU. Please send back runs/gpu/ if it fails on yours.
#
#   bash benchmarks/gpu.sh
#
# One GPU: measures a cost table on it, then streams a model larger than BUDGET bytes of whole
# parameters through the cpu route (and nvme, where NVME names a directory on a drive), against
# torch FSDP2 with CPU offload on the same layers. Several GPUs: stock beside scheduled training.
# Needs a CUDA PyTorch image and this package's wheels; no network (WHEELS names their folder; with several GPUs
# setuptools, wheel and megatron-core must be there too).
#
# Settings (environment): OUT (default runs/gpu)  BUDGET (bytes, 2 GiB)  NVME (directory)
#   LAYERS HIDDEN SEQ MICRO_BATCH_SIZE ITERS MEASURE_SECONDS  PP VP DP (several GPUs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
refuse() { printf 'gpu.sh: %s\n' "$*" >&2; exit 2; }

PYTHON=${PYTHON:-python3}
[ -x .venv/bin/python ] && PYTHON=${PYTHON_OVERRIDE:-.venv/bin/python}
command -v "$PYTHON" > /dev/null || refuse "PYTHON = '$PYTHON': not found"
"$PYTHON" -c 'import torch' 2> /dev/null || refuse "$PYTHON has no torch: use a CUDA PyTorch image, or set PYTHON"
devices=$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
[ "$devices" -ge 1 ] || refuse "torch sees no CUDA device here; nothing was started"

OUT=${OUT:-runs/gpu} BUDGET=${BUDGET:-$((2 << 30))} NVME=${NVME:-} ITERS=${ITERS:-12}
LAYERS=${LAYERS:-24} HIDDEN=${HIDDEN:-4096} SEQ=${SEQ:-1024} MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1} MEASURE_SECONDS=${MEASURE_SECONDS:-60}
for name in BUDGET ITERS LAYERS HIDDEN SEQ MICRO_BATCH_SIZE MEASURE_SECONDS; do
    [[ ${!name} =~ ^[1-9][0-9]{0,12}$ ]] || refuse "$name = '${!name}': expected a whole number of at least 1"
done
[ "$ITERS" -ge 4 ] || refuse "ITERS = '$ITERS': at least 4 are needed: two warm up"
[ -z "$NVME" ] || [ -d "$NVME" ] || refuse "NVME = '$NVME': no such directory"

# Programs in benchmarks/ find the package by it, installed or not.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${WHEELS:-}" ]; then # for scripts/setup.sh as well
    [ -d "$WHEELS" ] || refuse "WHEELS = '$WHEELS': no such directory"
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$WHEELS"
fi
if ! "$PYTHON" -c 'import click, matplotlib, msgspec, numpy, ortools, rich' 2> /dev/null; then
    if [ -n "${WHEELS:-}" ]; then
        say "installing from $WHEELS, without a network"
        "$PYTHON" -m pip install --quiet --no-build-isolation -e .
    else
        say "installing"
        "$PYTHON" -m pip install --quiet -e .
    fi
fi
mkdir -p "$OUT"

say "one GPU: measuring what copies cost, alone and beside compute"
links=cpu,publish,optimizer,compute,contention
[ -n "$NVME" ] && links=$links,nvme
"$PYTHON" -m megatron_ext measure --out "$OUT/cost_table.one_gpu.json" --device cuda --dp 1 --links "$links" \
    --hidden-size "$HIDDEN" --seq-length "$SEQ" --micro-batch-size "$MICRO_BATCH_SIZE" --seconds "$MEASURE_SECONDS" \
    ${NVME:+--nvme-path "$NVME"}
"$PYTHON" -m megatron_ext cost show "$OUT/cost_table.one_gpu.json"

say "one GPU: a model larger than $BUDGET bytes of whole parameters, streamed"
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} "$PYTHON" benchmarks/gpu_streaming.py --cost-table "$OUT/cost_table.one_gpu.json" \
    --budget-bytes "$BUDGET" --layers "$LAYERS" --hidden-size "$HIDDEN" --tokens $((SEQ * MICRO_BATCH_SIZE)) --iters "$ITERS" \
    ${NVME:+--nvme-path "$NVME"} --out "$OUT/gpu_streaming.json"

if [ "$devices" -lt 2 ]; then
    say "one GPU: nothing to gather among several; done"
    exit 0
fi
PP=${PP:-1} VP=${VP:-1} DP=${DP:-$((devices / ${PP:-1}))}
[ $((PP * DP)) -le "$devices" ] || refuse "PP x DP = $((PP * DP)): only $devices CUDA devices"
say "$devices GPUs: stock beside scheduled training"
PP=$PP VP=$VP DP=$DP LAYERS=$LAYERS HIDDEN=$HIDDEN SEQ=$SEQ MICRO_BATCH_SIZE=$MICRO_BATCH_SIZE ITERS=$ITERS \
    HEADS=${HEADS:-$((HIDDEN / 128))} NAME=${NAME:-gpu} MEASURE_SECONDS=$MEASURE_SECONDS EXTRA="${EXTRA:---bf16}" \
    bash scripts/pretrain_gpt_hybrid.sh
