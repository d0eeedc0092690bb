"""What ``measure`` does only with a CUDA device runs, with the device pretended: see pretended_cuda.py."""

import json

import pytest
from places import HELPERS
from training import ranks_command, run

SIZES = "--seconds 40 --threads 1 --hidden-size 256 --seq-length 64 --max-bytes 1048576".split()
STEPS = {"host_step", "host_step_joined", "host_step_cast_on_device", "device_step"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "links", "more"),
    [
        (1, {"cpu", "publish", "nvme", "optimizer", "host_memory", *STEPS}, ["--optimizer-on-host"]),
        (2, {"gpu", "cpu", "cpu_shard", "reduce", "publish", "optimizer"}, []),
    ],
)
def test_what_only_a_device_takes_runs(tmp_path, ranks, links, more):
    out, asked = tmp_path / "table.json", ",".join([*sorted(links), "compute", "contention"])
    how = ["--device", "cuda", "--dp", ranks, "--links", asked, "--nvme-path", tmp_path, *SIZES, *more]
    done = run(ranks_command(str(HELPERS / "pretended_cuda.py"), ["measure", "--out", out, *how], ranks))
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads(out.read_text())
    hardware, pairs = table["metadata"]["hardware"], {(row["measured"], row["busy"]) for row in table["contention"]}
    assert hardware["device"] == "pretended" and hardware.get("ranks_per_device", 1) == ranks
    assert table["set_up"].keys() == {"pages_us_per_gib", "pin_us_per_gib", "beside_allocator_bytes"}
    assert ("cpu", "compute") in pairs and ("host_step", "publish") not in pairs
    assert {"cpu", "optimizer"} <= table["routes"].keys() | table.keys()
