"""Data sheets of machines: every figure says where it comes from; a wrong sheet is refused in one line."""

import json

import msgspec
import pytest

from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.formats.errors import InputError

EXPECTED = """a100-nvlink a100-pcie a100-rdma b200-nvlink gh200 h100-400g h100-500w-rdma h100-ethernet h100-nvlink
    h100-pcie h100-rdma h200-nvlink h200-one-gpu h200-rdma l40s rtx4090""".split()


def test_the_sheets_of_the_package():
    assert sheets.names() == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_every_figure_has_its_origin_and_a_range_where_it_is_not_published(name):
    sheet = sheets.load(name)
    found = sheets.figures(sheet)
    assert len(found) >= 25
    for field, figure in found:
        assert figure.origin in ("published", "derived", "measured", "assumed") and len(figure.source) > 10, field
        low, high = figure.ends
        assert low <= figure.value <= high, field
        if field.endswith(("efficiency", "_us")) or field.startswith("disturbance."):
            assert figure.origin != "published" and low < high, f"{field}: nobody publishes it exactly"
    # What a data sheet states is published.
    assert sheet.device.memory_bytes_per_s.origin == sheet.host_link.bytes_per_s.origin == "published"
    assert sheet.device.memory_bytes.origin in ("published", "measured")  # as PyTorch reports it, where that is known
    assert (sheet.host_link.pcie is None) == (name == "gh200") and sheet.drive is not None
    assert (sheet.nvlink is None) == (name in ("a100-pcie", "h100-pcie", "l40s", "rtx4090", "gh200"))
    assert (sheet.network is None) == (not name.endswith(("rdma", "ethernet", "400g", "gh200")))


def test_every_figure_at_its_slow_end():
    slow = sheets.drawn(sheets.load("h100-rdma"), sheets.slow_end)
    sheet = sheets.load("h100-rdma")
    assert slow.device.flop_efficiency.value == sheet.device.flop_efficiency.low
    assert slow.network.hop_us.value == sheet.network.hop_us.high
    assert slow.host_link.gpus_per_link.value == 2 and slow.host.adam_efficiency.value == 0.45
    assert slow.disturbance.compute_beside_collective.value == 1.25


def test_a_part_of_a_node_has_as_large_a_part_of_its_host():
    node, one = sheets.load("h100-nvlink"), sheets.load("h100-nvlink:1")
    assert one.gpus_per_node == 1 and one.device == node.device and one.host_link == node.host_link
    host, whole = one.host, node.host
    assert host.memory_bytes.value == whole.memory_bytes.value / 8 and host.cores.value == whole.cores.value / 8
    # Between an eighth and the half that is one NUMA node's.
    assert host.numa_nodes.ends == (1, 1) and host.memory_bytes_per_s.value == whole.memory_bytes_per_s.value / 4
    low, high = whole.memory_bytes_per_s.ends
    assert host.memory_bytes_per_s.ends == (low / 8, high / 2)
    assert one.drive.read_bytes_per_s.high == node.drive.read_bytes_per_s.high
    assert sheets.load("h100-nvlink:8").host.memory_bytes_per_s.ends == (low, high)
    for name in ("h100-nvlink:0", "h100-nvlink:9", "h100-nvlink:all", "h100-nvlink:"):
        with pytest.raises(InputError, match=f"hardware = '{name}': is not a part of a node of 8 GPUs"):
            sheets.load(name)


def test_a_network_says_whether_it_shares_the_link_to_the_host(tmp_path):
    """It would be taken not to."""
    network = msgspec.to_builtins(sheets.load("h100-rdma").network)
    del network["shares_host_link"]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"title": "ours", "extends": "h100-nvlink", "network": network}))
    with pytest.raises(InputError, match="missing required field `shares_host_link`"):
        sheets.load(path)


def test_a_part_of_a_node_is_near_what_was_measured_on_such_a_machine():
    """Within the ranges of both, but for a virtual drive, and for memory: its owner gave half of it."""
    part, measured = sheets.load("h200-nvlink:1").host, sheets.load("h200-one-gpu").host
    for name in ("cores", "memory_bytes_per_s", "core_bytes_per_s"):
        (low, high), (least, most) = getattr(part, name).ends, getattr(measured, name).ends
        assert low <= most * 1.2 and least <= high * 1.2, name


def test_a_sheet_of_ones_own_extends_a_known_one(tmp_path):
    path = tmp_path / "mine.json"
    memory = {"value": 96e9, "origin": "assumed", "source": "what the vendor told us"}
    path.write_text(json.dumps({"title": "ours", "extends": "h100-nvlink", "device": {"memory_bytes": memory}}))
    mine, base = sheets.load(path), sheets.load("h100-nvlink")
    assert mine.title == "ours" and mine.device.memory_bytes.value == 96e9 and mine.device.memory_bytes.low is None
    assert mine.nvlink == base.nvlink and mine.device.flop_per_s == base.device.flop_per_s
    path.write_bytes(msgspec.json.encode(base))
    assert sheets.load(path) == base


def test_a_template_of_a_node_without_a_network_has_one_to_fill_in(tmp_path):
    path, made = tmp_path / "mine.json", sheets.template("l40s")
    made = {key: made[key] for key in ("title", "extends", "network")}
    for field, value in (("bytes_per_s", {**made["network"]["bytes_per_s"], "value": 3e9}), ("shares_host_link", True)):
        path.write_text(json.dumps(made))
        with pytest.raises(InputError, match=rf"mine\.json: network\.{field}.*null"):
            sheets.load(path)
        made["network"][field] = value
    path.write_text(json.dumps(made))
    network = sheets.load(path).network
    assert network is not None and network.bytes_per_s.value == 3e9 and network.shares_host_link


@pytest.mark.parametrize("name", ("h100-rdma", "rtx4090", "gh200"))
def test_a_template_is_refused_until_it_is_filled_in_and_then_is_a_sheet(tmp_path, name):
    path, made = tmp_path / "mine.json", sheets.template(name)
    if sheets.load(name).network is None:
        del made["network"]
    path.write_text(json.dumps(made))
    with pytest.raises(InputError, match=r"mine\.json.*value.*null"):
        sheets.load(path)
    base = dict(sheets.figures(sheets.load(name)))
    filled = []
    for section, entries in made.items():
        for figure, entry in entries.items() if isinstance(entries, dict) else ():
            if entry is not None:
                assert "FILL IN, or delete for" in entry["source"]
                entry |= {"value": base[f"{section}.{figure}"].value * 0.5, "source": "measured by ourselves"}
                filled.append(f"{section}.{figure}")
    path.write_text(json.dumps(made))
    mine = dict(sheets.figures(sheets.load(path)))
    assert {field for field in mine if mine[field] != base[field]} == {*filled}
    assert {"host.cores", "host.numa_nodes", "host.memory_bytes_per_s", "host_link.bytes_per_s"} <= {*filled}
    del made["host"]
    path.write_text(json.dumps(made))
    assert sheets.load(path).host == sheets.load(name).host


def test_a_sheet_without_its_host_is_refused_with_what_to_do(tmp_path):
    path = tmp_path / "mine.json"
    bare = msgspec.to_builtins(sheets.load("h100-nvlink"))
    del bare["host"]
    path.write_text(json.dumps(bare))
    with pytest.raises(InputError, match="host.*extends"):
        sheets.load(path)


def test_more_numa_nodes_are_slower_and_more_cores_are_not():
    l40s = sheets.load("l40s")
    slow = sheets.drawn(l40s, sheets.slow_end).host
    assert slow.numa_nodes.value == l40s.host.numa_nodes.high and slow.cores.value == l40s.host.cores.low


def test_a_sheet_that_says_nothing_of_its_host_s_processors_is_refused_by_name(tmp_path):
    raw = msgspec.to_builtins(sheets.load("h100-nvlink"))
    for name in ("cores", "core_bytes_per_s", "numa_nodes", "adam_efficiency", "layer_us", "memory_bytes_per_s"):
        file = tmp_path / "sheet.json"
        host = {key: value for key, value in raw["host"].items() if key != name}
        file.write_text(json.dumps(raw | {"host": host}))
        with pytest.raises(InputError, match=f"host.*missing required field `{name}`"):
            sheets.load(file)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match="hardware = 'h1000'.*known: a100-nvlink, a100-pcie, a100-rdma, .*rtx4090"):
        sheets.load("h1000")


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("gpus_per_node", 0, "gpus_per_node = 0: must be at least 1"),
        ("device.memory_bytes.value", -1, r"device.memory_bytes.value = -1.0: must be a positive"),
        ("device.flop_efficiency.high", 1.2, "device.flop_efficiency.high = 1.2: must not be above 1"),
        ("nvlink.efficiency.low", 0.85, "nvlink.efficiency.value = 0.8: is not between low and high"),
        ("nvlink.hop_us.source", " ", "nvlink.hop_us.source = ' ': must not be empty"),
        ("nvlink.hop_us.origin", "guessed", "nvlink.hop_us.origin = 'guessed': expected 'assumed'"),
        ("host.cores.value", 0, "host.cores"),
        ("host.adam_efficiency.high", 1.5, "host.adam_efficiency.high = 1.5: must not be above 1"),
        ("host_link.pcie.generation.value", 4, "host_link.bytes_per_s.value = 64000000000.0: is not the rate of 16"),
        ("host.threads", 2, "unknown field `threads`"),
        ("nvlink.colour", 1, "unknown field `colour`"),
        ("extends", "h1000", "extends = 'h1000': is not a machine"),
        ("schema_version", 1, "schema_version = 1"),
    ],
)
def test_wrong_sheets_are_refused_in_one_line(tmp_path, path, value, message):
    raw = msgspec.to_builtins(sheets.load("h100-nvlink"))
    *parents, last = path.split(".")
    node = raw
    for name in parents:
        node = node[name]
    node[last] = value
    file = tmp_path / "sheet.json"
    file.write_text(json.dumps(raw))
    with pytest.raises(InputError) as caught:
        sheets.load(file)
    assert message in str(caught.value) and "\n" not in str(caught.value)
