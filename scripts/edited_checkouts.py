"""Train trees that were edited at random and then patched by the syntax tree. Prints one table.

    python scripts/edited_checkouts.py MIRROR [TAG] [--trees 5]

The edits are those of tests/helpers/random_edits.py: one to three within six lines of a hook, in one
or two files. An edit is only counted, and not trained further, if the hooks are refused, if every file is still that of
a release, or if the edited tree does not train unpatched. Otherwise its patched training must equal its own unpatched
training to the last bit, and a scheduled training must equal Megatron's own gather with the same buckets. TAG is
core_v0.16.1 by default.
"""

import argparse
import random
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

from checkout_under_test import Checkout, Failed, build_corpus, extract

from megatron_ext import checkout
from megatron_ext.checkout.hook_table import FILES
from megatron_ext.checkout.patchset import blob_id, known_files
from megatron_ext.formats.errors import InputError

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from random_edits import EDITS, edit_files


class Edited:
    """The edits of one release, one after the other.

    Attributes:
        outcomes: number of edits by outcome.
        rows: one row of the table for every tree that was trained.
    """

    def __init__(self, tree: Path, work: Path, data: Path, iterations: int, timeout_s: float):
        self.tree, self.work, self.data, self.iterations, self.timeout_s = tree, work, data, iterations, timeout_s
        self.originals = {f: (tree / f).read_bytes().decode() for f in FILES}
        self.entries = [known_files()[f, blob_id(text.encode())] for f, text in self.originals.items()]
        self.outcomes = {"refused": 0, "every file is exact": 0, "does not train unpatched": 0, "trained": 0}
        self.rows: list[list[str]] = []

    def try_edit(self, seed: int) -> str:
        """Try one edit and return its outcome, a key of ``outcomes``.

        Raises:
            Failed: the tree trains unpatched; patched it does not train, or not to the same result.
        """
        texts = edit_files(random.Random(seed), self.originals, self.entries)
        for file, text in texts.items():
            (self.tree / file).write_bytes(text.encode())
        edited = [file for file in FILES if texts[file] != self.originals[file]]
        try:
            placed = [f.file for f in checkout.apply(self.tree, dry_run=True).files if f.detail == "syntax tree"]
        except InputError:
            return "refused"
        if not placed:
            return "every file is exact"
        tested = Checkout(str(seed), self.tree, self.work / str(seed), self.data, self.iterations, self.timeout_s)
        tested.work.mkdir()
        try:
            tested.stock()
        except Failed:
            return "does not train unpatched"
        cells = [getattr(tested, cell)() for cell in ("patch", "plain", "scheduled", "revert", "bytes")]
        self.rows.append([str(seed), ", ".join(Path(f).name for f in edited), *cells])
        return "trained"

    def run(self, trees: int):
        """Try one edit after another until ``trees`` of them were trained. Yields each seed and its outcome."""
        for seed in range(EDITS):
            try:
                outcome = self.try_edit(seed)
            finally:
                checkout.revert(self.tree)
            self.outcomes[outcome] += 1
            yield seed, outcome
            if self.outcomes["trained"] == trees:
                return


def main() -> int:
    """Train edited trees. Returns 1 if one differs from its own unpatched run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("mirror", help="git clone or mirror of Megatron-LM with its tags")
    parser.add_argument("tag", nargs="?", default="core_v0.16.1")
    parser.add_argument("--trees", type=int, default=5, help="number of edited trees to train")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--timeout-s", type=float, default=180, help="an edit may let training hang")
    options = parser.parse_args()
    failure = None
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch).resolve()
        tree = extract(options.mirror, options.tag, work / "tree")
        edits = Edited(tree, work, build_corpus(tree, work), options.iterations, options.timeout_s)
        seed = -1
        try:
            for seed, outcome in edits.run(options.trees):
                print(f"edit {seed}: {outcome}", file=sys.stderr, flush=True)
        except Failed as error:
            failure = f"FAILED: edit {seed + 1}: {error}"
    print(
        f"`scripts/edited_checkouts.py MIRROR {options.tag} --trees {options.trees}`, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC\n"
    )
    for row in (
        ["edit", "edited", "patch", "patched = unpatched", "scheduled = reference", "revert", "bytes"],
        ["---"] * 7,
        *edits.rows,
    ):
        print("| " + " | ".join(row) + " |")
    print("\n" + ", ".join(f"{name}: {count}" for name, count in edits.outcomes.items()))
    if failure:
        print(failure)
    return 1 if failure else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"edited_checkouts: {error}")
