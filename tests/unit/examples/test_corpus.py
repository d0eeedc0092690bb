"""A corpus whose index is damaged is refused in one line; Megatron's reader asserts, or reads beyond the tokens."""

import struct

import corpus
import numpy
import pytest

from megatron_ext.formats.errors import InputError

LENGTHS = [80, 90]


def write(prefix, lengths=LENGTHS, *, header=corpus.INDEX_HEADER, version=1, code=8, offset=0, first=(0, 1, 2)) -> None:
    head = struct.pack("<9sQBQQ", header, version, code, len(lengths), len(first))
    offsets = numpy.cumsum([offset, *(2 * length for length in lengths[:-1])])
    parts = ((lengths, numpy.int32), (offsets, numpy.int64), (first, numpy.int64))
    arrays = [numpy.array(values, kind).tobytes() for values, kind in parts]
    prefix.with_suffix(".idx").write_bytes(head + b"".join(arrays))
    prefix.with_suffix(".bin").write_bytes(bytes(2 * sum(LENGTHS)))


def test_documents_of_a_whole_index(tmp_path):
    write(tmp_path / "c")
    assert corpus.read_index(tmp_path / "c")[0].tolist() == LENGTHS
    with pytest.raises(InputError, match="0 tokens for validation"):  # and nothing before that
        corpus.check(tmp_path / "c", 64, 259)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"header": b"MMIDIDY\x00\x00"}, "is not an index"),
        ({"version": 2}, "another version"),
        ({"code": 77}, "another version"),
        ({"lengths": [80, 91]}, "does not belong to the tokens next to it, which have 340 bytes"),
        ({"lengths": [80, -90]}, "its documents do not match its sequences"),
        ({"offset": -160}, "does not belong to the tokens"),
        ({"first": (0, 1, 3)}, "its documents do not match its sequences"),
        ({"first": (0, 3, 2)}, "its documents do not match its sequences"),
        ({"first": ()}, "its documents do not match its sequences"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, damage, said):
    write(tmp_path / "c", **damage)
    with pytest.raises(InputError, match=rf"c\.idx: --data-path: .*{said}"):
        corpus.check(tmp_path / "c", 64, 259)


@pytest.mark.parametrize("kept", [0, 5, 40, 60])
def test_an_index_that_was_cut_off_is_named(tmp_path, kept):
    write(tmp_path / "c")
    path = tmp_path / "c.idx"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=r"c\.idx: --data-path: is "):
        corpus.check(tmp_path / "c", 64, 259)


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    lengths = [200, *[1] * 48, 200]  # the last of 50 documents is for validation
    write(tmp_path / "c", lengths, first=range(51))
    tokens = numpy.zeros(sum(lengths), numpy.uint16)
    tokens[-1] = 259
    (tmp_path / "c.bin").write_bytes(tokens.tobytes() + b"0")  # half a token behind them is nobody's
    corpus.check(tmp_path / "c", 64, 260)
    with pytest.raises(InputError, match=r"c\.bin: --data-path: holds token 259; --vocab-size 259 ends at 258"):
        corpus.check(tmp_path / "c", 64, 259)
