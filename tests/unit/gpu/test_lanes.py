"""In which order jobs of the tier for GPUs run, and which found time: with a clock that is told the time."""

import pytest
from case_table import PLANNED, PLANS, Program, Training, jobs
from msgspec.structs import replace
from simulated_lanes import job, machine, measured, report_of, simulate

REQUIRED = [one for one in jobs() if not one.spare]
LARGE = REQUIRED[1].cases[1]


def program(name: str, seconds: float = 10.0) -> Program:
    return Program(name=name, seconds=seconds, limit=100)


def training(name: str, of: Training = LARGE, **more) -> Training:
    return replace(of, name=name, **more)


def nominal(case) -> float:
    return case.seconds


@pytest.mark.parametrize("slower", [1.0, 1.15])
def test_all_that_has_to_be_run_has_time_on_an_h200(monkeypatch, slower):
    seconds = measured()
    went = simulate(monkeypatch, jobs(), machine(), lambda case: slower * seconds(case))
    assert went.left() == []
    assert max(end for name, end in went.ended.items() if not went.report.of(name).spare) < 530


@pytest.mark.parametrize("lanes, spent, slower", [(1, 30.0, 1.0), (3, 200.0, 1.0), (3, 330.0, 1.0), (3, 30.0, 2.0)])
def test_no_spare_case_is_run_while_one_that_has_to_be_has_no_result(monkeypatch, lanes, spent, slower):
    seconds = measured()
    went = simulate(monkeypatch, jobs(), machine(lanes=lanes), lambda case: slower * seconds(case), spent=spent)
    spare = {case.name for one in jobs() if one.spare for case in one.cases}
    assert went.left() and not spare & {*went.ended} and not spare & {name for _, name in went.begun}


def test_what_is_left_of_what_has_to_be_run_goes_before_what_is_spare(monkeypatch):
    took = {"late": 100.0, "first": 300.0, "spare": 20.0}
    late = job("late", program("late"), until=0.5)
    todo = [job("spare", program("spare"), alone=True, spare=True), job("first", program("first"), alone=True), late]
    went = simulate(monkeypatch, todo, machine(lanes=1), lambda case: took[case.name])
    assert [*went.ended] == ["first", "late", "spare"]


def test_jobs_pass_by_one_that_the_device_has_no_room_for(monkeypatch):
    small = training("small", of=REQUIRED[3].cases[-1])
    todo = [job("a", training("one")), job("b", training("two")), job("c", small)]
    went = simulate(monkeypatch, todo, machine(device_bytes=30 * 10**9), nominal)
    assert [name for _, name in went.begun] == ["a", "c", "b"] and went.begun[1][0] == went.begun[0][0]
    assert went.begun[2][0] > went.ended["one"] - 1


@pytest.mark.parametrize("short", [{"host_bytes": 60 * 10**9}, {"shared_bytes": 1 << 30}])
def test_jobs_wait_for_memory_of_the_host(monkeypatch, short):
    of = LARGE if "host_bytes" in short else REQUIRED[4].cases[0]  # 1B parameters; four ranks
    todo = [job("a", training("one", of=of)), job("b", training("two", of=of))]
    went = simulate(monkeypatch, todo, machine(**short), nominal)
    assert went.begun[1][0] >= went.ended["one"] and went.left() == []
    assert simulate(monkeypatch, todo, machine(), nominal).begun[1][0] == went.begun[0][0]


def test_nothing_passes_by_a_job_that_runs_alone(monkeypatch):
    todo = [job("a", program("one", 50.0)), job("alone", program("two"), alone=True), job("b", program("three"))]
    went = simulate(monkeypatch, todo, machine(), nominal)
    assert [name for _, name in went.begun] == ["a", "alone", "b"]
    assert went.begun[1][0] >= went.ended["one"] and went.begun[2][0] >= went.ended["two"]


def test_a_long_set_up_takes_its_part_from_all_jobs(monkeypatch):
    went = simulate(monkeypatch, jobs(), machine(), measured(), spent=330.0)
    assert {name for at, name in went.begun if at == 330.0} >= {"plans", "large, 1 rank"}
    assert went.report.of(PLANS).status == "pass"


def test_rows_whose_plans_were_not_made_for_lack_of_time_are_left(monkeypatch):
    planned = next(name for name, plans in PLANNED.items() if plans == PLANS)
    todo = [job("plans", program(PLANS, 500.0)), job("timings", program("timing: x"), program(planned), alone=True)]
    went = simulate(monkeypatch, todo, machine(), nominal, spent=100.0)
    assert went.left() == [PLANS, planned] and [*went.ended] == ["timing: x"]


def test_going_on_makes_plans_again_for_rows_that_have_no_result_alone(monkeypatch):
    planned = next(name for name, plans in PLANNED.items() if plans == PLANS)
    todo = [job("plans", program(PLANS)), job("timings", program(planned), alone=True)]
    again = simulate(monkeypatch, todo, machine(), nominal, report=report_of(todo, **{PLANS: "pass"}))
    assert [*again.ended] == [PLANS, planned]
    both = report_of(todo, **{PLANS: "pass", planned: "could not try"})
    refused = replace(both.of(planned), said="limits.device_bytes = 1: cannot fit: rank 0 holds at least 2 bytes")
    both = replace(both, results=(both.of(PLANS), refused))
    assert simulate(monkeypatch, todo, machine(), nominal, report=both).begun == []


def test_what_a_case_itself_could_not_try_is_tried_again(monkeypatch):
    """The device may be free again, or DeepSpeed be installed now."""
    todo = [job("a", training("one"))]
    report = report_of(todo, one="could not try")
    assert simulate(monkeypatch, todo, machine(), nominal, report=report).report.of("one").status == "pass"


def test_a_result_stays_where_a_machine_has_less_memory_than_before(monkeypatch):
    todo = [job("a", training("one"))]
    report = report_of(todo, one="pass")
    went = simulate(monkeypatch, todo, machine(host_bytes=1), nominal, report=report)
    assert went.report.of("one").status == "pass" and went.begun == []


def test_what_could_not_be_tried_is_run_once_it_can_be(monkeypatch):
    todo = [job("a", training("one"))]
    first = simulate(monkeypatch, todo, machine(host_bytes=1), nominal)
    assert first.report.of("one").status == "could not try" and "host memory" in first.report.of("one").said
    assert simulate(monkeypatch, todo, machine(), nominal, report=first.report).report.of("one").status == "pass"


def test_on_smaller_devices_few_cases_find_no_time(monkeypatch):
    """Lanes are not idle: on 24 to 80 GB the tier runs as much as one H200 does, but for one case in twenty."""
    number = sum(len(one.cases) for one in REQUIRED)
    for gigabytes in (84.0, 47.9, 42.0, 25.2):
        went = simulate(monkeypatch, jobs(), machine(device_bytes=int(gigabytes * 1e9)), measured())
        assert len(went.left()) < number / 20, (gigabytes, went.left())
