"""README and the other documents: short where they must be, with links that lead somewhere."""

import re

import pytest
from places import ROOT

from megatron_ext.cli import main as cli

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    ROOT / "patches" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"")
FILE_NAME = re.compile(r"`((?:megatron_ext|benchmarks|scripts|tests|docs|examples|patches)/[\w./-]+\.\w+)`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_files_exist(document):
    text = document.read_text()
    targets = [match[1] or match[2] for match in LINK.finditer(text)]
    missing = [to for to in targets if "://" not in to and not (document.parent / to).exists()]
    missing += [name for name in FILE_NAME.findall(text) if not (ROOT / name).exists()]
    assert missing == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_every_page_of_the_docs_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name not in navigation] == []


def test_the_schedule_of_the_docs_is_one(tmp_path):
    (tmp_path / "s.json").write_text(
        (ROOT / "docs/schedule_format.md").read_text().split("```")[1].removeprefix("json")
    )
    assert cli.main(["show", str(tmp_path / "s.json")]) == 0


def test_kinds_of_files_that_the_docs_print_schemas_of_exist(capsys):
    kinds = re.findall(r"megatron-ext schema (\w+)", "".join(path.read_text() for path in DOCUMENTS))
    assert kinds and {cli.main(["schema", kind]) for kind in kinds} == {0}
