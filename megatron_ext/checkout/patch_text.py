"""What ``megatron-ext patch`` prints."""

from pathlib import Path

from megatron_ext.checkout.hook_table import FILES, HOOKS
from megatron_ext.checkout.patching import TreeReport
from megatron_ext.checkout.patchset import blob_id, manifest
from megatron_ext.checkout.tree import Tree


def as_text(report: TreeReport, verb: str) -> str:
    """The report for people. If something is to be done, the last line says what."""
    lines = []
    dry_run = bool(report.diff) and not report.changed
    if dry_run:
        lines.append(report.diff.rstrip("\n"))
    if report.repaired:
        lines.append(f"an interrupted earlier command was {report.repaired}")
    lines.append(f"{report.path}: megatron-core {report.version}: {report.state}")
    if verb == "apply":
        lines += _inserted(report, dry_run)
    elif verb == "revert":
        count = sum(row.startswith("-") and not row.startswith("---") for row in report.diff.split("\n"))
        done = "would be taken out" if dry_run else "taken out"
        lines.append(f"  {count} lines {done}" if count else "  nothing was changed: no hook line was there")
    for entry in report.files:
        if entry.state not in ("clean", "applied"):
            lines.append(f"  {entry.state}  {entry.file}: {entry.detail}")
    if report.core_only:
        lines.append("  core only: the training scripts (pretrain_gpt.py, megatron/training) are absent")
    elif report.absent:
        lines.append(f"  absent: {', '.join(report.absent)}")
    if verb == "check" and report.state in _ADVICE:
        lines.append(_ADVICE[report.state].format(path=report.path))
    return "\n".join(lines)


_ADVICE = {
    "clean": "`megatron-ext patch apply {path}` inserts the hooks",
    "drifted": "run `megatron-ext patch revert {path}`, then apply again",
    "conflict": "the hooks cannot be placed; change what is named above, or use another release",
}
_HOW = {"exact": "a file of a known release", "syntax tree": "placed by the syntax tree"}


def _inserted(report: TreeReport, dry_run: bool) -> list[str]:
    """Text lines that say what ``apply`` inserted: lines, files and places."""
    count = sum(len(entry.lines) for entry in report.files)
    if not (report.changed or dry_run):
        return [f"  nothing was changed: all {count} lines were there already"]
    done = "would be inserted" if dry_run else "inserted"
    found = [f"  {count} lines {done} into {len(report.files)} files"]
    for entry in report.files:
        link = Path(report.path, entry.file)
        target = f" -> {link.resolve()}" if link.is_symlink() else ""
        numbers = f"line{'s' if len(entry.lines) > 1 else ''} {', '.join(map(str, entry.lines))}"
        found.append(f"    {entry.file}{target}: {numbers} ({_HOW[entry.detail]})")
    return found


def releases(checkout: str | None = None) -> dict:
    """The supported releases and the inserted lines; with a checkout, also the releases that its files are from.

    Raises:
        InputError: the checkout is not a Megatron tree.
    """
    found = manifest()
    payload = {
        "releases": [
            {"version": r.version, "ref": r.ref, "commit": r.commit, "patch": r.patch} for r in found.releases
        ],
        "hooks": [{"name": h.name, "file": h.file, "place": h.place, "purpose": h.purpose} for h in HOOKS],
        "files": list(FILES),
    }
    if checkout is not None:
        tree = Tree(checkout)
        of_files: dict[str, list[str]] = {}
        for file in tree.present:
            own = blob_id((tree.root / file).read_bytes())
            entries = ((r.version, e) for r in found.releases for e in r.files if e.path == file)
            of_files[file] = [version for version, e in entries if own in (e.preimage, e.postimage)]
        payload["checkout"] = {"path": str(tree.root), "version": tree.version, "core_only": tree.core_only}
        payload["checkout"]["releases"] = of_files
    return payload


def releases_text(payload: dict) -> str:
    """The list for people."""
    lines = [f"{len(payload['hooks'])} lines in {len(payload['files'])} files:"]
    lines += [f"  {h['name']:34} {h['file']}\n      {h['purpose']}" for h in payload["hooks"]]
    lines.append("releases: " + ", ".join(release.name for release in manifest().releases))
    if "checkout" in payload:
        found = payload["checkout"]
        lines.append(f"{found['path']}: megatron-core {found['version']}")
        for file, versions in found["releases"].items():
            lines.append(f"  {file}: {', '.join(versions) or 'no known release has exactly this file'}")
    return "\n".join(lines)
