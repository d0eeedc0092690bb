"""The commands of docs/adopting.md on a smaller model."""

from pathlib import Path

import pytest
from adopting_page import SMALLER, run_page


@pytest.fixture(scope="session")
def core(request, tmp_path_factory) -> Path:
    """Where releases from the package index are kept."""
    cache = getattr(request.config, "cache", None)
    return tmp_path_factory.mktemp("core") if cache is None else cache.mkdir("megatron-core")


@pytest.fixture(scope="session")
def ran(core, tmp_path_factory) -> tuple[Path, list[str]]:
    """Directory and output of the page's commands."""
    work = tmp_path_factory.mktemp("adopting")
    return work, run_page(work, core, SMALLER)
