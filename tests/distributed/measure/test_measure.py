"""Measuring on CPU with gloo: the table's structure and sanity, never its speed."""

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from training import stays_in_shared_memory, verb
from variations import some
from warm_python import WarmPython, warm_children

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table
from megatron_ext.cost.estimates import Costs
from megatron_ext.formats.errors import InputError, RankFailed
from megatron_ext.launch import launcher
from megatron_ext.measure import Options, measure
from megatron_ext.measure.compute_rounds import LEAST_ROUNDS
from megatron_ext.measure.rank_program import PASSES
from megatron_ext.measure.sampling import MAX_ROUNDS
from megatron_ext.workload.route import ROUTES

HERE = Path(__file__).parents[2] / "helpers"


@pytest.fixture(autouse=True, scope="module")
def layers_can_be_imported():
    """By the ranks' processes: the directory of layers.py is handed to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One small measurement by the command line, with handed modules."""
    out = tmp_path_factory.mktemp("measure") / "T.json"
    words = f"measure --out {out} --json --data-parallel-size 2 --pipeline-model-parallel-size 2".split()
    words += "--max-bytes 65536 --seconds 6 --hidden-size 64 --modules layers:layer_runners -- 64".split()
    with warm_children(launcher), contextlib.redirect_stdout(io.StringIO()) as said:
        assert cli.main(words) == 0
    assert json.loads(said.getvalue())["cost_table"] == str(out)
    return cost_table.load(out)


def test_every_curve_is_there(run):
    costs = Costs(run)
    offered = [route for route in ROUTES if costs.offers(f"routes.{route}")]
    assert offered == ["gpu", "cpu", "cpu_shard"]  # nvme is not measured without --nvme-path
    for us in (
        costs.estimate("routes.gpu", 50000).us,
        costs.estimate("routes.cpu", 50000).us,
        costs.estimate("publish.cpu", 50000).us,
        costs.estimate("p2p", 50000).us,
        costs.estimate("reduce", 50000).us,
        costs.estimate("optimizer", 50000).us,
    ):
        assert 0 < us < 10e6
    assert run.group_overhead.call_us > 0


def test_sizes_are_buckets_and_points_are_sane(run):
    points = run.routes.gpu.points
    assert points[0].size_bytes == 4096 and points[-1].size_bytes == 65536 and len(points) >= 5
    for point in points:
        assert point.size_bytes % (128 * 4) == 0  # Megatron pads to lcm(DP, 128) elements
        assert point.issued_us > 0 and 0 < point.p50_us <= point.p95_us
        assert point.samples >= 4  # every rank's


def test_layers(run):
    narrow, wide = run.compute
    assert (narrow.layer_kind, wide.layer_kind) == ("narrow", "wide")
    # Not the speed of either, but 64 times the arithmetic must show: milliseconds of it, more than a call's own time.
    assert wide.forward_us + wide.backward_us > narrow.forward_us + narrow.backward_us
    assert narrow.samples >= 4 * LEAST_ROUNDS  # every rank's


def test_contention_is_measured_both_ways_or_said_not_to_be(run):
    pairs = {(row.measured, row.busy) for row in run.contention}
    names = ("compute", "gpu", "cpu", "publish", "p2p", "reduce")
    wanted = {(a, b) for a in names for b in names if a != b}
    said = " ".join(run.metadata.notes)
    assert pairs <= wanted
    assert all(pair in pairs or f"{pair[0]} while {pair[1]} is busy" in said for pair in wanted)
    assert all(row.slowdown > 0 and row.p50_us > 0 for row in run.contention)


def test_environment_is_stored(run):
    metadata = run.metadata
    assert not metadata.synthetic and metadata.created_at
    assert metadata.world_sizes == {
        "data_parallel_size": 2,
        "num_distributed_optimizer_instances": 1,
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
        "ranks_per_node": 4,
    }
    assert metadata.software["backend"] == "gloo" and metadata.hardware["processors"] >= 1


QUICK = dict(data_parallel_size=2, max_bytes=8192, seconds=2, links=("cpu", "compute"))


def test_exactly_the_sizes_asked_for():
    sizes = dict(min_bytes=5000, max_bytes=5000, also_sizes=(70000,))
    with warm_children(launcher):
        table = measure(Options(data_parallel_size=2, seconds=2, links=("cpu", "gpu"), **sizes))
    assert [point.size_bytes for point in table.routes.cpu.points] == [5120, 70144]  # rounded up to whole buckets
    assert [point.size_bytes for point in table.routes.gpu.points] == [5120, 70144]


def test_time_that_is_left_is_used():
    with warm_children(launcher):
        table = measure(Options(data_parallel_size=2, seconds=6, links=("cpu",), min_bytes=5000, max_bytes=5000))
    assert table.routes.cpu.points[0].samples > 2 * PASSES * MAX_ROUNDS  # of two ranks


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").touch()
    started = time.monotonic()
    assert cli.main(["measure", "--out", str(tmp_path / "file" / "T.json"), "--seconds", "600"]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said and len(said.strip().splitlines()) == 1
    assert time.monotonic() - started < 600


@pytest.mark.parametrize(
    ("name", "said"),
    some([("nothing", "did not return a mapping of layer kinds"), ("missing", "cannot be imported")], 1),
)
def test_a_bad_factory_is_the_users_error(name, said):
    with warm_children(launcher), pytest.raises(InputError, match=said):
        measure(Options(**QUICK | {"data_parallel_size": 1}, modules=f"layers:{name}"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data_parallel_size": 0}, "--data-parallel-size = 0"),
        ({"min_bytes": 8, "max_bytes": 4096}, "--min-bytes = 8"),
        ({"min_bytes": 8192, "max_bytes": 4096}, "--min-bytes = 8192"),
        ({"seconds": float("nan")}, "--seconds = nan"),
        ({"also_sizes": (8,)}, "--also-sizes = 8"),
        ({"links": ("gpu", "warp")}, "--links = 'warp'"),
        ({"modules": "no_colon"}, "--modules = 'no_colon'"),
    ],
)
def test_bad_options(options, said):
    with pytest.raises(InputError) as error:
        Options(**options).check()
    assert str(error.value).startswith(said)


@pytest.mark.nightly
@pytest.mark.parametrize("world_size, ranks_per_node", [(4, 2), (2, 2), (2, 1)])
def test_under_a_launcher(tmp_path, world_size, ranks_per_node):
    """Ranks that torchrun would have started, on two nodes or on one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path / "T.json"
    contention = (world_size, ranks_per_node) == (2, 2)
    command = verb("measure", "--out", out, "--json --max-bytes 8192 --also-sizes 5120")
    command += ["--seconds", "14" if contention else "6", "--data-parallel-size", str(world_size)]
    command += ["--links", "gpu,hierarchical,cpu,publish,internode" + (",contention" if contention else "")]
    ranks = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "LOCAL_RANK": str(rank % ranks_per_node),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        files = [(tmp_path / f"{rank}.{name}").open("w+") for name in ("out", "error")]
        ranks.append((WarmPython(command[1:], tmp_path, environment, *files), files))
    codes = {process.wait(300) for process, _ in ranks}
    (said, *others), errors = zip(*[[Path(file.name).read_text() for file in files] for _, files in ranks])
    assert codes == {0}, errors[:2]
    assert json.loads(said)["cost_table"] == str(out) and set(others) == {""}
    table = cost_table.load(out)
    assert table.metadata.world_sizes["ranks_per_node"] == ranks_per_node
    offered = [route for route in ROUTES if Costs(table).offers(f"routes.{route}")]
    assert offered == ["gpu", "cpu"]  # cpu_shard is not among the links
    if contention:  # beside more links, or for less time, it may be left out
        assert {(row.measured, row.busy) for row in table.contention} >= {("gpu", "publish"), ("publish", "gpu")}
    flat = [point.size_bytes for point in table.routes.gpu.points]
    two_legs = [point.size_bytes for point in table.routes.gpu.algorithms.get("hierarchical", ())]
    assert 5120 in flat and 5120 in [point.size_bytes for point in table.routes.cpu.points]
    assert two_legs == ([size for size in flat if size in (4096, 5120, 8192)] if world_size == 4 else [])
    if ranks_per_node == world_size:
        assert table.publish.internode is None
    else:  # half of a group enters each of two nodes
        assert [point.size_bytes for point in table.publish.internode.points] == [
            point.size_bytes // 2 for point in table.routes.gpu.points if point.size_bytes in (4096, 8192)
        ]
        assert all(point.p50_us > 0 for point in table.publish.internode.points)


def test_nodes_that_a_group_spans():
    sizes = dict(data_parallel_size=4, pipeline_model_parallel_size=2)
    assert [Options(**sizes, ranks_per_node=ranks).nodes for ranks in (None, 8, 4, 2, 1)] == [1, 1, 1, 2, 4]
    assert Options(data_parallel_size=3, pipeline_model_parallel_size=2, ranks_per_node=2).nodes == 0


def test_a_launcher_with_another_number_of_ranks_is_refused(tmp_path, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["measure", "--out", str(tmp_path / "T.json")]) == 2
    assert "WORLD_SIZE = 3: --dp, --pp and --tp ask for 2 ranks" in capsys.readouterr().err


def test_more_ranks_than_one_node_takes_are_measured_on_several(tmp_path, capsys, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "128", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    command = ["measure", "--out", str(tmp_path / "T.json"), "--dp", "128"]
    assert cli.main(command) == 2  # when all options are right
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron-ext: WORLD_SIZE = 128: the ranks cannot meet") and "MASTER_PORT expected" in line
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "128")
    assert cli.main(command) == 2
    assert "makes 128 ranks on this node" in capsys.readouterr().err


def rank_processes(parent: int) -> list[int]:
    """Processes that a launcher with process id ``parent`` has started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                state, parent_of, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if "megatron_ext.measure.local_launch" in command and int(parent_of) == parent and state != "Z":
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize("how", some([signal.SIGKILL, signal.SIGINT], 1))
def test_nothing_outlives_an_interrupted_measurement(tmp_path, how):
    shared = set(os.listdir("/dev/shm"))
    command = verb("measure", "--out", tmp_path / "T.json", "--seconds 60 --links cpu")
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while len(rank_processes(launcher.pid)) < 2:
        assert time.monotonic() < deadline and launcher.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    launcher.send_signal(how)
    launcher.communicate(timeout=120)
    assert launcher.returncode == (130 if how == signal.SIGINT else -how)
    while rank_processes(launcher.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not stays_in_shared_memory(shared)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_measurement_that_hangs_ends_with_what_it_has_and_says_where_it_hangs(tmp_path):
    out = tmp_path / "T.json"
    command = verb("measure", "--out", out, "--dp 1 --seconds 3 --max-bytes 8192 --links cpu,gpu,compute,contention")
    done = subprocess.run(
        [*command, "--modules", "layers:hanging_contention"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    table = cost_table.load(out)
    assert table.routes.cpu.points and table.compute and not table.contention
    assert any("given up in: contention, each link alone" in note for note in table.metadata.notes)
    assert "layers.py" in done.stderr and "most recent call first" in done.stderr
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.nightly
def test_a_measurement_that_does_not_start_ends_and_says_in_one_line_what_it_is_at(tmp_path):
    command = verb("measure", "--out", tmp_path / "T.json", "--dp 1 --links compute --modules layers:hanging")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    *stacks, last = done.stderr.splitlines()
    assert last == "megatron-ext: the ranks have not started: compute, once took more than 300 s"
    assert done.returncode == 1 and any("layers.py" in line and "in forward" in line for line in stacks)
    assert "RankFailed" not in done.stderr and list(tmp_path.iterdir()) == []


def test_a_killed_rank_ends_the_measurement(capfd):
    def kill_one():
        while len(running := rank_processes(os.getpid())) < 2:
            time.sleep(0.05)
        os.kill(running[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(RankFailed):
        measure(Options(**QUICK))
    killer.join()
    said = "was ended by SIGKILL; ending the other ranks. The kernel does this when the machine"
    assert said in capfd.readouterr().err
    assert rank_processes(os.getpid()) == []
