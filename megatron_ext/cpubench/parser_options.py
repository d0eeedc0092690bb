"""Options of Megatron that training without a GPU needs and that change no parameter: the parser is given them.

``--transformer-impl local`` is not among them: it names the parameters, and the user says so.
"""

import argparse
import sys
from collections.abc import Callable

KERNELS: list[str] = list(
    """
    --no-rope-fusion --no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion
""".split()
)
"""Megatron refuses to start without them where its kernels are absent."""


def add_to_parsers(extra: list[str], check: Callable[[argparse.Namespace], None] | None = None) -> None:
    """Let every argparse parser read those of ``extra`` that it knows behind the user's, and ``check`` the result."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        given = sys.argv[1:] if args is None else list(args)
        known = self._option_string_actions
        parsed = parse_args(self, [*given, *(word for word in extra if word.partition("=")[0] in known)], namespace)
        if check is not None:
            check(parsed)
        return parsed

    argparse.ArgumentParser.parse_args = parse


def without_a_gpu() -> None:
    """Let Megatron's parser take what a run on the CPU needs."""
    add_to_parsers([*KERNELS, "--distributed-backend=gloo"])
