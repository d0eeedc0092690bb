"""Patch, train and revert releases of Megatron-LM, and print one table (see test_checkouts.sh).

For every release: take its tree, train it unpatched, patch it, verify every hook, train it without
our options (must equal the unpatched run to the last bit), train it by a schedule (must equal
Megatron's own gather with the same bucket layout to the last bit), revert, compare all bytes.
"""

import argparse
import sys
import tempfile
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import checkout_matrix
import core_tree
from checkout_under_test import LAYOUTS, Checkout, Failed, build_corpus, extract

from megatron_ext.formats.errors import InputError

TAGS = (
    "core_v0.10.0 core_v0.11.0 core_v0.12.3 core_v0.13.1 core_v0.14.0 core_v0.15.3 "
    "core_v0.16.1 core_v0.17.1 core_v0.18.2 core_v0.19.0 main"
).split()
PACKAGES = "0.12.3 0.13.1 0.14.0 0.15.3 0.16.1 0.17.1 0.18.2 0.19.0".split()
PACKAGE_CELLS = "patch check revert bytes".split()
CELLS = "stock patch check plain scheduled revert bytes".split()
LAYOUT_CELLS = {f"{layout}-{zero}": (layout, zero) for layout in LAYOUTS for zero in (1, 3)}
"""Further scheduled trainings with --layouts: every order of steps with every zero stage."""


def trees(options, work: Path):
    """(name, tree) of every chosen release."""
    for name in options.tags or (PACKAGES if options.mirror == "pypi" else TAGS):
        tree = work / name / "tree"
        yield name, core_tree.obtain(name, tree) if options.mirror == "pypi" else extract(options.mirror, name, tree)


def chosen_cells(options) -> list[str]:
    """The steps to run, in order.

    Raises:
        InputError: --cells names a step that does not exist.
    """
    train = not (options.mirror == "pypi" or options.no_train)
    cells = CELLS if train else PACKAGE_CELLS
    if options.layouts and train:
        cells = [
            *cells[:-2],
            *(name for name, layout in LAYOUT_CELLS.items() if layout != ("interleaved", 1)),
            *cells[-2:],
        ]
    if options.cells:
        unknown = set(options.cells.split(",")) - {*cells, *(LAYOUT_CELLS if train else ())}
        if unknown:
            raise InputError(
                f"expected some of {','.join([*cells, *LAYOUT_CELLS])}", field="--cells", value=options.cells
            )
        cells = options.cells.split(",")
    return cells


def step(tested: Checkout, cell: str):
    """The function that runs one cell of the table."""
    return partial(tested.scheduled, *LAYOUT_CELLS[cell]) if cell in LAYOUT_CELLS else getattr(tested, cell)


def main() -> int:
    """Test every release. Returns 1 if a cell of the table failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mirror", help="git clone or mirror of Megatron-LM with its tags, or pypi")
    parser.add_argument("tags", nargs="*", help="tags (or versions, for pypi); by default all supported ones")
    parser.add_argument("--no-train", action="store_true", help="only patch, verify and revert")
    parser.add_argument(
        "--layouts", action="store_true", help="also 1F1B, no pipeline, tensor parallelism, and zero stage 3"
    )
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--cells", help="run only these steps, e.g. patch,check,1f1b-3,revert,bytes")
    parser.add_argument("--keep", type=Path, help="keep trees, logs and checkpoints in this directory")
    parser.add_argument("--commits", type=int, default=0, help="no training: draw N commits of main since 0.12")
    parser.add_argument("--seed", type=int, default=0, help="seed for drawing commits")
    parser.add_argument("--at", nargs="+", default=[], help="no training: these commits of the mirror")
    parser.add_argument("--forks", nargs="+", default=[], type=Path, help="no training: all heads of these git clones")
    options = parser.parse_args()
    if options.commits or options.forks or options.at:
        print_command(options)
        return checkout_matrix.run(options.mirror, options.commits, options.seed, options.forks, options.at)
    cells = chosen_cells(options)
    rows, failures = [], []
    with tempfile.TemporaryDirectory() as scratch:
        work = (options.keep or Path(scratch)).resolve()
        data = None
        for name, tree in trees(options, work):
            if data is None and set(cells) - set(PACKAGE_CELLS):
                data = build_corpus(tree, work)
            row = [name]
            tested = Checkout(name, tree, tree.parent, data, options.iterations)
            for cell in cells:
                try:
                    row.append(step(tested, cell)())
                except (Failed, InputError, AssertionError) as error:
                    row.append("FAILED")
                    failures.append(f"{name}, {cell}: {error}")
                print(f"{name}: {cell}: {row[-1]}", file=sys.stderr, flush=True)
            rows.append(row)
    print_table(["release", *cells], rows, failures, options)
    return 1 if failures else 0


def print_command(options) -> None:
    """The command and the time, above the tables."""
    # Paths of this machine mean nothing to a reader of the table.
    names = {str(options.keep): "DIR", options.mirror: "MIRROR" if "/" in options.mirror else options.mirror}
    names |= {str(fork): "" for fork in options.forks[1:]} | {str(fork): "DIR..." for fork in options.forks[:1]}
    words = [names.get(word, word) for word in sys.argv[1:]]
    print(f"`scripts/test_checkouts.sh {' '.join(filter(None, words))}`, ", end="")
    print(f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n")


def print_table(head, rows, failures, options) -> None:
    """Print the table in Markdown, with failures and the steps that were not run."""
    print_command(options)
    for row in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(row) + " |")
    print()
    left_out = [cell for cell in CELLS if cell not in head]
    if left_out:
        why = " The packages have no pretrain_gpt.py to train with." if options.mirror == "pypi" else ""
        print(f"Not run: {', '.join(left_out)}.{why}")
    for failure in failures:
        print(f"FAILED: {failure}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"test_checkouts: {error}")
