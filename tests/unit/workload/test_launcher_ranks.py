"""How many ranks share a node is read from whichever launcher started them."""

import os

import pytest

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.launcher_ranks import OTHERS, forget_single_task, ranks_on_this_node

TORCHRUN = "TORCHELASTIC_RUN_ID"
NAMES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "RANK", *OTHERS)


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({}, None),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "WORLD_SIZE": "8"}, 4),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "RANK": "9"}, 8),
        ({"SLURM_STEP_TASKS_PER_NODE": "8", "RANK": "0"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "RANK": "9"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "8", "RANK": "9"}, 8),  # mpirun starts torchrun
        ({"MPI_LOCALNRANKS": "8", "RANK": "9"}, 8),
        ({"LOCAL_SIZE": "8", "RANK": "9"}, 8),
        ({"LOCAL_SIZE": "8"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, None),  # a step that starts no ranks
    ],
)
def test_ranks_of_a_node(monkeypatch, environment, ranks):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ranks_on_this_node() == ranks


def test_nodes_with_different_numbers_of_ranks_are_refused(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "22")
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "8(x2),7")
    with pytest.raises(InputError, match="SLURM_STEP_TASKS_PER_NODE = .*every node must have the same number"):
        ranks_on_this_node()


@pytest.mark.parametrize(("more", "forgotten"), [({}, True), ({"WORLD_SIZE": "2"}, False), ({TORCHRUN: "1"}, False)])
def test_one_task_that_torchrun_did_not_start_is_not_launched(monkeypatch, more, forgotten):
    """Container images set these variables where srun starts a single task. How many processes train is not known."""
    monkeypatch.delenv(TORCHRUN, raising=False)
    task = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    for name, value in (task | more).items():
        monkeypatch.setenv(name, value)
    forget_single_task()
    assert [name in os.environ for name in task] == [not forgotten] * 5
