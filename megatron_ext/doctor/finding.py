"""What the doctor found: one finding per check, the report that holds them, and the table that people read."""

from collections import Counter
from typing import Literal

import msgspec

from megatron_ext.formats.facts import Facts

Status = Literal["pass", "fail", "could not try"]


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of one check.

    Attributes:
        check: what was checked.
        found: the result, in one line.
        advice: what to do; empty if nothing has to be done.
        figures: measured values, with units in their names.
    """

    check: str
    status: Status
    found: str
    advice: str = ""
    figures: dict[str, float | str] = {}


class DoctorReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All findings of one run; written to a file that can be attached to an issue.

    Attributes:
        version: the version of megatron-ext.
        ranks, nodes: the number of processes that took part, and of nodes that they ran on.
        machine: hardware and software of the first node, in the form of a cost table's metadata.
    """

    schema_version: int
    kind: Literal["doctor_report"]
    created_at: str
    version: str
    ranks: int
    nodes: int
    machine: dict[str, Facts]
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether a check failed."""
        return any(finding.status == "fail" for finding in self.findings)


DID_NOT_END, NOT_REACHED = "did not end", "not reached"
"""The result of the check that is being made, and of the checks after it, until their own results are known."""


def left_of(report: DoctorReport) -> tuple[tuple[Finding, ...], str | None, tuple[str, ...]]:
    """What the processes that wrote ``report`` left undone, once they have ended.

    Returns:
        The findings so far, the check in which the processes ended or None, and the checks that are left.
    """
    left = tuple(one.check for one in report.findings if one.found == NOT_REACHED)
    found = report.findings[: len(report.findings) - len(left)]
    if found and found[-1].found == DID_NOT_END:
        return found[:-1], found[-1].check, left
    return found, None, left


Figures = dict[str, float | str] | None


def passed(check: str, found: str, advice: str = "", figures: Figures = None) -> Finding:
    """A finding of a check that passed."""
    return Finding(check=check, status="pass", found=found, advice=advice, figures=figures or {})


def failed(check: str, found: str, advice: str, figures: Figures = None) -> Finding:
    """A finding of a check that failed."""
    return Finding(check=check, status="fail", found=found, advice=advice, figures=figures or {})


def not_tried(check: str, why: str, advice: str = "", figures: Figures = None) -> Finding:
    """A finding of a check that could not be made."""
    return Finding(check=check, status="could not try", found=why, advice=advice, figures=figures or {})


def not_reached(check: str) -> Finding:
    """A finding of a check that the processes have not reached."""
    return not_tried(check, NOT_REACHED)


def no_time(check: str, seconds: float) -> Finding:
    """A finding of a check for which none of the ``seconds`` for all checks were left."""
    return not_tried(check, f"the {seconds:.0f} s for all checks were used up", "give more with --seconds")


SEVERITY: tuple[Status, ...] = ("pass", "could not try", "fail")


def merged(of_ranks: list[list[Finding]]) -> list[Finding]:
    """One finding per check from the findings of all ranks: the worst, with the number of ranks that have it unless all
    of them do. Checks keep their order."""
    names = dict.fromkeys(finding.check for findings in of_ranks for finding in findings)
    return [_worst(name, of_ranks) for name in names]


def _worst(name: str, of_ranks: list[list[Finding]]) -> Finding:
    seen = [(rank, found) for rank, findings in enumerate(of_ranks) for found in findings if found.check == name]
    worst = max((found.status for _, found in seen), key=SEVERITY.index)
    same = [(rank, found) for rank, found in seen if found.status == worst]
    rank, found = same[0]
    if len(same) == len(of_ranks) or worst == "pass":
        return found
    others = f" and {len(same) - 1} more" if len(same) > 1 else ""
    return msgspec.structs.replace(found, found=f"rank {rank}{others}: {found.found}")


def text(report: DoctorReport) -> str:
    """The report as text: a table, what to do, and a summary."""
    width = max((len(finding.check) for finding in report.findings), default=0)
    lines = [f"{finding.status:<13}  {finding.check:<{width}}  {finding.found}" for finding in report.findings]
    todo = [f"  {finding.check}: {finding.advice}" for finding in report.findings if finding.advice]
    if todo:
        lines += ["", "what to do:", *todo]
    count = Counter(finding.status for finding in report.findings)
    lines += ["", ", ".join(f"{count[status]} {status}" for status in SEVERITY)]
    return "\n".join(lines)
