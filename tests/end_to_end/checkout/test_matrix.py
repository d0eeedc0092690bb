"""scripts/checkout_matrix.py finds the trees of a fork, in whatever folder, and judges them truly."""

import pytest
import toy_megatron
from checkout_fixtures import load_script
from toy_megatron import TEXTS, git

from megatron_ext.checkout.hook_table import DDP, FILES, HOOKS, SCHEDULES
from megatron_ext.checkout.place_hooks import place_hooks


@pytest.fixture(scope="module")
def matrix():
    return load_script("checkout_matrix")


@pytest.fixture
def fork(tmp_path):
    """A repository with the toy in a folder: as it is, with comments, with two places, and without one of them."""
    root = tmp_path / "owner+fork" / "repo"
    tree = root / "third_party" / "megatron"
    toy_megatron.write(tree)
    git(root, "init", "-q", "-b", "main")
    changes = {
        "comments": (SCHEDULES, "    chunks = len(model)\n", "    chunks = len(model)\n\n    # a note\n\n"),
        "twice": (DDP, "class Dist", "class DistributedDataParallel: ...\n\n\nclass Dist"),
        "older": (DDP, "self.overlap_param_gather_with_optimizer_step = None", "pass"),
    }
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "toy")
    for name, (path, old, new) in changes.items():
        git(root, "checkout", "-q", "-b", name, "main")
        assert old in TEXTS[path]
        (tree / path).write_text(TEXTS[path].replace(old, new))
        git(root, "commit", "-q", "-a", "-m", name)
    git(root, "checkout", "-q", "main")
    git(root, "branch", "same")
    return root


def test_every_head_is_tried_once_and_told_apart(matrix, fork):
    sources = matrix.heads(fork, set())
    assert [(s.group, s.prefix) for s in sources] == [("owner/fork", "third_party/megatron/")] * 4
    outcomes = {s.label: matrix.try_tree(s) for s in sources}
    assert {label: o.state for label, o in outcomes.items()} == {
        "HEAD": "placed",
        "comments": "placed",
        "twice": "refused",
        "older": "old",
    }
    assert "2 times class DistributedDataParallel" in outcomes["twice"].how
    assert outcomes["comments"].exact == 0
    known = outcomes["HEAD"].neighbours
    assert matrix.beside_known(outcomes["comments"], known) == len(HOOKS)


def test_the_second_judge_sees_a_hook_among_strangers(matrix):
    known = {}
    for path in FILES:
        known |= matrix.neighbours(path, place_hooks(path, TEXTS[path])[0])
    assert len(known) == len(HOOKS) and all(known.values())
    text = (
        TEXTS[DDP]
        .replace("        self.overlap_param", "        self.other = None\n        self.overlap_param")
        .replace("optimizer_step = None", "optimizer_step = 5")
    )
    found = matrix.neighbours(DDP, place_hooks(DDP, text)[0])
    assert not found["ddp.built"] & known["ddp.built"]
