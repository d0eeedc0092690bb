"""Python imports this as it starts, where its directory is on the path: the product gets the faults (``faults.py``) and
the slow links (``scripts/slow_links.py``) that the environment asks for, as its modules are imported."""

import os
import sys
from importlib import util
from importlib.machinery import PathFinder
from pathlib import Path

HELPERS = Path(__file__).parents[1]
FAULTS, SLOW_LINKS = HELPERS / "faults.py", HELPERS.parents[1] / "scripts" / "slow_links.py"


def load(path: Path):
    """The module in a file that is on nobody's path."""
    spec = util.spec_from_file_location(f"at_start_{path.stem}", path)
    module = sys.modules[spec.name] = util.module_from_spec(spec)
    sys.path.append(str(path.parent))  # for what it imports from beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def inject(module) -> None:
    faults = load(FAULTS)
    faults.kept = faults.from_environment()  # as long as the process lives
    faults.kept.__enter__()


class Finder:
    """Finds the modules that are wrapped, and wraps them when they have been executed."""

    wrapped = {}

    @classmethod
    def find_spec(cls, name, path, target=None):
        if name not in cls.wrapped:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def then_wrap(module):
            execute(module)
            cls.wrapped[name](module)

        spec.loader.exec_module = then_wrap
        return spec


if os.environ.get("MEGATRON_EXT_SLOW_LINKS"):
    Finder.wrapped |= load(SLOW_LINKS).WRAPPED
if os.environ.get("MEGATRON_EXT_FAULTS"):
    Finder.wrapped["megatron_ext.megatron.lifecycle"] = inject  # whoever trains imports it, and it all others
sys.meta_path.insert(0, Finder)
