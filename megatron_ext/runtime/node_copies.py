"""The node's copies of published groups, as one rank writes and reads them."""

from typing import NamedTuple

from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.streams import Device


class NodeCopies(NamedTuple):
    """What the publisher and every route that reads copies share.

    Attributes:
        pool: the node's host copies and everybody's flags.
        nvme: the node's NVMe copy, or None.
        clock: the version that is published, and read.
        recorder: where copies are recorded.
    """

    pool: HostPool
    nvme: NvmePool | None
    device: Device
    issuer: Issuer
    clock: Clock
    recorder: Recorder = NOTHING
