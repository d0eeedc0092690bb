"""The commands of docs/adopting.md on a smaller model, run once for all tests here."""

from pathlib import Path

import pytest
from adopting_page import SMALLER, run_page


@pytest.fixture(scope="session")
def ran(request, tmp_path_factory) -> tuple[Path, list[str]]:
    """Directory and output of the page's commands."""
    cache = getattr(request.config, "cache", None)
    work = tmp_path_factory.mktemp("adopting")
    core = tmp_path_factory.mktemp("core") if cache is None else cache.mkdir("megatron-core")
    return work, run_page(work, core, SMALLER)
