"""Two runs are compared to the last bit."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks
from megatron_ext.megatron.equality_check import EqualityCheck, iterations_ahead, parameter_digest
from megatron_ext.megatron.run_summary import RunTimes

MEASURED = RunTimes(10, 100e3, 20e3, 30e3)


def finish(check: EqualityCheck, norms=(1.0, 0.5), digests=("a", "b"), measured=MEASURED, iterations=None):
    check.iterations = iterations
    for norm in norms:
        check.note((True, norm, 0))
    return check.finish(list(digests), measured)


def test_the_first_run_is_the_reference_and_an_equal_one_says_so(tmp_path):
    first = EqualityCheck(tmp_path / "r.json", "sha")
    assert first.is_reference and "reference" in finish(first)[0]
    second = EqualityCheck(tmp_path / "r.json", "sha")
    assert not second.is_reference and second.reference.measured == MEASURED
    assert "gradient norms of 2 iterations, parameters of 2 ranks" in finish(second)[0]


DIFFERENT = {
    "norm": ({"norms": (1.0, 0.5 + 2**-53)}, "NOT EQUAL: gradient norm of iteration 2"),
    "skipped step": ({"norms": (1.0, None)}, "NOT EQUAL: gradient norm of iteration 2"),
    "parameters": ({"digests": ("a", "c")}, "NOT EQUAL: parameters of rank 1"),
    "length": ({"norms": (1.0,)}, "cannot be compared: the reference trained 2 iterations, this run 1"),
    "ranks": ({"digests": ("a",)}, "cannot be compared: the reference had 2 ranks, this run 1"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_one_bit_is_a_difference(name, tmp_path):
    finish(EqualityCheck(tmp_path / "r.json", "sha"))
    change, expected = DIFFERENT[name]
    with pytest.raises(InputError, match=expected):
        finish(EqualityCheck(tmp_path / "r.json", "sha"), **change)


def test_a_run_that_was_aborted_is_no_reference_and_is_compared_with_none(tmp_path):
    """Megatron's rerun machinery ends training with exit code 17 in its midst; a signal does so, too."""
    (line,) = finish(EqualityCheck(tmp_path / "r.json", "sha"), iterations=6)
    assert "this run ended after 2 of 6 iterations and writes no " in line
    assert not (tmp_path / "r.json").exists()
    assert EqualityCheck(tmp_path / "r.json", "sha").is_reference
    finish(EqualityCheck(tmp_path / "r.json", "sha"), norms=(1.0, 0.5, 0.25), iterations=3)
    (line,) = finish(EqualityCheck(tmp_path / "r.json", "sha"), iterations=3)
    assert "this run ended after 2 of 3 iterations and is not compared with " in line
    assert (
        "equal to the reference"
        in finish(EqualityCheck(tmp_path / "r.json", "sha"), norms=(1.0, 0.5, 0.25), iterations=3)[0]
    )


@pytest.mark.parametrize(
    "given, ahead",
    [
        ({"train_iters": 10}, 10),
        ({"train_iters": 10, "iteration": 4}, 6),
        ({"train_iters": 10, "iteration": 4, "exit_interval": 4}, 4),
        ({"train_iters": 10, "iteration": 4, "exit_interval": 100}, 6),
        ({"train_iters": 10, "iteration": 10}, 0),
        ({"train_iters": 10, "iterations_to_skip": [10]}, None),
        ({"train_iters": 10, "iteration": 4, "phase_transition_iterations": [2, 4, 7]}, None),
        ({"train_iters": None}, None),
        ({}, None),
    ],
)
def test_how_long_a_run_is_to_train(given, ahead):
    assert iterations_ahead(SimpleNamespace(**given)) == ahead


def test_a_reference_of_another_schedule_is_refused_at_the_start(tmp_path):
    finish(EqualityCheck(tmp_path / "r.json", "sha"))
    with pytest.raises(InputError, match="another schedule"):
        EqualityCheck(tmp_path / "r.json", "other")
    with pytest.raises(InputError, match="--user-defined-schedule-check = .*: needs --user-defined-schedule"):
        hooks.configure(None, check=tmp_path / "r.json")


def test_the_digest_is_of_every_bit():
    model = torch.nn.Linear(3, 2).bfloat16()
    before = parameter_digest([model])
    assert parameter_digest([model]) == before
    with torch.no_grad():
        model.bias[0] += 1
    assert parameter_digest([model]) != before
