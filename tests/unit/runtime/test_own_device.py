"""Ranks find out for themselves whether they share a device, on a torch.cuda and process groups that are stand-ins."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from gathered import as_ranks_do

from megatron_ext.formats.errors import InputError
from megatron_ext.launch import device_sharing
from megatron_ext.runtime import own_device

VARIABLES = (device_sharing.MARK, "NCCL_HOSTID", "NCCL_MNNVL_ENABLE", *device_sharing.ONE_NODE)


@pytest.fixture
def ranks(monkeypatch):
    """``ranks(uuids, nccl)``: this is rank 1 of as many as there are devices in ``uuids``."""
    made = []
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # whatever is set is gone behind the test
        monkeypatch.delenv(name)

    def make(uuids, nccl=(2, 28, 9), backend="cuda:nccl"):
        def gather(own):
            assert own == uuids[1]
            return uuids

        properties = SimpleNamespace(uuid=uuids[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr("torch.cuda.nccl.version", lambda: nccl)
        for name, function in {
            "get_backend_config": lambda: backend,
            "new_group": lambda **options: made.append(options),
            "destroy_process_group": lambda group: pytest.fail("PyTorch 2.6 may hang here"),
            "get_rank": lambda: 1,
        }.items():
            monkeypatch.setattr(dist, name, function)
        as_ranks_do(monkeypatch, gather)
        return made

    return make


def test_ranks_on_one_device_are_hosts_of_their_own(ranks):
    ranks(["a", "a", "a", "b"])
    assert own_device.tell_nccl("cuda:0") == 3 == device_sharing.sharing_here()
    assert (os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"]) == ("rank1", "lo")


def test_ranks_that_each_see_one_device_of_several_share_none(ranks):
    ranks(["a", "b", "c", "d"])
    assert own_device.tell_nccl("cuda:0") == 1
    assert not any(name in os.environ for name in VARIABLES)


def test_a_group_over_host_memory_is_made_only_where_there_is_none(ranks):
    """Each is a connection from every rank to every other one."""
    made = ranks(["a", "b"], backend="cpu:gloo,cuda:nccl")
    assert own_device.tell_nccl("cuda:0") == 1 and not made
    made = ranks(["a", "b"])
    assert own_device.tell_nccl("cuda:0") == 1 and made == [{"backend": "gloo"}]


def test_what_the_user_has_set_stays(ranks, monkeypatch):
    ranks(["a", "a"])
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    own_device.tell_nccl("cuda:0")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth0"


def test_a_nccl_that_is_too_old_is_refused_in_one_line_where_devices_are_shared(ranks):
    ranks(["a", "a"], nccl=(2, 4, 8))
    with pytest.raises(InputError, match="NCCL: ranks share a device, which NCCL 2.4.8 refuses"):
        own_device.tell_nccl("cuda:0")
    ranks(["a", "b"], nccl=(2, 4, 8))
    assert own_device.tell_nccl("cuda:0") == 1


def test_a_rank_takes_its_device_in_turn(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert own_device.take(7).index == 1 and [device.index for device in taken] == [1]
