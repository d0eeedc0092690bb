"""Equality to the last bit, and what is said where there is none."""

import math
from pathlib import Path

import msgspec
import pytest
from run_files import change, make_metrics

from megatron_ext.formats import json_files
from megatron_ext.formats import metrics as metrics_file
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.metrics import Metrics
from megatron_ext.report.equality import compare_metrics, largest_loss_difference


def metrics(**changes) -> Metrics:
    return msgspec.convert({**make_metrics(5, 4), **changes}, Metrics)


def changed(name: str, index: int, value) -> Metrics:
    entries = list(getattr(metrics(), name))
    entries[index] = value
    return metrics(**{name: entries})


def test_equal_runs_are_equal():
    assert compare_metrics(metrics(), metrics()) == (True, ())


def test_without_a_reference_nothing_is_claimed():
    found = compare_metrics(None, metrics())
    assert found.bitwise is None
    assert "not checked" in found.text and "bitwise" not in found.text


@pytest.mark.parametrize(
    ("name", "said"), [("loss", "loss at iteration 4"), ("grad_norm", "gradient norm at iteration 4")]
)
def test_one_bit_in_one_iteration_is_found(name, said):
    off_by_one_bit = math.nextafter(getattr(metrics(), name)[3], 9.0)
    found = compare_metrics(metrics(), changed(name, 3, off_by_one_bit))
    assert found.bitwise is False
    assert len(found.differences) == 1 and found.differences[0].startswith(said)
    assert repr(off_by_one_bit) in found.differences[0]
    assert "NOT equal" in found.text


def test_the_first_of_several_iterations_is_named():
    found = compare_metrics(metrics(), metrics(loss=[0.5] * 5))
    assert "at iteration 1 " in found.differences[0] and "4 more" in found.differences[0]


def test_zero_and_minus_zero_differ():
    assert compare_metrics(changed("loss", 1, 0.0), changed("loss", 1, -0.0)).bitwise is False


def test_a_different_parameter_names_its_rank():
    found = compare_metrics(metrics(), changed("parameter_sha256", 2, "f" * 64))
    assert found.differences == ("parameters after the last iteration on rank 2",)
    assert compare_metrics(metrics(), metrics(parameter_sha256=["0" * 64])).bitwise is False


def test_a_loss_that_is_no_number_equals_nothing():
    broken = changed("loss", 2, None)
    assert compare_metrics(broken, broken).bitwise is False
    assert "not a number" in compare_metrics(broken, broken).text


def test_a_skipped_step_may_be_equal():
    skipped = changed("grad_norm", 0, None)
    assert compare_metrics(skipped, skipped).bitwise is True
    assert compare_metrics(metrics(), skipped).bitwise is False


def test_evaluations_are_compared():
    assert (
        compare_metrics(metrics(eval_loss=[1.0, 2.0]), metrics(eval_loss=[1.0, 2.5]))
        .differences[0]
        .startswith("evaluation loss at evaluation 2")
    )
    assert compare_metrics(metrics(eval_loss=[1.0]), metrics()).bitwise is False


def test_the_difference_from_stock_is_relative():
    assert largest_loss_difference(metrics(loss=[4.0] * 5), metrics(loss=[4.0, 3.0, 4.0, None, 4.5])) == 0.25
    assert largest_loss_difference(metrics(loss=[None] * 5), metrics()) is None


def written(path: Path, function=lambda value: None) -> Path:
    json_files.save(path / "m.json", make_metrics(5, 4))
    change(path / "m.json", function)
    return path / "m.json"


def test_metrics_come_back_to_the_last_bit(tmp_path):
    third = 1 / 3
    json_files.save(tmp_path / "m.json", {**make_metrics(5, 4), "loss": [third, math.nan, 1e-300, -0.0, 5e22]})
    loss = metrics_file.load(tmp_path / "m.json").loss
    assert [None if value is None else value.hex() for value in loss] == [
        third.hex(),
        None,
        (1e-300).hex(),
        (-0.0).hex(),
        (5e22).hex(),
    ]


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        (lambda m: m.pop("loss"), "loss"),
        (lambda m: m.update(note=1), "note"),
        (lambda m: m["iteration_us"].pop(), "iteration_us"),
        (lambda m: m["grad_norm"].append(1.0), "grad_norm"),
        (lambda m: m["iteration_us"].__setitem__(3, 0), "iteration_us[3]"),
        (lambda m: m["iteration_us"].__setitem__(3, None), "iteration_us[3]"),
        (lambda m: m.update(loss=[], grad_norm=[], iteration_us=[]), "loss"),
        (lambda m: m.update(parameter_sha256=[]), "parameter_sha256"),
        (lambda m: m.update(parameter_sha256="aa"), "parameter_sha256"),
    ],
)
def test_damaged_metrics_are_refused(tmp_path, damage, field):
    path = written(tmp_path, lambda value: damage(value) and None)
    with pytest.raises(InputError) as caught:
        metrics_file.load(path)
    assert str(caught.value).startswith(f"{path}: ") and field in str(caught.value)
