"""How layers are run to be timed."""

import sys

import pytest
from layers import Layer

from megatron_ext.formats.errors import InputError
from megatron_ext.measure.layer_times import load_runners, measure_compute, micro_batch_us


def test_every_layer_runs_forward_then_backward():
    runners = {"a": Layer(8), "b": Layer(64)}
    rows = measure_compute(runners, repeats=5, warmup=2)
    assert [row.layer_kind for row in rows] == ["a", "b"]
    assert all(
        0 < row.forward_us <= row.forward_p95_us and 0 < row.backward_us <= row.backward_p95_us and row.samples == 5
        for row in rows
    )
    assert runners["a"].calls == ["forward", "backward"] * 7
    assert micro_batch_us(rows, runners) == pytest.approx(sum(row.forward_us + row.backward_us for row in rows))


def test_a_walk_comes_by_every_layer_of_a_kind():
    runners = {"a": Layer(8), "b": Layer(8)}
    runners["b"].visits = 3
    rows = measure_compute(runners, repeats=5, warmup=1)
    assert runners["b"].calls == (["forward"] * 3 + ["backward"] * 3) * 6 and [row.samples for row in rows] == [5, 15]
    a, b = rows
    assert micro_batch_us(rows, runners) == pytest.approx(
        a.forward_us + a.backward_us + 3 * (b.forward_us + b.backward_us)
    )


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("bad.py:x", "cannot be imported: SyntaxError"),
        ("at_import.py:x", r"cannot be imported: KeyError: 'inner' \(.*at_import.py:1\)"),
        ("none.py:x", "cannot be imported: ModuleNotFoundError"),
        (":x", "cannot be imported: ValueError"),
        ("os:nothing", "cannot be imported: AttributeError"),
        ("os:name", "is not a function"),
        ("os:getcwd", "failed: TypeError"),
        ("when_called.py:fails", r"failed: RuntimeError: inner \(.*when_called.py:2\)"),
        ("when_called.py:leaves", "failed: SystemExit: 3"),
    ],
)
def test_a_function_that_fails_is_named_with_the_line(tmp_path, monkeypatch, named, said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "when_called", raising=False)
    (tmp_path / "bad.py").write_text("def (:\n")
    (tmp_path / "at_import.py").write_text("raise KeyError('inner')\n")
    (tmp_path / "when_called.py").write_text(
        "def fails(args):\n    raise RuntimeError('inner')\ndef leaves(args):\n    raise SystemExit(3)\n"
    )
    with pytest.raises(InputError, match=f"^--modules: '{named}': {said}"):
        load_runners(named, [])
