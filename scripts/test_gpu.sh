#!/usr/bin/env bash
# Tests on one GPU, in ten minutes: every route and placement, with 1M to 1B parameters, trained twice and compared with
# its reference to the last bit; ranks that share the device; kill and resume; doctor; timings.
#
#   bash scripts/test_gpu.sh              # exit code 0 if all pass; the report to send back is runs/gpu/report.json
#   bash scripts/test_gpu.sh --resume     # continues where the last call stopped, for the same code
#   bash scripts/test_gpu.sh --dry-run    # the same with small models on a machine without a GPU
#   bash scripts/test_gpu.sh --list       # names of all cases; --only TEXT runs those that contain it
#   bash scripts/test_gpu.sh --help       # other options: --drive DIR, --budget SECONDS, --out FILE
#
# Runs scripts/setup.sh and obeys its settings: WHEELS=DIR works without a network. WITH_TESTS=1 also installs what the
# CPU tests need; these run last if time is left.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Tests run against the pinned release.
unset MEGATRON_PATH
scripts/setup.sh
export PYTHONPATH="$PWD:$PWD/.megatron${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore
exec .venv/bin/python tests/gpu/run.py --spent $SECONDS "$@"
