#!/usr/bin/env bash
# Set up as the main job does, then run the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Tests run against the pinned release; a checkout is tested by scripts/test_checkouts.sh.
unset MEGATRON_PATH
scripts/setup.sh
export OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore
exec .venv/bin/python -m pytest -q "$@"
