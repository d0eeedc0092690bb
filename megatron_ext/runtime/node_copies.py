"""The node's copies of published groups, as seen by one rank that writes and reads them."""

from typing import NamedTuple

from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.streams import Device


class NodeCopies(NamedTuple):
    """Objects that the publisher and every route that reads copies share.

    Attributes:
        pool: the node's host copies and the flags of all its ranks.
        nvme: the node's NVMe copy, or None.
        clock: gives the version that is published and read.
        recorder: where copies are recorded.
    """

    pool: HostPool
    nvme: NvmePool | None
    device: Device
    issuer: Issuer
    clock: Clock
    recorder: Recorder = NOTHING
