"""The end of every answer: the fastest that fits, what it holds, what to change, the verdict."""

from types import SimpleNamespace

from megatron_ext.planner.last_lines import ComparedRun, last_lines, short_of, training_by

GIB = 1 << 30


def test_the_fastest_that_fits_is_first_and_its_host_memory_is_said():
    stock = ComparedRun("stock", 900.0, 3 * GIB, short_of(94 * GIB, 71 * GIB))
    runs = [ComparedRun("this schedule", 33.3e6, 2 * GIB), ComparedRun("as given", 59.6e6), stock]
    assert last_lines("helps", runs, add="--a 1", take_out="--b") == [
        "fastest: 33300.0 ms, this schedule; 59600.0 ms, as given; "
        "0.900 ms, stock (does not fit: 94.00 GiB on a device, of 71.00)",
        "host memory: 2.00 GiB per node",
        "add: --a 1",
        "take out: --b",
        "verdict: helps",
    ]
    assert last_lines("none", runs[:1], add="")[2:] == ["add: nothing", "verdict: none"]
    assert last_lines("none", runs[1:2], add="")[1] == "host memory: not known"  # nobody has counted it


def test_what_fits_is_not_refused():
    assert short_of(5, 5) == short_of(5, None) == "" and short_of(6, 5)


def test_what_is_to_be_added_can_be_given_to_a_shell():
    said = training_by("my runs/s.json", SimpleNamespace(uses_drive=True), "/mnt/a drive")
    assert said == "--user-defined-schedule 'my runs/s.json' --user-defined-schedule-nvme-path '/mnt/a drive'"
