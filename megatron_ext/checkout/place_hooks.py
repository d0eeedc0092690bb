"""Insert the hook lines into one file, at places that the syntax tree proves.

A patch without context applies by line number to any file that is long enough, even in the wrong place, without an
error. So a line is inserted only where ``find_places.py`` finds the one gap for it, and ``verify.py`` checks the
result. If the file is that of a release, the git blob id of the result must also be the one in the manifest.
"""

from megatron_ext.checkout.find_places import find_gaps
from megatron_ext.checkout.patchset import blob_id, known_files
from megatron_ext.checkout.syntax import PlaceError
from megatron_ext.checkout.verify import verify_text


def place_hooks(file: str, text: str) -> tuple[str, str]:
    """Patch ``text``, the present content of ``file``, which holds no hook line. Returns the patched text, and how it
    was made: ``exact`` (a known file) or ``syntax tree``.

    Raises:
        PlaceError: a hook's place is not proven. The text names the hook and the lines that are the reason.
    """
    rows = text.split("\n")
    for gap in sorted(find_gaps(file, text), key=lambda gap: gap.chosen, reverse=True):
        rows.insert(gap.chosen, gap.line)
    placed = "\n".join(rows)
    known = known_files().get((file, blob_id(text.encode())))
    assert known is None or blob_id(placed.encode()) == known.postimage, f"{file} is not as the manifest says"
    problems = verify_text(file, placed)
    if problems:
        raise PlaceError(f"verification: {problems[0]}")
    return placed, "syntax tree" if known is None else "exact"
