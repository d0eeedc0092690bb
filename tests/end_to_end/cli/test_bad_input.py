"""What users get wrong: one line that names file, field and value, exit code 2, in bounded time."""

import json
import os
import subprocess
import time
from typing import NamedTuple

import pytest
from planning_cases import WHOLE, make_table, make_workload
from training import verb

from megatron_ext.cli import main as cli
from megatron_ext.formats import json_files


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def case(tmp_path, capsys):
    """Writes a workload and a table after ``change``; returns a function that runs a verb."""
    work = make_workload()
    good = {"w": json.loads(json_files.encode(work)), "t": json.loads(json_files.encode(make_table(work, **WHOLE)))}

    def run(verb: str, change=None, *extra: str, raw: dict | None = None):
        data = json.loads(json.dumps(good))
        if change:
            change(data["w"], data["t"])
        for name in ("w", "t"):
            text = (raw or {}).get(name) or json.dumps(data[name])
            (tmp_path / f"{name}.json").write_text(text)
        arguments = [verb, "--cost-table", str(tmp_path / "t.json"), "--workload", str(tmp_path / "w.json")]
        if verb == "plan":
            arguments += ["--out", str(tmp_path / "s.json")]
        capsys.readouterr()
        code = cli.main([*arguments, *extra])
        return Ended(code, *capsys.readouterr())

    run.folder = tmp_path
    return run


def put(path: str, value):
    """A change that sets one field: ``w.limits.whole_parameter_bytes``."""

    def change(w, t):
        node = {"w": w, "t": t}
        *names, last = path.split(".")
        for name in names:
            node = node[int(name)] if isinstance(node, list) else node[name]
        node[int(last) if isinstance(node, list) else last] = value

    return change


def several(*changes):
    return lambda w, t: [change(w, t) for change in changes]


BAD = {
    "does not fit, zero 1": (
        put("w.limits", {"whole_parameter_bytes": 1000}),
        ("w.json", "limits.whole_parameter_bytes = 1000", "rank 0", "bytes short"),
    ),
    "does not fit, zero 3": (
        several(put("w.zero_stage", 3), put("w.limits", {"whole_parameter_bytes": 1000})),
        ("w.json", "limits.whole_parameter_bytes", "step 0F0", "bytes short"),
    ),
    "slots without size to hold": (
        put("w.limits", {"nvme_slots": 2, "nvme_slot_bytes": 0}),
        ("w.json", "limits.nvme_slot_bytes = 0"),
    ),
    "slots larger than host memory": (
        put("w.limits", {"nvme_slots": 2, "nvme_slot_bytes": 1000, "pinned_host_bytes": 1500}),
        ("w.json", "limits.pinned_host_bytes = 1500"),
    ),
    "zero cost": (put("t.routes.gpu.points.0.p50_us", 0), ("t.json", "routes.gpu.points[0].p50_us")),
    "tiny cost": (put("t.routes.gpu.points.0.p50_us", 1e-308), ("t.json", "routes.gpu.points[0].p50_us = 1e-308")),
    "huge size": (put("w.p2p_bytes", 10**30), ("w.json", "p2p_bytes")),
    "negative compute": (put("t.compute.0.forward_us", -1), ("t.json", "compute[0].forward_us = -1")),
    "no routes": (put("t.routes", {}), ("t.json", "routes")),
    "no compute": (put("t.compute", []), ("t.json", "compute")),
    "no p2p": (put("t.p2p", []), ("t.json", "p2p")),
    "size not measured": (
        put("t.routes", {"gpu": {"points": [{"size_bytes": 10, "p50_us": 1.0}, {"size_bytes": 20, "p50_us": 2.0}]}}),
        ("t.json", "routes.gpu"),
    ),
    "unknown key": (put("w.colour", "red"), ("w.json", "colour")),
    "micro-batches Megatron refuses": (put("w.parallel.num_microbatches", 1), ("w.json", "num_microbatches")),
    "too many points": (
        put("t.routes.gpu.points", [{"size_bytes": size, "p50_us": 1.0} for size in range(10_001)]),
        ("t.json", "routes.gpu.points = 10001: more than 10000 points"),
    ),
    "2^17 micro-batches": (
        put("w.parallel.num_microbatches", 1 << 17),
        ("w.json", "num_microbatches = 131072: more than 65536 forward steps"),
    ),
    "too many parameters": (
        lambda w, t: w["chunks"][0].update(parameters=w["chunks"][0]["parameters"][:1] * (1 << 17)),
        ("w.json", "chunks = 131102: more than 131072 parameters"),
    ),
    "too many steps": (put("w.parallel.num_microbatches", 1 << 20), ("w.json", "num_microbatches", "forward steps")),
}


@pytest.mark.parametrize("verb", ["plan", "simulate"])
@pytest.mark.parametrize("name", BAD)
def test_one_line_and_exit_code_2(case, name, verb):
    change, expected = BAD[name]
    result = case(verb, change)
    assert result.returncode == 2, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1 and result.stdout == ""
    for part in expected:
        assert part in result.stderr
    assert not (case.folder / "s.json").exists()


@pytest.mark.parametrize("policy", ["fastest", "random:", "random:x", "random:-1", "random:1.5"])
def test_unknown_policies(case, policy):
    result = case("plan", None, "--policy", policy)
    assert result.returncode == 2 and policy in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_all_cpu_without_host_memory_or_without_the_route(case):
    result = case("plan", put("w.limits", {"pinned_host_bytes": 1000}), "--policy", "all-cpu")
    assert result.returncode == 2 and "node 0" in result.stderr and "bytes short" in result.stderr
    result = case("plan", lambda w, t: t["routes"].pop("cpu"), "--policy", "all-cpu")
    assert result.returncode == 2 and "routes.cpu" in result.stderr


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"a":' * 100_000, "", "nul", '{"schema_version": 1e400}', "\x00"],
    ids=["deep", "deep2", "empty", "cut", "huge", "nul"],
)
def test_files_that_are_no_json(case, text):
    started = time.process_time()
    result = case("plan", raw={"w": text or " "})
    assert result.returncode == 2 and "w.json" in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert time.process_time() - started < 5


LONG = "l" * 300
"""No file system has such a name."""


@pytest.mark.parametrize(
    "words",
    [
        ["cost", "show", LONG],
        ["cost", "hardware", LONG],
        ["cost", "combine", LONG, "--out", LONG],
        ["measure", "--import", "curves", LONG, "--out", "o.json"],
        ["fit", "--hardware", LONG, "--", "--num-layers", "4"],
        ["plan", "--cost-table", LONG, "--workload", LONG, "--out", LONG],
        ["simulate", "--cost-table", LONG, "--workload", LONG],
        ["show", LONG],
        ["report", LONG],
        ["patch", "check", LONG],
        ["run-on-cpu", "--", LONG],
        ["doctor", "--checkout", LONG],
        ["doctor", "--nvme", LONG],
        ["prepare", "--checkout", LONG, "--out", "runs", "--", *"--num-layers 2 --data-parallel-size 2".split()],
    ],
    ids=lambda words: words[0],
)
def test_a_name_that_is_too_long(words, capsys):
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert len(said.strip().splitlines()) == 1 and "lll" in said


def test_schedule_of_another_workload(case):
    assert case("plan").returncode == 0
    other = put("w.parallel.num_microbatches", 8)
    result = case("simulate", other, "--schedule", str(case.folder / "s.json"))
    assert result.returncode == 2 and "s.json" in result.stderr and "num_microbatches" in result.stderr


def test_a_small_file_with_large_promises_is_cheap_to_refuse(case, capsys):
    assert case("plan").returncode == 0
    path = case.folder / "s.json"
    data = json.loads(path.read_text())
    data["parallel"]["num_microbatches"] = 16_000
    path.write_text(json.dumps(data))
    started = time.process_time()
    assert cli.main(["show", str(path)]) == 2 and "expected" in capsys.readouterr().err
    assert time.process_time() - started < 5


def test_same_bytes_whatever_the_hash_seed(case):
    produced = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = verb("plan", f"--cost-table t.json --workload w.json --out {seed}.json")
        case("simulate")  # writes the inputs
        subprocess.run(command, cwd=case.folder, env=environment, check=True, capture_output=True)
        produced.add((case.folder / f"{seed}.json").read_bytes())
    assert len(produced) == 1


def test_json_forms(case):
    planned = json.loads(case("plan", None, "--json").stdout)
    assert {"iteration_time_us", "gain", "distance_to_bound", "limit", "helps", "lower_bound_us"} <= planned.keys()
    trace = case.folder / "trace.json"
    result = json.loads(
        case("simulate", None, "--json", "--schedule", str(case.folder / "s.json"), "--trace", str(trace)).stdout
    )
    promised = "iteration_time_us bubble_rate exposed_us lower_bound_us peak_bytes busy_us"
    assert {*promised.split()} <= result.keys()
    assert result["iteration_time_us"] == planned["iteration_time_us"] and json.loads(trace.read_text())["traceEvents"]


def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(verb("schema", "workload"), stdout=full, stderr=subprocess.PIPE, text=True)
    said = "megatron-ext: standard output: cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, said)
