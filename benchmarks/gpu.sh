#!/usr/bin/env bash
# A GPU owner's command: NOT YET RUN ON A GPU. Please send back runs/gpu/ if it fails on yours.
#
#   bash benchmarks/gpu.sh              # `megatron-ext doctor` first, then the measurements
#   bash benchmarks/gpu.sh --dry-run    # every line of it on the CPU, in small: no figure means anything
#
# One GPU: measures a cost table on it, then streams a model larger than BUDGET bytes of whole
# parameters through the cpu route (and nvme, where NVME names a directory on a drive), against
# torch FSDP2 with CPU offload on the same layers. Several GPUs: stock beside scheduled training.
#
# It needs an image with a CUDA PyTorch, and sets up .venv on top of it (scripts/setup.sh): nothing of the image is changed, so
# an externally managed Python (PEP 668) is no hindrance. Without a network: WHEELS names a folder, made where there is one by
#     pip download --dest wheels -c constraints.txt --no-deps megatron-core==VERSION --ignore-requires-python
#     pip download --dest wheels -c constraints.txt setuptools wheel pip click matplotlib msgspec ortools rich einops pybind11
# for the image's Python (--python-version 3.12 --only-binary=:all:). In a container: docker run --gpus all --ipc=host --ulimit memlock=-1
#
# Settings (environment): OUT (default runs/gpu)  BUDGET (bytes, 2 GiB)  NVME (directory)  WHEELS (directory)  PYTHON
#   LAYERS HIDDEN SEQ MICRO_BATCH_SIZE ITERS MEASURE_SECONDS  PP VP DP (several GPUs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf '\033[1m==> %s\033[0m\n' "$*" >&2; }
refuse() { printf 'gpu.sh: %s\n' "$*" >&2; exit 2; }

device=cuda
case "${1:-}" in
    "") ;;
    --dry-run)
        device=cpu
        export BUDGET=${BUDGET:-800000} LAYERS=${LAYERS:-4} HIDDEN=${HIDDEN:-128} SEQ=${SEQ:-32} ITERS=${ITERS:-4}
        export MEASURE_SECONDS=${MEASURE_SECONDS:-5} NAME=${NAME:-gpu-dry-run} OUT=${OUT:-runs/gpu-dry-run}
        ;;
    *) refuse "'$1': expected --dry-run or nothing" ;;
esac

OUT=${OUT:-runs/gpu} BUDGET=${BUDGET:-$((2 << 30))} NVME=${NVME:-} ITERS=${ITERS:-12}
LAYERS=${LAYERS:-24} HIDDEN=${HIDDEN:-4096} SEQ=${SEQ:-1024} MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1} MEASURE_SECONDS=${MEASURE_SECONDS:-60}
for name in BUDGET ITERS LAYERS HIDDEN SEQ MICRO_BATCH_SIZE MEASURE_SECONDS; do
    [[ ${!name} =~ ^[1-9][0-9]{0,12}$ ]] || refuse "$name = '${!name}': expected a whole number of at least 1"
done
[ "$ITERS" -ge 4 ] || refuse "ITERS = '$ITERS': at least 4 are needed: two warm up"
[ -z "$NVME" ] || [ -d "$NVME" ] || refuse "NVME = '$NVME': no such directory"

if [ $device = cuda ]; then
    found=
    for candidate in ${PYTHON:-python3 python}; do
        devices=$("$candidate" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)' 2> /dev/null) || continue
        found=$candidate
        break
    done
    [ -n "$found" ] || refuse "no Python here has torch: use a CUDA PyTorch image, or set PYTHON"
    [ "$devices" -ge 1 ] || refuse "torch sees no CUDA device here; nothing was started"
    export PYTHON=$found
else
    devices=2
fi

scripts/setup.sh # reads WHEELS
PYTHON=.venv/bin/python
# Programs in benchmarks/ find the package by it.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

say "doctor"
"$PYTHON" -m megatron_ext doctor --out "$OUT/doctor_report.json" --device $device ${NVME:+--nvme "$NVME"} ||
    refuse "doctor found what will not work, see above and $OUT/doctor_report.json"

say "one GPU: measuring what copies cost, alone and beside compute"
links=cpu,publish,optimizer,compute,contention
[ -n "$NVME" ] && links=$links,nvme
"$PYTHON" -m megatron_ext measure --out "$OUT/cost_table.one_gpu.json" --device $device --dp 1 --links "$links" \
    --hidden-size "$HIDDEN" --seq-length "$SEQ" --micro-batch-size "$MICRO_BATCH_SIZE" --seconds "$MEASURE_SECONDS" \
    ${NVME:+--nvme-path "$NVME"}
"$PYTHON" -m megatron_ext cost show "$OUT/cost_table.one_gpu.json"

say "one GPU: a model larger than $BUDGET bytes of whole parameters, streamed"
CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} "$PYTHON" benchmarks/gpu_streaming.py --cost-table "$OUT/cost_table.one_gpu.json" \
    --budget-bytes "$BUDGET" --layers "$LAYERS" --hidden-size "$HIDDEN" --tokens $((SEQ * MICRO_BATCH_SIZE)) --iters "$ITERS" \
    ${NVME:+--nvme-path "$NVME"} --out "$OUT/gpu_streaming.json" --device $device

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
