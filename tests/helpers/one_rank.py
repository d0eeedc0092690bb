"""One pipeline rank of a schedule without a model: real groups, program and executor; layers check what they use."""

import torch

from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.group import Clock, FreedGroup, RankGroup, WholeBytes
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.program import compile_program, place_actions
from megatron_ext.schedule.group_facts import uses_of_groups
from megatron_ext.workload.step_order import steps_of_ranks


class Arrived:
    def wait(self) -> None:
        """It is there."""


class Layers:
    """Stands for the modules: says which groups a layer uses and keeps what is armed for the next steps."""

    def __init__(self, schedule, workload):
        self.spans, self.workload, self.armed = uses_of_groups(schedule.groups, workload), workload, []

    def uses(self, group_index: int) -> tuple[int, int]:
        return self.spans[group_index]

    def num_layers(self, model_chunk_id: int) -> int:
        return self.workload.chunk(0, model_chunk_id).num_layers

    def block(self, model_chunk_id: int, layer: int) -> tuple[int, int]:
        return layer, layer

    def arm(self, model_chunk_id, boundary, forward, backward):
        return lambda: self.armed.append((boundary, forward, backward))


class OneRank:
    """Pipeline rank 0. A gather by any route writes the present version into the whole copy.

    Attributes:
        events: ``(what, group index)`` of every issue, in order.
    """

    def __init__(self, schedule, workload, **compiled):
        self.schedule, self.workload, self.events = schedule, workload, []
        self.clock, self.residency, self.layers = Clock(), WholeBytes(), Layers(schedule, workload)
        self.groups = {
            index: self._group(index, group.bytes) for index, group in enumerate(schedule.groups) if group.pp_rank == 0
        }
        routes = dict.fromkeys(("gpu", "cpu", "nvme"), self)
        placed = place_actions(schedule, schedule.ranks[0], self.groups, routes, self.clock, self.layers, **compiled)
        self.program = compile_program(placed, self.layers)
        self.executor = Executor(self.program, self.groups, self.clock, self.residency, self.issue, Issuer())
        for group in self.groups.values():
            group.drop()
        self.residency.restart()

    def _group(self, index: int, size: int) -> RankGroup:
        whole = torch.zeros(size // 4)
        if self.schedule.zero_stage < 3:
            return RankGroup(index, "", whole, 0, 2)
        return FreedGroup(index, "", whole, 0, 2, self.residency)

    def issue(self, group: RankGroup) -> Arrived:
        self.events.append(("unshard", group.index))
        with torch.no_grad():
            group.whole.fill_(self.clock.version)
        return Arrived()

    def stage_in(self, group: RankGroup, slot: int) -> None:
        self.events.append(("stage in", group.index))

    def iteration(self) -> None:
        """All steps as Megatron's hooks tell of them; every layer checks the groups that it uses."""
        self.executor.begin_iteration()
        counts, armed = {"F": 0, "B": 0}, {}
        for step in steps_of_ranks(self.workload.parallel)[0]:
            chunk, number = step.model_chunk_id(self.workload.parallel.pp), counts[step.kind]
            counts[step.kind] += 1
            if step.kind == "F":
                self.layers.armed = []
                self.executor.pre_forward(number, chunk)
                armed[chunk, step.microbatch] = self.layers.armed
                self.compute(chunk, range(self.layers.num_layers(chunk)), {b: f for b, f, _ in self.layers.armed})
            else:
                self.executor.pre_backward(number, chunk)
                at = {boundary - 1: actions for boundary, _, actions in armed.pop((chunk, step.microbatch))}
                self.compute(chunk, reversed(range(self.layers.num_layers(chunk))), at)
                self.executor.post_backward(number)
        self.executor.end_iteration()

    def compute(self, chunk: int, layers, before_layer: dict) -> None:
        for layer in layers:
            for action in before_layer.get(layer, ()):
                action()
            for index, group in self.groups.items():
                first, last = self.layers.uses(index)
                if self.schedule.groups[index].model_chunk_id == chunk and first <= layer <= last:
                    group.check_usable(self.clock)
                    assert group.whole[0] == group.whole[-1] == self.clock.version
