#!/usr/bin/env bash
# What a GPU has to show, on one GPU in ten minutes: every route and placement, at sizes from 1M to 1B parameters, trained
# twice and compared with its reference to the last bit; ranks that share the device; kill and resume; doctor; timings.
#
#   bash scripts/test_gpu.sh              # ends 0 where all passed; the report to send back is runs/gpu/report.json
#   bash scripts/test_gpu.sh --resume     # goes on where the last call stopped, for the same code
#   bash scripts/test_gpu.sh --dry-run    # the same in small on a machine without a GPU
#   bash scripts/test_gpu.sh --list       # names of all cases; --only TEXT runs those that contain it
#   bash scripts/test_gpu.sh --help       # other options: --drive DIR, --budget SECONDS, --out FILE
#
# Sets up as scripts/setup.sh does and obeys its settings: WHEELS=DIR works without a network, WITH_TESTS=1 also installs
# what the CPU suite needs, which is run last where time is left.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Tests run against the pinned release.
unset MEGATRON_PATH
scripts/setup.sh
export PYTHONPATH="$PWD:$PWD/.megatron${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore
exec .venv/bin/python tests/gpu/run.py --spent $SECONDS "$@"
