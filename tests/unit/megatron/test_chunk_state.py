"""Readers of a chunk's parameters get them one group after the other where they never fit together."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import chunk_state, gather_on_read
from megatron_ext.megatron.gather_on_read import GatherOnRead
from megatron_ext.runtime import free_host_memory
from megatron_ext.runtime.group import Clock, FreedGroup, GroupState, WholeBytes
from megatron_ext.runtime.in_turn import InTurn


class Chunk(torch.nn.Module):
    """Two groups of one parameter each, whose values a gather brings: 1 and 2."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.full((64,), value)) for value in (1.0, 2.0))
        self.residency, self.groups = WholeBytes(), {}
        for index, parameter in enumerate((self.first, self.second)):
            whole = torch.full((64,), index + 1.0)
            parameter.data = whole
            self.groups[index] = FreedGroup(index, "chunk 0", whole, 0, 2, self.residency)
            self.groups[index].drop()
        gather = lambda group: (
            group.whole.detach().fill_(group.index + 1.0) is None or SimpleNamespace(wait=lambda: None)
        )
        in_turn = InTurn(self.groups, Clock(), gather, None, {0: 0, 1: 0}, 0)
        self.reader = SimpleNamespace(in_turn=in_turn, read=in_turn.bring)
        chunk_state.guard_state(self, list(self.groups.values()), self.reader)


@pytest.fixture
def chunk(monkeypatch):
    made = Chunk()
    monkeypatch.setattr(dist_checkpointing, "save", lambda state, *_: state)
    yield made
    for group in made.groups.values():
        assert group.state is GroupState.SHARDED


def test_a_use_brings_the_group_of_a_parameter_and_of_a_view_of_it(chunk, monkeypatch):
    in_turn = chunk.reader.in_turn
    storages = [group.whole.untyped_storage()._cdata for group in chunk.groups.values()]
    replicas = dict(get_process_group_ranks=lambda group: [0], get_rank=lambda: 0)
    monkeypatch.setattr(gather_on_read, "dist", SimpleNamespace(**replicas))
    reads = GatherOnRead(storages, lambda used: in_turn.bring(in_turn.groups_of(used)), [0], missing=in_turn.missing)
    reads.open()
    views = [parameter.detach() for parameter in chunk.parameters()]
    one = chunk.groups[0].bytes
    for view, value in (*zip(views, (1, 2)), (views[0], 1)):
        assert view.sum().item() == 64 * value and chunk.residency.bytes == one
    reads.close()
    in_turn.bring(())


def test_states_and_checkpoints_hold_copies(chunk):
    end = chunk_state.save_copies(chunk.reader)
    states = [chunk.state_dict()]
    entries = {name: SimpleNamespace(data=getattr(chunk, name)) for name in ("first", "second")}
    saved = dist_checkpointing.save({"model": entries, "other": [SimpleNamespace(data=None), 3]}, "folder")
    states.append({name: entry.data for name, entry in saved["model"].items()})
    for state in states:
        assert [state[name].tolist() for name in ("first", "second")] == [[1.0] * 64, [2.0] * 64]
    assert saved["other"][1] == 3
    end()


def test_copies_for_which_host_memory_is_short_are_refused(chunk, monkeypatch):
    monkeypatch.setattr(free_host_memory, "available_bytes", lambda: 511)
    with pytest.raises(InputError, match="copies of parameters, .* need 512 bytes of host memory, 1 bytes short"):
        chunk.state_dict()
