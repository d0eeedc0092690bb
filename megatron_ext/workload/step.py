"""One forward or backward of one model chunk for one micro-batch, and its text form."""

import re
from typing import NamedTuple

_TEXT = re.compile(r"(\d{1,9})([FB])(\d{1,9})")


class Step(NamedTuple):
    """One step of a pipeline rank; prints as ``<stage><F or B><microbatch>``, e.g. ``5B12``.

    The text form is that of torch.distributed.pipelining's ``_Action``. ``stage`` is
    ``model_chunk_id * pipeline_model_parallel_size + pp_rank``.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Step":
        """Inverse of ``str``. Raises ValueError on any other text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a step; expected <stage><F or B><microbatch>, e.g. 5B12")
        return cls(int(match[1]), match[2], int(match[3]))

    def model_chunk_id(self, pp: int) -> int:
        """Model chunk of this step with ``pp`` pipeline ranks."""
        return self.stage // pp
