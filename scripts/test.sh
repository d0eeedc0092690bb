#!/usr/bin/env bash
# Set up as the main job does, check code and docs, then run all tests except those in tests/nightly.
#
#   scripts/test.sh                    # everything that CI runs
#   scripts/test.sh tests/unit/cost    # pytest alone, with these arguments
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Tests run against the pinned release; a checkout is tested by scripts/test_checkouts.sh.
unset MEGATRON_PATH
# Some images set it. Then each of hundreds of processes would compile the package, torch and the tests again.
unset PYTHONDONTWRITEBYTECODE
PIP_COMPILE=0 WITH_TESTS=1 scripts/setup.sh # a module is compiled when it is imported; a tenth of the installed ones are
workers=$(($(nproc) + 2)) # before OMP_NUM_THREADS is set, which nproc obeys
# These tests run as on a machine without a GPU, on every machine. Set after the set-up, which looks for a GPU.
export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1 PYTHONWARNINGS=ignore PATH="$PWD/.venv/bin:$PATH"
# A few tests use two threads a rank. Threads that wait for each other must not take processors from other tests.
export OMP_WAIT_POLICY=passive

if [ $# -gt 0 ]; then
    exec python -m pytest "$@"
fi

check() {
    local failed=0
    ruff check || failed=1
    ruff format --check || failed=1
    pyright || failed=1
    pyright -p benchmarks/pyrightconfig.json || failed=1
    # Not --quiet: --strict does not count warnings that are not printed, so a broken link would pass.
    mkdocs build --strict --site-dir "$said/site" || failed=1
    return $failed
}

said=$(mktemp -d)
trap 'rm -rf "$said"' EXIT
check > "$said/checks" 2>&1 & # runs during the first tests, which wait for processes; printed after the last test
checks=$! status=0
# Tests that wait for processes they have started come first. There are two workers more than processors, because each
# worker waits for much of its time. All tests of a file run in one worker (tests/conftest.py).
python -m pytest -n "$workers" --dist loadfile --no-loadscope-reorder \
    tests/end_to_end/adopting tests/distributed tests/end_to_end/main_job tests/end_to_end/cli tests/end_to_end/checkout \
    tests/unit || status=1
wait "$checks" || status=1
cat "$said/checks"
exit $status
