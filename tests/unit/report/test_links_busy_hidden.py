"""What was hidden behind compute: by hand, and in a report."""

import pytest
from event_rows import events
from planning_cases import make_workload
from run_files import make_run

from megatron_ext import report
from megatron_ext.formats.trace import END_NOT_KNOWN
from megatron_ext.report import report_text
from megatron_ext.report.links_busy import NAMES, STEP, Hidden, hidden, moving, over_iterations

PARALLEL = make_workload(pp=1, vp=1, dp=2, order="no_pipeline").parallel


def test_work_is_hidden_while_its_own_rank_computes_and_does_not_wait():
    seen = [
        *events(0, "compute", ("0F0", 0.0, 40.0), ("0B0", 40.0, 20.0)),
        *events(0, "wait", ("wait 1", 10.0, 5.0)),
        *events(1, "compute", ("0F0", 0.0, 10.0)),
        # Of the first, 5 while the step waits; of the second, 10 behind the last step.
        *events(0, "publish", ("publish 0", 5.0, 20.0), ("gradient 3", 50.0, 20.0)),
        *events(1, "publish", ("gradient", 50.0, 20.0)),  # its rank does not compute
        # Of the last two, 20 us in all.
        *events(0, "cpu", ("parameters", 70.0, 5.0), ("unshard 1", 0.0, 15.0), ("unshard 2", 5.0, 15.0)),
        *events(0, "gpu", (END_NOT_KNOWN, 0.0, 100.0), ("unshard 3", 0.0, 50.0)),
        *events(1, "gpu", ("unshard 3", 30.0, 20.0)),  # before, no byte moves
        *events(0, "nvme", ("states read", 55.0, 10.0)),
        *events(0, "optimizer", ("step", 60.0, 30.0)),
        *events(0, "host_step", ("2", 30.0, 10.0)),
    ]
    found = hidden(moving(seen, PARALLEL))
    assert found == {
        "publishing": Hidden(10.0, 0.75),  # means over two ranks
        "gradients to the host": Hidden(20.0, 0.25),
        "new parameters to the device": Hidden(2.5, 0.0),
        "copies to the device": Hidden(10.0, 0.75),
        "all-gathers": Hidden(20.0, 0.5),  # rank 1 computes no more
        "optimizer states, drive": Hidden(5.0, 0.5),
        STEP: Hidden(5.0, 1.0),
    }
    assert list(found) == [name for name in NAMES.values() if name in found]


def test_iterations_are_told_by_their_median():
    one, two = {"publishing": Hidden(10.0, 0.5), STEP: Hidden(4.0, 0.0)}, {"publishing": Hidden(30.0, 0.7)}
    (name, figure), *none = over_iterations([one, two]).items()
    assert name == "publishing" and figure == pytest.approx((20.0, 0.6)) and none == []


def test_a_report_says_it_beside_the_simulated_share(tmp_path):
    make_run(tmp_path)
    built = report.build(report.load(tmp_path))
    assert built.hidden["measured"]["all-gathers"].us == 20.0 and built.hidden["simulated"]
    measured = {"publishing": Hidden(2500.0, 0.25), STEP: Hidden(1000.0, 1.0)}
    built = built._replace(hidden={"measured": measured, "simulated": {"publishing": Hidden(2000.0, 0.5)}})
    lines = [
        "host's step: measured 1.000 ms, 100%; simulated -",
        "publishing: measured 2.500 ms, 25%; simulated 2.000 ms, 50%",
    ]
    assert report_text.hidden_lines(built) == lines
    text, page = report_text.as_text(built, width=200), report_text.as_markdown(built)
    assert all(line in text and line in page for line in lines)
    assert report_text.as_json(built)["hidden"]["measured"]["publishing"] == {"us": 2500.0, "share": 0.25}
