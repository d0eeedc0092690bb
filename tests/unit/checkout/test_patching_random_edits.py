"""Random edits around the hooks: each is patched correctly, or refused untouched.

Two judges besides the one that patching itself uses. Bytes: without our lines the patched file is the
owner's file. Behaviour: where the edited toy still runs, the patched one logs the same, with every
forward and backward step announced just before it happens.
"""

import random

import pytest
import toy_megatron
from random_edits import EDITS, edit_files
from toy_megatron import TEXTS, snapshot
from variations import some

from megatron_ext.checkout import apply, revert, verify_hooks
from megatron_ext.checkout.hook_table import FILES, HOOKS
from megatron_ext.checkout.place_hooks import place_hooks
from megatron_ext.checkout.verify import is_hook_line, strip_hooks
from megatron_ext.formats.errors import InputError


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


def test_random_edits(archive, toy_entries, monkeypatch):
    outcomes = {"exact": 0, "placed": 0, "refused": 0, "ran": 0}
    ours = {"add_arguments", "on_train_setup", "on_train_end", "on_ddp_built", "on_params_updated", "begin_iteration"}
    ours |= {"begin_steps", "pre_forward", "pre_backward", "post_backward", "end_iteration"}
    seeds = some(range(EDITS), EDITS // 4)
    for seed in seeds:
        texts = edit_files(random.Random(seed), TEXTS, toy_entries.values())
        for path in FILES:
            (archive / path).write_bytes(texts[path].encode())
        before = snapshot(archive)
        try:
            report = apply(archive)
        except InputError:
            assert snapshot(archive) == before, f"seed {seed}"
            outcomes["refused"] += 1
            continue
        assert report.state == "applied" and verify_hooks(archive) == [], f"seed {seed}"
        patched = {p: (archive / p).read_bytes().decode() for p in FILES}
        assert all(strip_hooks(p, patched[p]) == texts[p] for p in FILES), f"seed {seed}"
        assert sum(is_hook_line(r) for t in patched.values() for r in t.split("\n")) == len(HOOKS)
        plain, hooked = behaviour(texts, monkeypatch), behaviour(patched, monkeypatch)
        if plain is not None:
            assert hooked is not None, f"seed {seed}"
            assert [e for e in hooked if not (isinstance(e, tuple) and e[0] in ours)] == plain, f"seed {seed}"
            # An edit may itself double or drop steps of the toy; it cannot part a step from its hook.
            assert is_announced(hooked), f"seed {seed}"
            outcomes["ran"] += 1
        placed = any(f.detail == "syntax tree" for f in report.files)
        outcomes["placed" if placed else "exact"] += 1
        revert(archive)
        assert snapshot(archive) == before, f"seed {seed}"
    half = len(seeds) / 2
    assert outcomes["placed"] > half and outcomes["refused"] > half / 5 and outcomes["ran"] > half, outcomes
    print(outcomes)


def test_the_judge_of_behaviour_sees_a_hook_that_is_late(monkeypatch):
    patched = {path: place_hooks(path, TEXTS[path])[0] for path in FILES}
    assert is_announced(toy_megatron.run(patched, monkeypatch))
    for path, text in patched.items():
        rows = text.split("\n")
        number = next((n for n, r in enumerate(rows) if "pre_backward(" in r and is_hook_line(r)), None)
        if number is not None:
            rows[number] = rows[number].replace("pre_backward(virtual", "pre_backward(1 + virtual")
            late = {**patched, path: "\n".join(rows)}
    with pytest.raises(AssertionError):
        assert is_announced(toy_megatron.run(late, monkeypatch))
