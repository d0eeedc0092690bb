"""Logs in the form that nccl-tests 2.13 and nvbandwidth 0.4 print, built from figures.

All-gather times: ../data/published_allgather_curves.json (2 nodes x 8 H200-class, out of place).
"""

import json
from pathlib import Path

PUBLISHED = json.loads((Path(__file__).parents[1] / "data" / "published_allgather_curves.json").read_text())
ROWS = [(row["size_bytes"], row["us"]) for row in PUBLISHED["curves"][0]["points"]]


def nccl_tests(rows=ROWS, program="all_gather_perf", redop="none", unit="us", factor=1.0, summary=True) -> str:
    lines = [
        f"# Collective test starting: {program}" if program else "#",
        f"# nThread 1 nGpus 1 minBytes {rows[0][0]} maxBytes {rows[-1][0]} step: 2(factor) warmup iters: 5 iters: 20 "
        "agg iters: 1 validation: 1 graph: 0",
        "#",
        "# Using devices",
        *(
            f"#  Rank {rank:2} Group  0 Pid  {1000 + rank} on node{rank // 8:03} device  {rank % 8} [0x0{rank % 8}] "
            "NVIDIA H200"
            for rank in range(16)
        ),
        "NCCL version 2.21.5+cuda12.4",
        "#",
        "#                                                              out-of-place                       in-place  "
        "        ",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   "
        "busbw #wrong",
        f"#        (B)    (elements)                               ({unit})  (GB/s)  (GB/s)            ({unit})  "
        "(GB/s)  (GB/s)       ",
    ]
    for size, us in rows:
        us *= factor
        rate = size / (us / factor) / 1e3 if us else 0
        cells = f"{us:8.2f} {rate:7.2f} {rate * 15 / 16:7.2f}      0"
        lines.append(f"{size:12} {size // 4:13}     float    {redop}      -1 {cells} {cells}")
    if summary:
        lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 150.1 ", "#", ""]
    return "\n".join(lines) + "\n"


def nvbandwidth(unit="GB/s", total=None) -> str:
    def test(name, arrow, rates):
        return [
            f"Running {name}.",
            f"memcpy CE CPU(row) {arrow} GPU(column) bandwidth ({unit})",
            "           0         1",
            " 0 " + " ".join(f"{rate:9.2f}" for rate in rates),
            "",
            f"SUM {name} {sum(rates) if total is None else total:.2f}",
            "",
        ]

    lines = [
        "nvbandwidth Version: v0.4",
        "Built from Git version: ",
        "",
        "CUDA Runtime Version: 12040",
        "CUDA Driver Version: 12040",
        "Driver Version: 550.54.15",
        "",
        "Device 0: NVIDIA H200",
        "Device 1: NVIDIA H200",
        "",
        *test("host_to_device_memcpy_ce", "->", [55.4, 55.2]),
        *test("device_to_host_memcpy_ce", "<-", [55.1, 55.0]),
        *test("host_to_device_bidirectional_memcpy_ce", "<->", [27.7, 27.6]),
    ]
    return "\n".join(lines) + "\n"


def write(tmp_path, text: str) -> Path:
    path = tmp_path / "log.txt"
    path.write_text(text)
    return path
