"""Write pictures as all other files are written: in one step, and only over regular files."""

import io

from megatron_ext.formats import json_files


def save(path, figure, *, dpi: int = 110) -> None:
    """Write a matplotlib figure as PNG.

    Raises:
        InputError: ``path`` cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    json_files.write_atomically(path, buffer.getvalue())
