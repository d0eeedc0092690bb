"""Files of curves, as published ones are written down."""

import json

import logs
import pytest
from places import DATA_DIR

from megatron_ext.cost import importers
from megatron_ext.cost.curve import lookup
from megatron_ext.formats.errors import InputError

DATA = DATA_DIR


def test_best_algorithm_changes_where_the_seed_notes_say():
    path = DATA / "seed_allreduce_8gpu.json"
    table = importers.read("curves", path)
    curves = json.loads(path.read_text())["curves"]
    best = []
    for size in sorted({row["size_bytes"] for curve in curves for row in curve["points"]}):
        times = {
            curve["algorithm"]: row["in_place_us"]
            for curve in curves
            for row in curve["points"]
            if row["size_bytes"] == size
        }
        estimate = lookup(table.all_reduce, size)
        assert estimate.us == min(times.values()) == times[estimate.algorithm]
        best.append(estimate.algorithm)
    assert len(set(best)) >= 3


def test_published_curves_by_system():
    path = DATA / "published_allgather_curves.json"
    with pytest.raises(InputError, match="several systems; choose one with --system"):
        importers.read("curves", path)
    with pytest.raises(InputError, match="--system: 'mine'"):
        importers.read("curves", path, system="mine")
    table = importers.read("curves", path, system="2 nodes x 8 H100 (TCPXO)")
    assert len(table.routes.gpu.points) == 11 and "nccl-tests" in table.routes.gpu.source


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"collective": "broadcast"}, "collective = 'broadcast'"),
        ({"curves": []}, "curves: is empty"),
        ({"curves": [{"points": []}]}, r"curves\[0\].points: is empty"),
        ({"curves": [{"points": [{"size_bytes": 4, "us": 0}]}]}, r"points\[0\].us = 0"),
        ({"curves": [{"points": [{"size_bytes": 4}]}]}, "neither us nor in_place_us"),
        ({"curves": [{"points": [{"size_bytes": 8, "us": 1}, {"size_bytes": 4, "us": 1}]}]}, "does not grow"),
        (
            {"curves": [{"points": [{"size_bytes": 4, "us": 9.0}, {"size_bytes": 8, "us": 2.0}]}]},
            r"points\[1\].us = 2.0: is below 9.0 us for 4 bytes: not monotone",
        ),
        ({"unit": "ms"}, "unknown field `unit`"),
        ({"world_size": -5}, "world_size = -5: must be at least 1"),
        ({"curves": [{"points": [{"size_bytes": 10**400, "us": 1.0}]}]}, r"points\[0\].size_bytes = 1000"),
    ],
)
def test_broken_curves_file(tmp_path, change, message):
    content = {
        "source": "a test",
        "collective": "all_gather",
        "curves": [{"points": [{"size_bytes": 4, "us": 1.0}]}],
    } | change
    with pytest.raises(InputError, match=message):
        importers.read("curves", logs.write(tmp_path, json.dumps(content)))
