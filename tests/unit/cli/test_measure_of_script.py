"""What ``measure`` takes from a training script's arguments where no checkout reads them."""

from types import SimpleNamespace

import click
import pytest

from megatron_ext.cli.checkout_model import for_workload
from megatron_ext.cli.main import main
from megatron_ext.formats.errors import InputError
from megatron_ext.measure.options import Options
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.parallel import Parallel

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


@pytest.mark.parametrize("asked", [True, False])
def test_a_checkouts_model_is_measured_with_the_optimizer_on_the_host_where_that_is_asked_for(asked):
    shape = GptShape(2, 64, 256, 4, 4, 128, 32)
    parallel = Parallel(pipeline_model_parallel_size=1, data_parallel_size=2, num_microbatches=1, order="no_pipeline")
    work = gpt_workload(shape, parallel, MicroBatch(32))
    model = SimpleNamespace(workload=work, sequence_parts=1, layer_options=())
    with click.Context(click.Command("measure")):
        options = for_workload(Options(modules="layers:layer_runners", optimizer_on_host=asked), model)
    assert options.optimizer_on_host is asked and options.data_parallel_size == 2


@pytest.mark.parametrize(("dtype", "parameter_bytes"), [([], 4), (["--bf16"], 2), (["--fp16"], 2)])
def test_gradients_are_measured_of_as_many_parameters_as_the_script_has_in_a_group(measured, dtype, parameter_bytes):
    """In bytes, gradients of 32-bit parameters are as large as these, and those of 16-bit ones twice as large."""
    assert measured(*dtype).parameter_bytes == parameter_bytes


@pytest.mark.parametrize("more", [[], ["--modules", "layers.py:layer_runners", "--", "small"]])
def test_an_entry_without_a_checkout_is_refused(measured, capsys, tmp_path, more):
    """Otherwise other layers than the script's are measured, for minutes."""
    assert main(["measure", "--out", str(tmp_path / "table.json"), "--entry", "train.py", *more]) == 2
    said = "megatron-ext: --entry = 'train.py': needs --checkout: the Megatron that it trains with\n"
    assert capsys.readouterr().err == said
