"""Data that all placement passes over the same blocks share: the uses of every rank, and the times of transfers."""

from functools import cache
from itertools import accumulate

from megatron_ext.planner.blocks import Blocks, block_uses_of_rank
from megatron_ext.schedule.group_facts import gradient_bytes
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload


class RankUses:
    """Data that the placement passes of one pipeline rank share. A use is named by its number among the rank's block
    uses.

    Attributes:
        groups_of: by use, the groups of its block. ``longest`` has the same groups in the order that spreads the groups
            of one use most evenly over the links (Graham 1969).
        uses: by group, its uses, the last one first.
        stays: (group, use) -> last use in the same step, for groups of several blocks.
        ideal: when each use would begin if compute never waited for a gather.
        due: by use, the groups whose gradients come and go and are reduced after this use.
        alone: uses at which a gradient is allocated once the previous one is freed.
    """

    def __init__(self, workload: Workload, timing: Timing, blocks: Blocks, pp_rank: int):
        self.workload, self.blocks, self.pp_rank = workload, blocks, pp_rank
        self.block_uses = block_uses_of_rank(workload, timing, blocks, pp_rank)
        self.sizes = [group.bytes for group in blocks.groups]
        of_block = [block.groups for block in blocks.blocks]
        longest = [sorted(own, key=lambda group: (-self.sizes[group], group)) for own in of_block]
        self.groups_of = [of_block[use.block] if use.block >= 0 else () for use in self.block_uses]
        self.longest = [longest[use.block] if use.block >= 0 else [] for use in self.block_uses]
        self.uses: dict[int, list[int]] = {}
        self.stays: dict[tuple[int, int], int] = {}
        for number in range(len(self.block_uses) - 1, -1, -1):
            for group in self.groups_of[number]:
                uses = self.uses.setdefault(group, [])
                if uses and self.block_uses[uses[-1]].step == self.block_uses[number].step:
                    self.stays[group, number] = self.stays.get((group, uses[-1]), uses[-1])
                uses.append(number)
        self.ideal = [*accumulate((block_use.us for block_use in self.block_uses), initial=0.0)]
        self.alone: set[int] = set()
        self.due = self._reduces_due()

    def _reduces_due(self) -> dict[int, list[int]]:
        steps = steps_of_ranks(self.workload.parallel)[self.pp_rank]
        due: dict[int, list[int]] = {}
        for index, uses in self.uses.items():
            group = self.blocks.groups[index]
            if group.gradients is None:
                continue
            last = {self.block_uses[n].step: n for n in reversed(uses) if steps[self.block_uses[n].step].kind == "B"}
            visits, every = list(last.values()), group.reduce_every
            if group.alone:
                begins = {self.block_uses[n].step: n for n in uses if self.block_uses[n].step in last}
                self.alone.update(list(begins.values())[::-1][::every])
            for number in {*visits[every - 1 :: every], *visits[-1:]}:
                due.setdefault(number, []).append(index)
        return due


class GroupTimes:
    """Microseconds that the transfers of each group take, looked up once."""

    def __init__(self, workload: Workload, timing: Timing, blocks: Blocks):
        own, groups = [timing.among(group.ranks) for group in blocks.groups], blocks.groups
        self.unshard = cache(lambda g, route: own[g].unshard_us(route, groups[g].bytes, groups[g].algorithm))
        self.shard_copy = cache(lambda g: own[g].shard_copy_us(groups[g].bytes))
        self.publish = cache(lambda g, copy: own[g].publish_us(groups[g].pp_rank, (copy,), groups[g].bytes))
        self.reduce = cache(lambda g: own[g].reduce_us(groups[g].bytes))
        self.to_host = cache(lambda g: own[g].to_host_us(gradient_bytes(groups[g], workload))[0])
