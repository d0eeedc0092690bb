"""A model whose parameters never fit whole is built, trained, evaluated, saved and loaded under its limit."""

import json
import random

import pytest
from cases import MODELS, STRICT
from draw_schedule import never_whole
from msgspec.structs import replace
from parity_service import differences
from places import HELPERS
from strict_cases import findings
from training import ranks_command, run_warm
from variations import some

from megatron_ext.workload.workload import Limits

PLACES = some(["host", "optimizer", "nvme", "device"], 1)


@pytest.fixture(scope="module")
def found(megatron_tree, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("never_whole")
    command = ranks_command(str(HELPERS / "never_whole.py"), [str(folder), *PLACES], 2)
    result = run_warm(command, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("where", PLACES)
def test_no_part_of_a_run_holds_more_than_its_training_steps(found, where):
    """Nor more than was planned. Training steps do, by what layers allocate and free again within themselves."""
    planned, activations = (found["figures"][where][name] for name in ("planned", "activations"))
    for rank in found["ranks"]:
        assert rank[where]["census"] <= planned - activations
        for peaks in (rank[where]["peaks"], rank[where]["loading"]):
            assert peaks["train"] <= 1.1 * planned
            assert peaks["step"] <= 1.05 * planned  # torch's AdamW makes some for each parameter
            parts = {name: peak for name, peak in peaks.items() if name not in ("train", "step")}
            assert {"build", "on_train_setup", "hash", "finish"} <= set(parts)
            assert max(parts.values()) <= planned, (parts, planned)
        assert {"evaluate", "save"} <= set(rank[where]["peaks"])


@pytest.mark.parametrize("where", [where for where in PLACES if where != "optimizer"])
def test_without_a_limit_it_holds_more_before_the_first_step(found, where):
    """What counts sees it: all parameters are whole there."""
    for rank in found["ranks"]:
        most = max(rank[where]["unlimited"][name] for name in ("build", "on_train_setup"))
        assert most > found["figures"][where]["planned"]


@pytest.mark.parametrize("where", PLACES)
def test_a_run_that_has_ended_leaves_nothing_on_the_device(found, where):
    """A second training in the process would hold it besides its own."""
    assert all(max(rank[where]["left"]) <= 1 for rank in found["ranks"])  # the byte of torch's last barrier


@pytest.mark.nightly
def test_an_optimizer_on_the_device_gets_all_gradients_there_for_its_step_alone(found):
    """Its step is the peak, and is billed; what comes next no longer holds them."""
    gradients = found["figures"]["optimizer"]["whole"]  # of two ranks each has half, in fp32
    for rank in found["ranks"]:
        peaks = rank["optimizer"]["peaks"]
        assert peaks["step"] > max(peak for name, peak in peaks.items() if name not in ("train", "step"))
        assert peaks["step"] - peaks["evaluate"] > 0.9 * gradients


def test_it_is_larger_than_the_device(found):
    """All whole parameters alone are more than everything that the plan holds at a time."""
    figures = found["figures"]["host"]
    assert figures["planned"] < 0.8 * figures["whole"]
    assert all(rank["host"]["peaks"]["build"] < figures["whole"] / 4 for rank in found["ranks"])


@pytest.mark.parametrize("where", PLACES)
def test_training_is_that_of_megatron_to_the_last_bit(found, where):
    for rank in found["ranks"]:
        stock, scheduled, loaded = (rank[where][name] for name in ("stock", "scheduled", "loaded"))
        for name in ("loss", "grad_norm"):
            assert stock[name] == scheduled[name] + loaded[name]
        assert stock["eval_loss"] == scheduled["eval_loss"] + loaded["eval_loss"] and scheduled["eval_loss"]
        assert stock["parameter_sha256"] == loaded["parameter_sha256"] != scheduled["parameter_sha256"]


@pytest.mark.parametrize("layout", some([STRICT, "interleaved"], 1))
def test_everybody_finds_parameters_where_groups_come_in_turn(services, workloads, tmp_path, layout):
    """With tied embeddings and two chunks a rank, and where everything has to be ordered: an evaluation, a checkpoint,
    a reader of all parameters, and one who changes them."""
    path, workload = tmp_path / "schedule.json", workloads[layout, "bf16-tied"]
    workload = replace(workload, zero_stage=3, limits=Limits(nvme_slots=2))
    never_whole(random.Random(4), workload, path)
    options = [*MODELS["bf16-tied"], "--eval-interval", "2", "--eval-iters", "1"]
    options += ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]
    strict = {"strict": {"seed": 4, "order": "late"}} if layout == STRICT else {}
    answer = services(layout).run(options=options, schedule=path, meddle="told", **strict)
    assert differences(answer) == []
    assert not strict or findings(answer) == []
