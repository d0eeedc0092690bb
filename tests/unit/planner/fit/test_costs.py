"""Cost tables in place of a data sheet, and tables that correct it: for which settings they hold."""

import pytest
from msgspec.structs import replace
from test_search_settings import SMALL, request

from megatron_ext.cost import cost_table
from megatron_ext.cost.scaled_table import Factors, scaled
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.fit.fit_text import as_text
from megatron_ext.planner.fit.fit_verdict import verdict_of_fit
from megatron_ext.planner.fit.found import judge
from megatron_ext.planner.fit.request import fit_problem_of
from megatron_ext.workload.workload import Limits


def test_a_cost_table_alone_holds_for_the_settings_that_it_was_measured_with(tmp_path):
    sheet = fit_problem_of(request(SMALL, hardware="h200-one-gpu"))
    given = sheet.space.given
    table = sheet.costs.of(given, given.workload(Limits()))
    cost_table.save(tmp_path / "t.json", table)
    words = [*SMALL, "--data-parallel-size", "1"]
    alone = request(words, hardware=None, cost_tables=(str(tmp_path / "t.json"),))
    with pytest.raises(
        InputError, match="--limit-device-bytes: is needed: a cost table does not have the memory of a device"
    ):
        fit_problem_of(alone)
    words += ["--limit-device-bytes", "2000000000"]
    problem = fit_problem_of(
        request(words, hardware=None, cost_tables=(str(tmp_path / "t.json"),), fixed=("zero-stage",))
    )
    found = problem.search()
    assert {one.setting.batch for one in found.tried} == {given.batch} and found.settings == 2
    both = fit_problem_of(request(SMALL, hardware="h200-one-gpu", cost_tables=(str(tmp_path / "t.json"),)))
    (factors,) = both.costs.factors.values()
    assert factors.forward == pytest.approx(1) and factors.curves["optimizer"] == pytest.approx(1)


def test_tables_of_two_micro_batch_sizes_say_what_a_layer_takes_for_any(tmp_path):
    """Layers that take a fixed time beside the sheet's: known at 1 and 4 samples, also at 2; at 8 as at 4."""
    words = [*SMALL, "--data-parallel-size", "1", "--limit-device-bytes", "2000000000"]
    sheet = fit_problem_of(request(words, hardware="h200-one-gpu"))
    given, paths = sheet.space.given, [str(tmp_path / f"{size}.json") for size in (1, 4)]
    sized = {size: given._replace(batch=given.batch._replace(micro_batch_size=size)) for size in (1, 2, 4, 8)}
    work = given.workload(Limits())
    estimated = {size: sheet.costs.of(setting, work) for size, setting in sized.items()}
    for path, size in zip(paths, (1, 4)):
        model = replace(estimated[size].metadata, model={"micro_batch_size": size})
        made = scaled(estimated[size], Factors({}, 1 + 0.6 / size, 1 + 0.2 / size))
        cost_table.save(path, replace(made, metadata=model))
    corrected = fit_problem_of(request(words, hardware="h200-one-gpu", cost_tables=tuple(paths))).costs
    for size, seen in ((1, 1), (2, 2), (4, 4), (8, 4)):
        row, known = corrected.of(sized[size], work).compute[0], estimated[size].compute[0]
        assert row.forward_us == pytest.approx(known.forward_us * (1 + 0.6 / seen)), size
        assert row.backward_us == pytest.approx(known.backward_us * (1 + 0.2 / seen)), size
    asked = request(words, hardware=None, cost_tables=tuple(paths), fixed=("zero-stage",))
    alone = fit_problem_of(asked)
    found = judge(asked, alone, alone.search())
    assert {one.setting.batch.micro_batch_size for one in found.fit.tried} == {1, 4} and found.fit.settings == 4
    assert "as given it is refused: no cost table was measured with its micro-batch size" in as_text(
        found, verdict_of_fit(found)
    )
    path = paths[[1, 4].index(found.fit.winner.setting.batch.micro_batch_size)]
    assert found.commands()[-1].startswith(f"megatron-ext plan --cost-table {path} ")
    with pytest.raises(InputError, match="--cost-table = 4: two tables have this micro-batch size"):
        fit_problem_of(request(words, hardware="h200-one-gpu", cost_tables=(paths[1], paths[1])))


@pytest.mark.parametrize("fixed", ["all", "micro-batch-size"])
def test_a_table_of_another_micro_batch_size_only_is_refused(tmp_path, fixed):
    sheet = fit_problem_of(request([*SMALL, "--micro-batch-size", "4"], hardware="h200-one-gpu"))
    given, path = sheet.space.given, str(tmp_path / "t.json")
    cost_table.save(path, sheet.costs.of(given, given.workload(Limits())))
    words = [*SMALL, "--data-parallel-size", "1", "--limit-device-bytes", "2000000000"]
    problem = fit_problem_of(request(words, hardware=None, cost_tables=(path,), fixed=(fixed,)))
    with pytest.raises(InputError, match="--cost-table: none was measured with a setting that may be chosen"):
        problem.search()


def test_estimates_are_not_called_measured(tmp_path):
    words = [*SMALL, "--data-parallel-size", "1", "--limit-device-bytes", "2000000000"]
    sheet = fit_problem_of(request(words, hardware="h200-one-gpu"))
    given, path = sheet.space.given, str(tmp_path / "t.json")
    cost_table.save(path, sheet.costs.of(given, given.workload(Limits())))
    asked = request(words, hardware=None, cost_tables=(path,), fixed=("all",))
    problem = fit_problem_of(asked)
    found = judge(asked, problem, problem.search())
    assert "ESTIMATED from a data sheet, not measured" in as_text(found, verdict_of_fit(found))
