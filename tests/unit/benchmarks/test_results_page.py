"""What benchmarks/results holds: every result says where and when it was measured, has its picture, and is one that the
texts name."""

import re
import shutil
from pathlib import Path

import pytest

from megatron_ext.formats import json_files

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
import machine
import pictures
import results_page

NOT_RESULTS = {"workload.json", "cost_table.json", "schedule.json", "published_links.json"}
"""Files that texts name and that are no results of benchmarks."""


def everything_named(value) -> dict:
    """All names at any depth of a JSON, with their last value."""
    found = {}
    for name, inner in (
        value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ())
    ):
        found |= {name: inner} | everything_named(inner)
    return found


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_machine_versions_and_date_and_has_a_picture(result):
    named = everything_named(json_files.load(result, dict))
    date, torch = named.get("date") or named["created_at"], named.get("versions", named)["torch"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT[\d:]+\+00:00", date)
    assert torch and named["processors"] and named["kernel"]
    assert result.with_suffix(".png").stat().st_size > 5_000


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_a_picture_is_drawn_from_its_result(result, tmp_path):
    copy = Path(shutil.copy(result, tmp_path))
    drawn = pictures.draw(str(copy))  # as options of benchmarks give it
    assert drawn == copy.with_suffix(".png") and drawn.read_bytes()[:4] == b"\x89PNG"


def test_a_result_of_a_name_of_its_own_is_kept_without_a_picture(tmp_path):
    """``--out`` may name any file."""
    own = tmp_path / "own.json"
    machine.write(own, {"cases": 1}, load_before=0.0)
    assert json_files.load(own, dict)["cases"] == 1 and not own.with_suffix(".png").exists()


def test_the_page_of_results_is_written_from_the_kept_results():
    """Every result has its row, and every figure is that of its file."""
    text = results_page.PAGE.read_text()
    assert results_page.page(text) == text, "run: python benchmarks/results_page.py"


def test_every_result_named_in_a_text_is_kept():
    kept = {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}
    for text in ("README.md", "benchmarks/README.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))):
        named = set(re.findall(r"`(?:benchmarks/)?results/([\w.]+)`", (ROOT / text).read_text()))
        if text in ("README.md", "benchmarks/README.md", "docs/results.md"):
            named |= {
                name for name in re.findall(r"`(\w+\.json)`", (ROOT / text).read_text()) if name not in NOT_RESULTS
            }
            assert len(named) >= 5
        assert named <= kept, text


def test_every_kept_result_says_how_to_make_it():
    text = (ROOT / "benchmarks/README.md").read_text()
    assert [path.name for path in RESULTS if f"`{path.name}`" not in text] == []


def numbers_of(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


def test_figures_of_the_readme_are_those_of_the_results():
    """A row of the README that names a result holds only numbers that the result's row of docs/results.md holds."""
    rows = {line.rsplit("`", 2)[1]: line for line in results_page.table().splitlines()[2:]}
    checked = 0
    for line in (ROOT / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (name := cells[2].strip("`")) in rows:
            missing = set(numbers_of(cells[1])) - set(numbers_of(rows[name]))
            assert not missing, f"{name}: {missing} in the README, not in the result"
            checked += 1
    assert checked >= 5


def test_expectations_of_the_readme_are_those_of_the_simulated_clusters():
    text = (ROOT / "README.md").read_text()
    expected = re.findall(r"^\| [^|]+ \| ([^|]+) \| simulated \|$", text, re.MULTILINE)
    simulated = results_page.ROWS["simulated_clusters"].figure(
        json_files.load(results_page.RESULTS / "simulated_clusters.json", dict)
    )
    assert len(expected) == 6
    percentages = {int(found) for found in re.findall(r"(\d+)%", simulated)}
    assert {int(found) for line in expected for found in re.findall(r"\d+", line)} <= percentages
