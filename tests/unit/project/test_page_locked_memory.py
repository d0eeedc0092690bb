"""All host memory that the device can reach stands in a table: who writes it, who reads it, and what orders them."""

import ast
import re

import pytest
from places import ROOT

PACKAGE = ROOT / "megatron_ext"
PAGE = (ROOT / "docs/architecture.md").read_text()
ROWS = re.findall(r"^\| .*$", PAGE.partition("## Host memory that the device reaches")[2].partition("\n## ")[0], re.M)
LOCKS = {"host_tensor", "pin", "page_locked", "pin_memory", "private_flags", "cudaHostRegister", "cudaHostAlloc"}
"""What locks memory, and what calls it for others."""
IN_TRAINING = {
    "runtime/host_pool.py HostPool.pin": "host copies",
    "runtime/flags.py private_flags": "flags",
    "runtime/nvme_pool.py NvmePool.__init__": "staging slots of the drive",
    "runtime/publisher.py Publisher.__init__": "bounce buffers",
    "runtime/group.py _host_copy": "shards that rest on the host",
    "megatron/buckets.py resting_gradients": "gradients that rest on the host",
    "runtime/gradients.py GradientsToHost.__init__": "slots of gradients",
    "runtime/host_step/room.py Room.__init__": "rooms of the host's step",  # their flags
    "runtime/host_step/room.py OwnRooms.make": "rooms of the host's step",
    "runtime/host_step/room.py SharedRooms.__init__": "rooms of the host's step",
    "runtime/host_step/drive_states.py DriveStates.open": "rooms of the host's step",
    "megatron/scheduled_host_step.py HostStep._in_memory.make": "fp32 parameters",
}
"""By file and function, the row of the table with the memory that is locked there."""

FOR_THEM = {
    "runtime/device.py CudaDevice.host_tensor",
    "runtime/device.py CudaDevice.pin",
    "runtime/page_locked.py page_locked",
    "runtime/page_locked.py pin",
    "megatron/copies.py Copies.__init__",  # asks the host pool
}

OF_MEGATRON = {
    "megatron/late_memory.py _lock_or_tell",
    "megatron/late_memory.py _lock_or_tell.make_or_tell",
    "megatron/late_memory.py make_gradients.make",
}
"""Its own host optimizer's, see below the table."""

OUTSIDE = {
    "cpubench/cuda_stand_in.py _OnCpu.__torch_function__",
    "cpubench/cuda_stand_in.py _replace_tensor_methods",
    "doctor/shared_pinning.py _pin",
    "doctor/stream_operations.py _wait_and_store",
    "measure/fabric.py Fabric.host",
    "measure/nvme_route.py NvmeRead.__init__",
    "measure/operations.py PublishAcross.__init__",
    "measure/rank_program.py set_up_of",
    "measure/run_step.py RunStep.build",
    "measure/timed_steps.py TimedHostStep.stepped_on",
}
"""Of programs that do not train."""


class Locking(ast.NodeVisitor):
    """``found``: functions of a file in which something of :data:`LOCKS` is called, handed on or given another name."""

    def __init__(self, text: str):
        self.found, self._within = set(), []
        if any(name in text for name in LOCKS):
            self.visit(ast.parse(text))

    def _inside(self, node) -> None:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()

    visit_FunctionDef = visit_ClassDef = _inside

    def _use(self, name: str) -> None:
        if name in LOCKS:
            self.found.add(".".join(self._within))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node.attr)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._use(node.id)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and node.value in LOCKS:  # of getattr
            self._use(node.value)

    def visit_alias(self, node: ast.alias) -> None:
        if node.asname:
            self._use(node.name)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg == "pin_memory" and not (isinstance(node.value, ast.Constant) and not node.value.value):
            self._use(node.arg)
        self.generic_visit(node)


def test_all_page_locked_memory_is_known():
    files = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {f"{place} {function}" for place, text in files.items() for function in Locking(text).found}
    assert {*IN_TRAINING} | FOR_THEM | OF_MEGATRON | OUTSIDE == found


@pytest.mark.parametrize("place", IN_TRAINING)
def test_page_locked_memory_stands_in_the_table(place):
    (row,) = (row for row in ROWS if row.startswith(f"| {IN_TRAINING[place]}"))
    assert place.partition(" ")[0].rpartition("/")[2] in row


def test_the_table_says_who_writes_reads_and_orders():
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in ROWS[1:]]
    assert all(len(row) == 4 and all(row) for row in rows)
    assert len(rows) == len({*IN_TRAINING.values()}), "a row is of nothing that is locked"


@pytest.mark.parametrize(
    ("line", "locks"),
    [
        ("torch.empty(3, pin_memory=True)", True),
        ("torch.empty(3, pin_memory=self.locked)", True),
        ("torch.empty(3, pin_memory=False)", False),
        ("t.pin_memory()", True),
        ("pin(t)", True),
        ("host_tensor(3, torch.uint8)", True),
        ("device.host_tensor(3, torch.uint8)", True),
        ("make = self.device.host_tensor if locked else large_tensor", True),
        ("runtime.page_locked.page_locked(3, torch.uint8, device)", True),
        ("from megatron_ext.runtime.page_locked import page_locked as lock", True),
        ("getattr(device, 'pin')(t)", True),
        ("device.stream('name')", False),
    ],
)
def test_memory_that_is_locked_elsewhere_is_seen(line, locks):
    found = Locking(f"import torch\nclass Part:\n    def made(self):\n        {line}").found
    assert found == ({"Part.made"} if locks else set())
