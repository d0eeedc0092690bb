"""Kinds of activities as small integers: one for compute and one for each link of a rank."""

from functools import cache

from megatron_ext.cost.cost_table import KINDS
from megatron_ext.workload.route import Route, kind_of

COMPUTE, GPU, CPU, NVME, PUBLISH, P2P, REDUCE, HOST_STEP, HOST_ADD = range(len(KINDS))
"""Indices into :data:`megatron_ext.cost.cost_table.KINDS`."""

OTHER_LINK = {GPU: CPU, CPU: GPU}
"""The two links of a device that gathers can occupy at the same time."""


@cache
def link_of(route: Route) -> int:
    """The link of a route's last leg."""
    return KINDS.index(kind_of(route).link)
