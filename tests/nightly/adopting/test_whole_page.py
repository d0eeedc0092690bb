"""The commands of docs/adopting.md that need no GPU, as they stand there."""

from adopting_page import SHORTER, check_outputs, run_page


def test_the_commands_of_the_page_end_with_an_equal_run(tmp_path):
    check_outputs(tmp_path, run_page(tmp_path, tmp_path / "core", SHORTER))
