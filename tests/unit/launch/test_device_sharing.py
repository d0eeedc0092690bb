"""Who takes which device, and what NCCL is told where ranks share one."""

import sys

import pytest

from megatron_ext.launch import device_sharing
from megatron_ext.launch.device_sharing import device_index, ranks_of_fullest, settings, sharing_here


@pytest.mark.parametrize(
    ("ranks", "devices", "fullest"), [(8, 1, 8), (8, 8, 1), (8, 3, 3), (2, 8, 1), (1, 1, 1), (4, 0, 1)]
)
def test_ranks_of_the_fullest_device(ranks, devices, fullest):
    assert ranks_of_fullest(ranks, devices) == fullest
    if devices:
        taken = [device_index(rank, devices) for rank in range(ranks)]
        assert max(map(taken.count, taken)) == fullest and max(taken) < devices


def test_every_rank_is_a_host_of_its_own_on_the_loopback_interface():
    ids = {settings(rank, 8)["NCCL_HOSTID"] for rank in range(8)}
    assert len(ids) == 8 and settings(0, 8)["NCCL_SOCKET_IFNAME"] == "lo"
    assert sharing_here(settings(3, 8)) == 8


def test_ranks_of_several_nodes_keep_their_network():
    assert "NCCL_SOCKET_IFNAME" not in settings(3, 2, nodes=2) and settings(3, 2, nodes=2)["NCCL_HOSTID"] == "rank3"


def test_a_rank_with_a_device_of_its_own_is_told_nothing():
    assert settings(3, 1) == {} and sharing_here({}) == 1


@pytest.mark.parametrize(
    ("nccl", "refused"), [((2, 5, 5), True), ((2, 4, 8), True), ((2, 5, 6), False), ((2, 28, 9), False)]
)
def test_a_release_of_nccl_that_knows_no_host_ids_is_refused_by_name(nccl, refused):
    why = device_sharing.too_old(nccl)
    assert (why is not None) == refused
    assert why is None or (f"NCCL {'.'.join(map(str, nccl))} " in why and "2.5.6" in why and "\n" not in why)


@pytest.mark.parametrize(
    ("ranks", "devices", "nccl", "code", "said"),
    [
        (8, 1, (2, 28, 9), 0, "8 ranks share 1 CUDA device:"),
        (8, 8, (2, 28, 9), 0, ""),
        (8, 0, (2, 28, 9), 0, ""),
        (2, 1, (2, 4, 8), 2, "NCCL 2.4.8 refuses"),
    ],
)
def test_what_a_script_is_told(monkeypatch, capsys, ranks, devices, nccl, code, said):
    monkeypatch.setattr(device_sharing, "visible_devices", lambda: devices)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: nccl)
    monkeypatch.setattr(sys, "argv", ["device_sharing", str(ranks)])
    assert device_sharing.main() == code
    out, err = capsys.readouterr()
    assert said in (err if code else out) and len((out + err).splitlines()) == bool(said)
