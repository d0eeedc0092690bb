"""Pictures are written as all files are: in one step, over regular files alone."""

import io

from megatron_ext.formats import json_files


def save(path, figure, *, dpi: int = 110) -> None:
    """Write a matplotlib figure as PNG.

    Raises:
        InputError: the place cannot be written.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    json_files.write_atomically(path, buffer.getvalue())
