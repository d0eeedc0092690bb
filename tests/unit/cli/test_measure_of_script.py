"""What ``measure`` takes from a training script's arguments where no checkout reads them."""

import pytest

from megatron_ext.cli.main import main
from megatron_ext.formats.errors import InputError

SCRIPT = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1".split()


@pytest.mark.parametrize("more", [[], ["--optimizer-cpu-offload"]])
def test_the_optimizer_is_measured_where_the_script_has_it(monkeypatch, tmp_path, more):
    """Measured on the device, a plan of a host's optimizer would be far too fast."""
    asked = []

    def measure(options):
        asked.append(options)
        raise InputError("enough")

    monkeypatch.setattr("megatron_ext.measure.measure", measure)
    assert main(["measure", "--out", str(tmp_path / "table.json"), "--", *SCRIPT, "--bf16", *more]) == 2
    (options,) = asked
    assert options.optimizer_on_host is bool(more) and (options.hidden_size, options.seq_length) == (64, 32)
