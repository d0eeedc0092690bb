"""The report of the tier for GPUs: one file, written anew after every case, that can be sent back."""

import contextlib
import datetime
import hashlib
import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace

from megatron_ext.checkout.tree import Tree
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.formats.facts import Facts
from megatron_ext.runtime import free_host_memory
from megatron_ext.runtime.drive import filesystem

Status = Literal["pass", "FAIL", "HUNG", "DIED", "could not try", "NOT RUN"]

FINAL: tuple[Status, ...] = ("pass", "FAIL", "HUNG", "DIED", "could not try")
"""What a case is not run again for."""

GIVEN_UP = "given up in"
"""Begins what is said of a measurement in which something did not end."""

SHORT_OF_DEVICE = "not run: needs"
"""Begins what is said of a case that the device has no memory for."""

OF_MEMORY = ("holds at least", "cannot fit", "nothing fits")
"""In refusals of what no plan can do within its limits: nothing is wrong."""

PACKAGES = (
    *("numpy", "transformer-engine", "transformer-engine-torch", "flash-attn", "apex", "cuda-bindings"),
    *("nvidia-nccl-cu13", "triton", "py-spy"),
)
DEVICE_FACTS = (
    *("name", "driver_version", "memory.total", "memory.used", "pcie.link.gen.max", "pcie.link.width.max"),
    *("compute_mode", "mig.mode.current"),
)
VARIABLES = ("NCCL_", "NVTE_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "MALLOC_", "LD_LIBRARY_PATH")
"""How names of variables begin that libraries read."""

SOURCES = ("megatron_ext/**/*.py", "examples/*.py", "patches/**/*", "tests/gpu/*.py", "tests/helpers/*.py")


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What came of one case.

    Attributes:
        said: one line.
        seconds: that it took.
        stacks: of all threads, where it hung.
        output: the end of what was printed, where it did not pass.
        figures: measured values, units in their names.
        command: by which it is run alone, and what its processes were started by; empty where it was not tried.
        spare: its absence fails nothing.
    """

    case: str
    status: Status
    said: str = ""
    seconds: float = 0.0
    stacks: str = ""
    output: str = ""
    figures: dict = {}
    command: str = ""
    spare: bool = False


class GpuReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All results of one run.

    Attributes:
        sources_sha256: of the code under test; results of other code are not taken over.
        spent_seconds: of the budget, by the last run.
    """

    schema_version: int = 1
    kind: Literal["gpu_report"] = "gpu_report"
    created_at: str
    commit: str
    sources_sha256: str
    dry_run: bool
    budget_seconds: float
    spent_seconds: float = 0.0
    machine: dict[str, Facts]
    results: tuple[Result, ...] = ()

    def with_result(self, result: Result) -> "GpuReport":
        """The report with one result in the place of its case."""
        return replace(self, results=tuple(result if one.case == result.case else one for one in self.results))

    def of(self, case: str) -> Result | None:
        """The result of a case."""
        return next((result for result in self.results if result.case == case), None)

    @property
    def passed(self) -> bool:
        """Whether nothing failed and nothing that has to be run was left."""
        return all(
            result.status in ("pass", "could not try") or (result.spare and result.status == "NOT RUN")
            for result in self.results
        )


def new_report(root: Path, machine: dict[str, Facts], cases, *, dry_run: bool, budget: float) -> GpuReport:
    """A report of a run that begins now; ``cases``: ``(name, spare)``."""
    return GpuReport(
        created_at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        commit=_commit(root),
        sources_sha256=_sources(root),
        dry_run=dry_run,
        budget_seconds=budget,
        machine=machine,
        results=tuple(Result(case=name, status="NOT RUN", spare=spare) for name, spare in cases),
    )


def resumed(report: GpuReport, path: Path) -> GpuReport:
    """The report with the results of an earlier one of the same code, kind and machine, if it is there. Any other is
    put aside."""
    if not path.exists():
        return report
    same = lambda one: (one.sources_sha256, one.dry_run, one.machine["hardware"])
    with contextlib.suppress(InputError):
        earlier = json_files.load(path, GpuReport)
        if same(earlier) == same(report):
            return _taken_over(report, earlier)
    aside = path.with_suffix(".earlier.json")
    path.replace(aside)
    print(f"test_gpu: not resumed: {path} is of other code or another machine, and is now {aside}", flush=True)
    return report


def _taken_over(report: GpuReport, earlier: GpuReport) -> GpuReport:
    for result in earlier.results:
        if result.status in FINAL:
            known = report.of(result.case) is not None
            report = report.with_result(result) if known else replace(report, results=(*report.results, result))
    return report


def machine_facts(environment: dict[str, Facts], root: Path, drive: Path | None, more: Facts) -> dict[str, Facts]:
    """What figures and failures depend on: ``environment`` as ``runtime.machine`` says it, driver, packages, limits and
    variables besides. ``more``: of the host."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    packages["megatron-core"] = Tree(root / ".megatron").version if (root / ".megatron").is_dir() else None
    try:
        packages["cudnn"] = torch.backends.cudnn.version()
    except RuntimeError as error:  # another release than PyTorch's own is found: what that means, cases say
        packages["cudnn"] = one_line(str(error))
    locked, shared = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], Path("/dev/shm")
    host = {
        "kernel": platform.release(),
        "interpreter": sys.executable,
        "nvidia_smi": _output(["nvidia-smi", f"--query-gpu={','.join(DEVICE_FACTS)}", "--format=csv,noheader"]),
        "locked_memory_limit": "none" if locked == resource.RLIM_INFINITY else locked,
        "memory_available_bytes": free_host_memory.available_bytes(),
        "shm_free_bytes": shutil.disk_usage(shared).free if shared.is_dir() else 0,
        "drive": f"{drive} ({filesystem(drive)})" if drive else None,
        "drive_free_bytes": shutil.disk_usage(drive).free if drive else None,
    }
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {**environment, "packages": packages, "host": {**host, **more}, "variables": variables}


def table(report: GpuReport) -> str:
    """For people: a line a case, and the sum."""
    lines = [f"{result.status:<13} {result.seconds:6.1f} s  {result.case}" for result in report.results]
    for index, result in enumerate(report.results):
        if result.said and (result.status != "pass" or result.said.startswith(GIVEN_UP)):
            lines[index] += f"\n{'':24}{result.said[:400]}"
    counts = {status: sum(result.status == status for result in report.results) for status in (*FINAL, "NOT RUN")}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    if short := sum(result.said.startswith(SHORT_OF_DEVICE) for result in report.results):
        summary += f" ({short} for lack of device memory)"
    return "\n".join([*lines, "", f"{summary}; {report.spent_seconds:.0f} of {report.budget_seconds:.0f} s"])


def _commit(root: Path) -> str:
    found = _output(["git", "-C", str(root), "rev-parse", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return f"{found} and changes" if changed else found


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _sources(root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted({path for pattern in SOURCES for path in root.glob(pattern) if path.is_file()}):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
