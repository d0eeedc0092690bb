"""Two runs are compared to the last bit."""

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks
from megatron_ext.megatron.equality_check import EqualityCheck, parameter_digest
from megatron_ext.megatron.run_summary import Measured

MEASURED = Measured(10, 100e3, 20e3, 30e3)


def finish(check: EqualityCheck, norms=(1.0, 0.5), digests=("a", "b"), measured=MEASURED):
    step = iter([(True, norm, 0) for norm in norms])
    optimizer = type("Optimizer", (), {"step": lambda self: next(step)})()
    check.watch(optimizer)
    for _ in norms:
        optimizer.step()
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
    "length": ({"norms": (1.0,)}, "cannot be compared: it trained 2 iterations, this run 1"),
    "ranks": ({"digests": ("a",)}, "cannot be compared: it had 2 ranks, this run 1"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_one_bit_is_a_difference(name, tmp_path):
    finish(EqualityCheck(tmp_path / "r.json", "sha"))
    change, expected = DIFFERENT[name]
    with pytest.raises(InputError, match=expected):
        finish(EqualityCheck(tmp_path / "r.json", "sha"), **change)


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
