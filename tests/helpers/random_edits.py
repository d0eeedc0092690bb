"""Random edits near the places of hooks, as an owner of a checkout may make them."""

import ast
import random

from megatron_ext.checkout.hook_table import FILES

EDITS = 100
NAMES = "model_chunk_id update_successful parser config virtual_microbatch_id output_tensor args".split()


def edit(rng: random.Random, text: str, near: list[int]) -> str:
    """One to three edits within six lines of a hook's place."""
    rows = text.split("\n")
    for _ in range(rng.randint(1, 3)):
        at = min(max(0, rng.choice(near) + rng.randint(-6, 6)), len(rows) - 2)
        pad = rows[at][: len(rows[at]) - len(rows[at].lstrip())]
        kind = rng.choice("delete double add word swap indent comment blank rename move".split())
        if kind == "delete":
            del rows[at : at + rng.randint(1, 3)]
        elif kind == "double":
            rows.insert(at, rows[at])
        elif kind == "add":
            rows.insert(at, f"{pad}probe = {rng.randint(0, 9)}")
        elif kind == "word":
            rows[at] += "  # mine"
        elif kind == "swap":
            rows[at], rows[at + 1] = rows[at + 1], rows[at]
        elif kind == "indent":
            rows[at] = "    " + rows[at]
        elif kind == "comment":
            rows.insert(at, f"{pad}# a note")
        elif kind == "blank":
            rows.insert(at, "")
        elif kind == "rename":
            name = rng.choice(NAMES)
            rows = [row.replace(name, f"{name}_of_mine") for row in rows]
        elif kind == "move":
            rows.insert(min(len(rows), at + rng.randint(1, 6)), rows.pop(at))
    return "\n".join(rows)


def edit_files(rng: random.Random, originals: dict[str, str], entries) -> dict[str, str]:
    """``originals`` with one or two files edited; most of the time they still parse."""
    texts = dict(originals)
    for path in rng.sample([f for f in FILES if f in originals], rng.randint(1, 2)):
        near = [number - 1 for entry in entries if entry.path == path for number in entry.lines.values()]
        for _ in range(20):
            texts[path] = edit(rng, originals[path], near)
            try:
                ast.parse(texts[path])
            except SyntaxError:
                if rng.random() < 0.05:
                    break
                continue
            break
    return texts
