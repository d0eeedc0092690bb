"""A block of memory that all ranks of a node share: can it be opened, filled with pages and page-locked, and how long
does this take?"""

import contextlib
import mmap
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import block_pages, free_host_memory, lock_refused, shared_block
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.system_files import text_of

SIZES = {"cpu": 64 << 20, "cuda": 1 << 30}
"""Bytes of the block, by kind of device."""

PLACES = Path("/proc/self/numa_maps")

SHARED_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
ALLOWING = ("always", "within_size", "advise", "force")
"""Settings in this file under which shared memory gets large pages if it asks for them."""


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """Share a block, make its pages and page-lock it. Collective over the node."""
    available = free_host_memory.available_bytes()
    size: int = SIZES[place.device.type] if available is None else min(SIZES[place.device.type], available // 4)
    size = min(place.exchange(max(size // mmap.PAGESIZE, 1) * mmap.PAGESIZE))
    name = "process namespace"
    try:
        descriptor = shared_block.share(size, place.local_rank, place.exchange, field="ranks of a node")
    except InputError as error:
        advice = "run the ranks of a node in one container, or with --pid=host and --cap-add SYS_PTRACE"
        return [failed(name, error.message, advice), not_tried("pinning", "memory cannot be shared")]
    found = [passed(name, f"{place.ranks_per_node} ranks of a node share memory")]
    found.append(huge_pages(SHARED_PAGES))
    with contextlib.closing(shared_block.mapped(descriptor, size)) as block:
        found += _pages(place, block)
        found.append(_pin(place, block))
    return found


def _pages(place: Place, block: mmap.mmap) -> list[Finding]:
    block_pages.spread(block)
    place.exchange(None)
    start = time.monotonic()
    try:
        block_pages.make_pages(block, place.local_rank, place.ranks_per_node, lambda done, total: None)
        why = None
    except OSError as error:
        why = error.strerror
    slowest = max(place.exchange(time.monotonic() - start))
    if any(place.exchange(why)):
        return [failed("host pages", f"cannot be made: {why or 'another rank failed'}", "see host memory")]
    np.frombuffer(block, dtype=np.uint8)[:: mmap.PAGESIZE].max()  # a process's map shows only pages that it has read
    rate = slowest / (len(block) / 2**30)
    lie = pages_of_nodes(PLACES, "memfd:megatron_ext")
    where = "; ".join(f"node {node}: {count} pages" for node, count in sorted(lie.items())) or "one memory node"
    found = f"{rate:.2f} s per GiB, all ranks together; {where}"
    return [passed("host pages", found, figures={"seconds_per_gib": rate})]


def huge_pages(setting: Path) -> Finding:
    """Whether shared memory may have large pages, which are page-locked in a small part of the time."""
    name = "huge pages"
    try:
        text = setting.read_text().strip()
    except OSError as error:
        return not_tried(name, f"{setting}: {error.strerror}")
    chosen = text.partition("[")[2].partition("]")[0] or text
    if chosen in ALLOWING:
        return passed(name, f"shared memory: {chosen}")
    advice = f"for a faster start, as root on the host: echo advise > {setting}"
    return passed(name, f"shared memory: {chosen}; pages have {mmap.PAGESIZE} bytes", advice)


def pages_of_nodes(maps: Path, name: str) -> dict[int, int]:
    """By NUMA node, the number of pages there that belong to mappings whose name contains ``name`` (numa(7)); empty if
    the system does not say."""
    found: Counter[int] = Counter()
    for line in text_of(maps).splitlines():
        if name in line:
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                found[int(node)] += int(count)
    return found


def _pin(place: Place, block: mmap.mmap) -> Finding:
    name = "pinning"
    if not place.on_cuda:
        return not_tried(name, "no CUDA device: nothing is page-locked")
    memory, device = torch.frombuffer(block, dtype=torch.uint8), device_of(torch.empty(0, device=place.device))
    place.exchange(None)
    start = time.monotonic()
    try:
        device.pin(memory)
        why = None
    except InputError as error:
        why = str(error)
    taken = max(place.exchange(time.monotonic() - start))
    if why is not None:
        return failed(name, why, lock_refused.ADVICE)
    device.unpin(memory.data_ptr())
    rate = taken / (len(block) / 2**30)
    found = f"{rate:.2f} s per GiB, {place.ranks_per_node} ranks at once"
    return passed(name, found, figures={"seconds_per_gib": rate})
