"""Put our lines into one file: where a patch is for this very file, or where the syntax tree proves each place.

A patch without context applies by line number to any file that is long enough, in the wrong place and without
complaint. So a recorded patch goes only into the file whose git blob id it names. Into any other file a line goes
only where ``places.py`` finds the one gap for it. Either way ``verify.py`` has the last word.
"""

from dataclasses import dataclass

from megatron_ext.checkout.patchset import blob_id, insertions_by_blob
from megatron_ext.checkout.places import find_gaps
from megatron_ext.checkout.syntax import PlaceError
from megatron_ext.checkout.verify import verify_text


@dataclass(frozen=True)
class Placed:
    """The patched text of one file. ``how`` is ``exact`` (a known file) or ``syntax tree``."""

    text: str
    how: str


def place_hooks(file: str, text: str) -> Placed:
    """Patch ``text``, the present content of ``file``, which holds none of our lines.

    Raises:
        PlaceError: a hook's place is not proven; names the hook and the lines that say so.
    """
    insertion = insertions_by_blob().get((file, blob_id(text.encode())))
    if insertion is not None:
        placed = Placed(insertion.apply(text.encode()).decode(), "exact")
    else:
        rows = text.split("\n")
        for gap in sorted(find_gaps(file, text), key=lambda gap: gap.chosen, reverse=True):
            rows.insert(gap.chosen, gap.line)
        placed = Placed("\n".join(rows), "syntax tree")
    problems = verify_text(file, placed.text)
    if problems:
        assert placed.how != "exact", f"our own patch misplaces a hook: {problems[0]}"
        raise PlaceError(f"{problems[0].hook or 'verification'}: {problems[0].message}")
    return placed
