"""A real corpus that every machine has: the Python standard library's own source, tokenized by bytes.

Bytes are tokens 0 to 255. Special tokens have larger ids, so that no byte is taken for one.
"""

import os
import struct
import sys
import sysconfig
from pathlib import Path

from megatron_ext.formats.errors import InputError

VOCAB_SIZE, EOS, PAD, BOS = 259, 256, 257, 258

TRAIN_SHARE = 0.98
SPLIT = "98,2,0"
"""Megatron's --split: documents for training, validation, test."""

INDEX_HEADER = b"MMIDIDX\x00\x00"
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}
"""NumPy's name for each code of a token type in an index (DType of megatron/core/datasets/indexed_dataset.py)."""

LOOKED_AT = 1 << 26
"""How many tokens are compared with the vocabulary. Only the first ones are, because a corpus may have hundreds of
gigabytes."""


def tokenizer():
    """Megatron's byte-level tokenizer with special ids above those of bytes."""
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(
        tokenizer_path=None,
        metadata_path={"library": "byte-level"},
        vocab_size=VOCAB_SIZE,
        _eos_id=EOS,
        _pad_id=PAD,
        _bos_id=BOS,
    )


def sources() -> list[Path]:
    """Top-level modules of the standard library, in a fixed order."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def build(prefix, *, progress=None) -> int:
    """Write ``prefix``.bin and ``prefix``.idx with one document per source file. Returns the number of tokens.

    The files get their names only when they are complete.
    """
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = Path(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    temporary = prefix.with_name(f".{prefix.name}.{os.getpid()}")
    builder = IndexedDatasetBuilder(f"{temporary}.bin", dtype=numpy.uint16)
    total = 0
    try:
        for path in sources():
            tokens = list(path.read_bytes()) + [EOS]
            builder.add_document(torch.tensor(tokens, dtype=torch.int32), [len(tokens)])
            total += len(tokens)
            if progress is not None:
                progress(path.name)
        builder.finalize(f"{temporary}.idx")
        os.replace(f"{temporary}.bin", f"{prefix}.bin")
        os.replace(f"{temporary}.idx", f"{prefix}.idx")
    finally:
        for suffix in (".bin", ".idx"):
            Path(f"{temporary}{suffix}").unlink(missing_ok=True)
    return total


def compile_helpers() -> None:
    """Compile Megatron's dataset helpers if the tree has none, as Megatron does when it starts.

    Released packages contain the helpers; a checkout builds them in place with g++ and pybind11.
    Collective: one rank of each node compiles while the others wait.

    Raises:
        InputError: the helpers cannot be compiled. The compiler's output has been printed.
    """
    import importlib.util

    import torch.distributed as dist

    if (
        importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None
        and int(os.environ.get("LOCAL_RANK", 0)) == 0
    ):
        from megatron.core.datasets import utils

        try:
            utils.compile_helpers()
        except SystemExit:  # what Megatron does when make fails
            raise InputError(
                "the dataset helpers cannot be compiled; they need make, g++ and pybind11",
                file=os.path.dirname(utils.__file__),
            ) from None
    dist.barrier()
    importlib.invalidate_caches()


def read_index(prefix):
    """Read the index ``prefix``.idx. Returns the number of tokens of every document (int32) and the tokens' NumPy type.

    With a damaged index Megatron's reader fails an assertion, or reads beyond the tokens in training. The format is
    that of megatron/core/datasets/indexed_dataset.py: header, version, code of the tokens' type, counts; then lengths
    (int32), offsets in bytes (int64), and the number of the first sequence of every document and of the end (int64).

    Raises:
        InputError: the index is damaged, or does not belong to ``prefix``.bin.
    """
    import numpy

    path = f"{prefix}.idx"
    head, token_bytes = struct.Struct("<9sQBQQ"), os.path.getsize(f"{prefix}.bin")
    data = numpy.memmap(path, mode="r") if os.path.getsize(path) >= head.size else numpy.zeros(0, numpy.uint8)
    if not data[: len(INDEX_HEADER)].tobytes() == INDEX_HEADER:
        raise InputError("is not an index of Megatron's indexed datasets", file=path, field="--data-path")
    _, version, code, sequences, documents = head.unpack(data[: head.size].tobytes())
    if version != 1 or code not in TOKEN_TYPES or len(data) < head.size + 12 * sequences + 8 * documents:
        raise InputError("is damaged or of another version", file=path, field="--data-path")
    lengths = numpy.frombuffer(data, numpy.int32, sequences, head.size)
    offsets = numpy.frombuffer(data, numpy.int64, sequences, head.size + 4 * sequences)
    first = numpy.frombuffer(data, numpy.int64, documents, head.size + 12 * sequences)
    ends = offsets + numpy.dtype(TOKEN_TYPES[code]).itemsize * lengths.astype(numpy.int64)
    if not documents or first[0] or first[-1] != sequences or (numpy.diff(first) < 0).any() or (lengths < 0).any():
        raise InputError("is damaged: its documents do not match its sequences", file=path, field="--data-path")
    if (offsets < 0).any() or (offsets > token_bytes).any() or (ends > token_bytes).any():
        raise InputError(
            f"is damaged, or does not belong to the tokens next to it, which have {token_bytes} bytes",
            file=path,
            field="--data-path",
        )
    return lengths, numpy.dtype(TOKEN_TYPES[code])


def check(prefix, seq_length: int, vocab_size: int) -> None:
    """Refuse a corpus that is missing, has no whole sample, or has tokens that are not in the vocabulary.

    Raises:
        InputError: naming the file; also if the index is damaged or does not belong to its tokens.
    """
    import numpy

    for suffix in (".bin", ".idx"):
        if not os.path.isfile(f"{prefix}{suffix}"):
            raise InputError("no such file", file=f"{prefix}{suffix}", field="--data-path")
    lengths, token_type = read_index(prefix)
    tokens = int(lengths.sum())
    # Megatron splits by documents. In a part without a token it would search for ever.
    train_documents = int(round(len(lengths) * TRAIN_SHARE))
    for part, found in (("training", lengths[:train_documents]), ("validation", lengths[train_documents:])):
        if int(found.sum()) < seq_length + 1:
            raise InputError(
                f"the corpus is too short: {int(found.sum())} tokens for {part}, one sample "
                f"of --seq-length {seq_length} needs {seq_length + 1}",
                file=f"{prefix}.idx",
                field="tokens",
                value=tokens,
            )
    count = min(os.path.getsize(f"{prefix}.bin") // token_type.itemsize, LOOKED_AT)
    found = numpy.memmap(f"{prefix}.bin", token_type, mode="r", shape=count)
    for token in (int(found.min()), int(found.max())):
        if not 0 <= token < vocab_size:
            raise InputError(
                f"holds token {token}; --vocab-size {vocab_size} ends at {vocab_size - 1}",
                file=f"{prefix}.bin",
                field="--data-path",
            )


def main() -> int:
    """``python examples/corpus.py PREFIX``: build the corpus."""
    from rich.console import Console
    from rich.progress import Progress

    from megatron_ext.megatron import cpu_compat

    if len(sys.argv) != 2:
        print("usage: python examples/corpus.py PREFIX", file=sys.stderr)
        return 2
    cpu_compat.install()

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("corpus", total=len(sources()))
        tokens = build(sys.argv[1], progress=lambda name: bar.advance(task))
    print(f"{sys.argv[1]}: {tokens:,} tokens from {len(sources())} files", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
