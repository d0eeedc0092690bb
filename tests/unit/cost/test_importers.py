"""Which logs can be read at all."""

import pytest

from megatron_ext.cli import main as cli
from megatron_ext.cost import importers
from megatron_ext.formats.errors import InputError


def test_unreadable_log(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        importers.read("nccl-tests", tmp_path / "missing")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        importers.read("nccl-tests", binary)
    with pytest.raises(InputError, match="known formats: nccl-tests, nvbandwidth, curves"):
        importers.read("csv", binary)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--import", "nvbandwidth", "LOG", "--dp", "8"],
            "--data-parallel-size: is not read with --import nvbandwidth",
        ),
        (["--import", "nccl-tests", "LOG", "--system", "a"], "--system: is not read with --import nccl-tests"),
        (["--import", "curves", "LOG", "--collective", "x"], "--collective: is not read with --import curves"),
        (["--collective", "all_gather"], "--collective: is read only with --import"),
    ],
)
def test_options_that_would_be_passed_over_are_refused(tmp_path, options, message, capsys):
    out = tmp_path / "T.json"
    assert cli.main(["measure", *options, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()
