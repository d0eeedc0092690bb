"""Faults put in on purpose: delays that move work around, and negative controls.

A parity test that passes without any synchronisation one run in three proves nothing, so the
tests delay publishing, copying and gathering at random, and switch single safeguards off to
see that training then differs. Nothing here runs unless the environment asks for it:
``MEGATRON_EXT_FAULTS="publish_delay_ms=20,copy_delay_ms=5,seed=3"``.
"""

import os
import random
import time
from typing import NamedTuple

from megatron_ext.formats.errors import InputError

VARIABLE = "MEGATRON_EXT_FAULTS"


class Faults(NamedTuple):
    """What is put in.

    Attributes:
        publish_delay_ms, copy_delay_ms, read_delay_ms, reduce_delay_ms, step_delay_ms: upper bounds of uniform draws,
            in milliseconds.
        network_mb, host_link_mb, drive_mb: rates of slower links, in MB/s; 0 leaves a link as it is. See slow_links.py.
        seed: of the draws.
        no_wait: negative control; copies do not wait for the other ranks' shards, and gradients are added before they
            are reduced.
        no_rollback: negative control; every step beside the backward stands.
        undelayed: negative control; every delayed update is applied at once.
        lose_update: negative control; the delayed update of this number, from 1, is not made.
        stale_group: this group is published only once, and comes by ``cpu_shard`` from its first shard.
        skip_group: this group is never gathered.
        short_read: reads of this group are cut off on the drive in the middle of training.
        skip_reduce: this group's gradient is never reduced.
        skip_step: this group, whose states rest on the device, is never stepped.
        late_add: the first part of this group's gradient is added to its shard behind all others.
    """

    publish_delay_ms: float = 0.0
    copy_delay_ms: float = 0.0
    read_delay_ms: float = 0.0
    reduce_delay_ms: float = 0.0
    step_delay_ms: float = 0.0
    network_mb: float = 0.0
    host_link_mb: float = 0.0
    drive_mb: float = 0.0
    seed: int = 0
    # Switches: 1 is on.
    no_wait: int = 0
    no_rollback: int = 0
    undelayed: int = 0
    # Numbers, of groups but for the first: -1 is none.
    lose_update: int = -1
    stale_group: int = -1
    skip_group: int = -1
    short_read: int = -1
    skip_reduce: int = -1
    skip_step: int = -1
    late_add: int = -1

    def delayer(self, milliseconds: float, salt: int):
        """A function ``pause(sleep)`` that sleeps up to ``milliseconds``, or None where there is nothing to do."""
        if milliseconds <= 0:
            return None
        draw = random.Random(self.seed * 1000003 + salt)
        return lambda sleep=time.sleep: sleep(draw.random() * milliseconds / 1e3)


def from_environment() -> Faults:
    """Faults that the environment asks for. Raises InputError on an unknown one."""
    text = os.environ.get(VARIABLE, "")
    values = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in Faults._fields:
            raise InputError(f"known: {', '.join(Faults._fields)}", file=VARIABLE, field=name)
        try:
            values[name] = type(Faults._field_defaults[name])(value)
        except ValueError:
            raise InputError("expected a number", file=VARIABLE, field=name, value=value) from None
    return Faults(**values)
