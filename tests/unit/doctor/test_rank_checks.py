"""What a rank says of a check that does not end."""

import io

import pytest

from megatron_ext.doctor import finding
from megatron_ext.doctor.place import DoctorOptions
from megatron_ext.doctor.rank_checks import CHECKS, LONGER, given_up

STACKS = 'Current thread 0x1 (most recent call first):\n  File "overlap.py", line 7 in check\n'
BEGUN = finding.failed("overlap", finding.DID_NOT_END, "send it")


@pytest.mark.parametrize(
    ("folder", "found"), [("", "did not end in 30 s: rank 0 in check (overlap.py:7)"), ("/folder", finding.DID_NOT_END)]
)
def test_a_check_that_had_less_time_than_others_have_is_no_check_that_hangs(folder, found):
    options = DoctorOptions(out="report.json", stacks=folder, seconds=120.0)
    hung = given_up(BEGUN, 30.0, 30.0, options, io.StringIO(STACKS))
    assert (hung.status, hung.check, hung.found) == ("fail", "overlap", found)
    cut_off = given_up(BEGUN, 4.0, 30.0, options, io.StringIO(STACKS))
    assert (cut_off.status, cut_off.found) == ("could not try", "the 120 s for all checks were used up")


def test_what_is_known_to_take_long_has_more_time():
    assert {*LONGER} == {"megatron-core", "training: cpu, zero stage 3, all on the host, clipped"} <= {*CHECKS}
