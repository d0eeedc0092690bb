"""Python imports this as it starts, where its directory is on the path: the product gets the faults that the
environment asks for (``faults.py``), as soon as it has imported what they are put into."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

LAST = "megatron_ext.megatron.lifecycle"
"""Whoever trains imports it, and it all others."""


class Finder:
    """Finds :data:`LAST` alone."""

    @staticmethod
    def find_spec(name, path, target=None):
        if name != LAST:
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def then_inject(module):
            execute(module)
            sys.path.append(str(Path(__file__).parents[1]))
            import faults

            faults.kept = faults.from_environment()
            faults.kept.__enter__()

        spec.loader.exec_module = then_inject
        return spec


sys.meta_path.insert(0, Finder)
