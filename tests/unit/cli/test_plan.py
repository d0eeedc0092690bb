"""``plan`` of a workload whose batch grows: a directory, with a schedule for every number of micro-batches."""

import json

from msgspec.structs import replace
from planning_cases import WHOLE, make_table, make_workload

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table
from megatron_ext.schedule import schedules
from megatron_ext.workload import workload


def test_a_directory_is_written_and_a_file_is_refused(tmp_path, capsys):
    work = replace(make_workload(microbatches=4, p2p_bytes=4096), ramp=(2,))
    workload.save(tmp_path / "w.json", work)
    cost_table.save(tmp_path / "t.json", make_table(work, **WHOLE))
    command = ["plan", "--cost-table", str(tmp_path / "t.json"), "--workload", str(tmp_path / "w.json"), "--json"]
    assert cli.main([*command, "--out", str(tmp_path / "schedules")]) == 0
    told = capsys.readouterr()
    assert list(json.loads(told.out)["ramp"]) == ["2"]
    assert "\nactivations are not counted; leave room for them" in told.err  # this workload has no counts
    assert "Before the batch is full, by number of micro-batches: 2: " in told.err
    assert list(schedules.load(tmp_path / "schedules")) == [2, 4]
    assert cli.main([*command, "--out", str(tmp_path / "w.json")]) == 2
    assert "expected a directory: " in capsys.readouterr().err
    assert cli.main([*command, "--out", str(tmp_path / "schedules"), "--policy", "all-gpu", "--explain", "99"]) == 2
    assert capsys.readouterr().err.startswith("megatron-ext: --explain = '99': no such group; ")
    assert cli.main([*command, "--out", str(tmp_path / "s.json"), "--limit-pinned-host-bytes", "0"]) == 2
    assert "--limit-pinned-host-bytes: belongs to the workload; give it to describe" in capsys.readouterr().err
