"""Two hundred random edits around the hooks: each is merged correctly, or refused untouched.

Two judges besides the one that patching itself uses. Bytes: without our lines the merged file is the
owner's file. Behaviour: where the edited toy still runs, the merged one logs the same, with every
forward and backward step announced just before it happens.
"""

import ast
import random

import pytest
import toy_megatron
from toy_megatron import TEXTS, snapshot

from megatron_ext.checkout import apply, revert, verify_hooks
from megatron_ext.checkout.hook_table import FILES, HOOKS
from megatron_ext.checkout.verify import is_hook_line, strip_hooks
from megatron_ext.errors import InputError

EDITS = 200
NAMES = "model_chunk_id update_successful parser config virtual_microbatch_id output_tensor args".split()


def edit(rng: random.Random, text: str, near: list[int]) -> str:
    """One to three edits within six lines of a hook's place."""
    rows = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = min(max(0, rng.choice(near) + rng.randint(-6, 6)), len(rows) - 2)
        pad = rows[at][: len(rows[at]) - len(rows[at].lstrip())]
        kind = rng.choice("delete double add word swap indent comment blank rename move".split())
        if kind == "delete":
            del rows[at : at + rng.randint(1, 3)]
        elif kind == "double":
            rows.insert(at, rows[at])
        elif kind == "add":
            rows.insert(at, f"{pad}probe = {rng.randint(0, 9)}")
        elif kind == "word":
            rows[at] += "  # mine"
        elif kind == "swap":
            rows[at], rows[at + 1] = rows[at + 1], rows[at]
        elif kind == "indent":
            rows[at] = "    " + rows[at]
        elif kind == "comment":
            rows.insert(at, f"{pad}# a note")
        elif kind == "blank":
            rows.insert(at, "")
        elif kind == "rename":
            name = rng.choice(NAMES)
            rows = [row.replace(name, f"{name}_of_mine") for row in rows]
        elif kind == "move":
            rows.insert(min(len(rows), at + rng.randint(1, 6)), rows.pop(at))
    return "\n".join(rows)


def edit_tree(rng: random.Random, insertions) -> dict[str, str]:
    """The toy with one or two files edited; most of the time it still parses."""
    texts = dict(TEXTS)
    for path in rng.sample(FILES, rng.randint(1, 2)):
        near = [after for i in insertions.values() if i.path == path for after, _ in i.lines]
        for _ in range(20):
            texts[path] = edit(rng, TEXTS[path], near)
            try:
                ast.parse(texts[path])
            except SyntaxError:
                if rng.random() < 0.05:
                    break
                continue
            break
    return texts


def is_announced(log: list) -> bool:
    """Every step of a schedule comes right after its own hook (one other event may stand between)."""
    for number, event in enumerate(log):
        if isinstance(event, tuple) and event[0] in ("F", "B"):
            name = "pre_forward" if event[0] == "F" else "pre_backward"
            if (name, *event[1:]) not in log[max(0, number - 2) : number]:
                return False
    return log.count(("end_iteration",)) == sum(
        isinstance(e, tuple) and e[0] in ("begin_iteration", "begin_steps") for e in log
    )


def behaviour(texts, monkeypatch):
    """The log of the toy, or None where the edits have broken it."""
    try:
        return toy_megatron.run(texts, monkeypatch)
    except Exception:
        return None


def test_random_edits(clone, toy_insertions, monkeypatch):
    outcomes = {"exact": 0, "merged": 0, "refused": 0, "ran": 0}
    ours = {"add_arguments", "on_train_setup", "on_train_end", "on_ddp_built", "on_params_updated", "begin_iteration"}
    ours |= {"begin_steps", "pre_forward", "pre_backward", "post_backward", "end_iteration"}
    for seed in range(EDITS):
        texts = edit_tree(random.Random(seed), toy_insertions)
        for path in FILES:
            (clone / path).write_bytes(texts[path].encode())
        before = snapshot(clone)
        try:
            report = apply(clone)
        except InputError:
            assert snapshot(clone) == before, f"seed {seed}"
            outcomes["refused"] += 1
            continue
        assert report.state == "applied" and verify_hooks(clone) == [], f"seed {seed}"
        patched = {p: (clone / p).read_bytes().decode() for p in FILES}
        assert all(strip_hooks(patched[p]) == texts[p] for p in FILES), f"seed {seed}"
        assert sum(is_hook_line(r) for t in patched.values() for r in t.split("\n")) == len(HOOKS)
        plain, hooked = behaviour(texts, monkeypatch), behaviour(patched, monkeypatch)
        if plain is not None:
            assert hooked is not None, f"seed {seed}"
            assert [e for e in hooked if not (isinstance(e, tuple) and e[0] in ours)] == plain, f"seed {seed}"
            # An edit may itself double or drop steps of the toy; it cannot part a step from its hook.
            assert is_announced(hooked), f"seed {seed}"
            outcomes["ran"] += 1
        merged = any(f.detail == "merged" for f in report.files)
        outcomes["merged" if merged else "exact"] += 1
        revert(clone)
        assert snapshot(clone) == before, f"seed {seed}"
    assert outcomes["merged"] > 40 and outcomes["refused"] > 40 and outcomes["ran"] > 30, outcomes
    print(outcomes)


def test_the_judge_of_behaviour_sees_a_hook_that_is_late(toy_insertions, monkeypatch):
    patched = {p: i.apply(TEXTS[p].encode()).decode() for (p, _), i in toy_insertions.items()}
    assert is_announced(toy_megatron.run(patched, monkeypatch))
    for path, text in patched.items():
        rows = text.split("\n")
        number = next((n for n, r in enumerate(rows) if "pre_backward(" in r and is_hook_line(r)), None)
        if number is not None:
            rows[number] = rows[number].replace("pre_backward(virtual", "pre_backward(1 + virtual")
            late = {**patched, path: "\n".join(rows)}
    with pytest.raises(AssertionError):
        assert is_announced(toy_megatron.run(late, monkeypatch))
