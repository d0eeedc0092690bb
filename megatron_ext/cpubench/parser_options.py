"""Options of Megatron that training without a GPU needs and that change no parameter. They are added for the parser.

``--transformer-impl local`` is not added: it changes the names of parameters, so the user has to give it.
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
"""Without these options Megatron refuses to start if its kernels are absent."""


def add_to_parsers(extra: list[str], check: Callable[[argparse.Namespace], None] | None = None) -> None:
    """Let every argparse parser read, after the user's options, those of ``extra`` that it knows, and ``check`` the
    result."""
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
    """Let Megatron's parser read the options that a run on the CPU needs."""
    add_to_parsers([*KERNELS, "--distributed-backend=gloo"])
