"""What whoever has started the ranks makes of what they tell."""

import pytest

from megatron_ext.formats.errors import InputError, RankFailed
from megatron_ext.measure.local_launch import found
from megatron_ext.measure.options import Options

OPTIONS = Options(seconds=3.0, keep_path="T")
STACKS = "Timeout (0:00:03)!\nThread 0x1 (most recent call first):\n  File contention.py"


def at(what: str, measures: bool = True) -> dict:
    return {"what": what, "measures": measures}


def test_what_is_there_becomes_the_table_where_the_rest_does_not_end(capsys):
    told = [at("ready"), {"so_far": {"a": 1}}, {"so_far": {"a": 2}}, at("gpu while compute is busy")]
    assert found(told, STACKS, OPTIONS) == {"a": 2, "given_up": "gpu while compute is busy"}
    said = capsys.readouterr().err
    assert "in gpu while compute is busy:" in said and "File contention.py" in said


def test_where_nothing_is_there_yet_it_is_said_what_hangs():
    with pytest.raises(
        RankFailed, match=r"not ended in time for --seconds 3, it was at: optimizer 2 GiB; .* kept results"
    ):
        found([at("ready"), at("optimizer 2 GiB")], STACKS, OPTIONS)


@pytest.mark.parametrize(
    ("told", "what"),
    [([], "importing PyTorch and connecting the ranks"), ([at("first use of gpu", False)], "first use of gpu")],
)
def test_ranks_that_do_not_start_are_not_waited_for(told, what):
    with pytest.raises(RankFailed, match=f"^the ranks have not started: {what} took more than 300 s$"):
        found(told, STACKS, OPTIONS)


def test_a_result_counts_whatever_came_before_or_was_printed():
    assert found([at("ready"), {"so_far": {}}, {"result": {"a": 3}}], "a warning", OPTIONS) == {"a": 3}


def test_a_rank_that_fails_is_no_rank_whose_time_is_up():
    with pytest.raises(RankFailed, match="a rank of the measurement failed: ValueError: no"):
        found([at("ready"), {"so_far": {"a": 1}}], "ValueError: no", OPTIONS)


def test_bad_input_is_said_in_a_ranks_words():
    with pytest.raises(InputError, match="--modules: cannot be imported"):
        found([{"input_error": "--modules: cannot be imported"}], "", OPTIONS)
