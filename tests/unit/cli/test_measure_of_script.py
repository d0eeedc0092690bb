"""What ``measure`` takes from a training script's arguments where no checkout reads them."""

import pytest

from megatron_ext.cli.main import main
from megatron_ext.formats.errors import InputError

SCRIPT = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1".split()


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """``measured(arguments)``: the options that are measured by a script's arguments."""
    asked = []

    def measure(options):
        asked.append(options)
        raise InputError("enough")

    monkeypatch.setattr("megatron_ext.measure.measure", measure)

    def measured(*more: str):
        assert main(["measure", "--out", str(tmp_path / "table.json"), "--", *SCRIPT, *more]) == 2
        return asked.pop()

    return measured


@pytest.mark.parametrize("more", [[], ["--optimizer-cpu-offload"]])
def test_the_optimizer_is_measured_where_the_script_has_it(measured, more):
    """Measured on the device, a plan of a host's optimizer would be far too fast."""
    options = measured("--bf16", *more)
    assert options.optimizer_on_host is bool(more) and (options.hidden_size, options.seq_length) == (64, 32)


@pytest.mark.parametrize(("dtype", "parameter_bytes"), [([], 4), (["--bf16"], 2), (["--fp16"], 2)])
def test_gradients_are_measured_of_as_many_parameters_as_the_script_has_in_a_group(measured, dtype, parameter_bytes):
    """In bytes, gradients of 32-bit parameters are as large as these, and those of 16-bit ones twice as large."""
    assert measured(*dtype).parameter_bytes == parameter_bytes
