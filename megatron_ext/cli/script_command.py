"""A verb that takes the arguments of a training script after ``--``."""

import click

from megatron_ext.formats.errors import InputError

PLAN_OPTIONS = (
    "--data-parallel-size",
    "--dp",
    "--zero-stage",
    "--gpus-per-node",
    "--limit-device-bytes",
    "--limit-whole-parameter-bytes",
    "--limit-host-bytes",
    "--limit-pinned-host-bytes",
    "--limit-nvme-slots",
)
"""Options for what a script's arguments do not say. They may stand before or after ``--``."""


entry_option = click.option(
    "--entry",
    metavar="SCRIPT",
    help="The training script, if it is not the checkout's pretrain_gpt.py. Its own model provider is called.",
)


class ScriptCommand(click.Command):
    """A command whose argument with any number of words gets the script's arguments, preceded by the
    :data:`PLAN_OPTIONS` that stand before ``--``.

    Raises:
        InputError: an option before ``--`` is not one of the verb's, or contradicts an option after ``--``.
    """

    ignore_unknown_options = True

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, then check the options on both sides of ``--``."""
        dashes = "--" in args
        cut = args.index("--") if dashes else len(args)
        in_front, behind = args[:cut], args[cut + 1 :]
        rest = super().parse_args(ctx, args)
        (name,) = (p.name for p in self.params if isinstance(p, click.Argument) and p.nargs == -1)
        assert name is not None  # click names every parameter
        given = ctx.params[name]
        self._refuse_contradiction(in_front, behind)
        if dashes or self.dashes_are_needed:
            self._refuse_unknown(given[: len(given) - len(behind)])
        return rest

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Name the options that are read with the script's arguments."""
        with formatter.section("Options of the plan, before or after -- (docs/planning.md)"):
            formatter.write("".join(f"  {option}\n" for option in PLAN_OPTIONS))

    dashes_are_needed = True
    """Whether the script's arguments have to stand after ``--``."""

    def _refuse_contradiction(self, in_front: list[str], behind: list[str]) -> None:
        names = {"--dp": "--data-parallel-size"} | {opt: p.opts[0] for p in self.params for opt in p.opts}
        said = {names.get(option, option): value for option, value in values(behind).items()}
        for option, value in values(in_front).items():
            option = names.get(option, option)
            if said.get(option, value) != value:
                why = f"the script's arguments say {option} {said[option]}; give it once"
                raise InputError(why, field=option, value=value)

    def _refuse_unknown(self, words: tuple[str, ...]) -> None:
        for option in values(words):
            if option not in PLAN_OPTIONS:
                raise InputError(f"is not an option of {self.name}; put the script's arguments after --", field=option)


class BareScriptCommand(ScriptCommand):
    """The script's arguments may also stand among the verb's own options, without ``--``."""

    dashes_are_needed = False


def values(words) -> dict[str, str]:
    """The last value in ``words`` of each option; "" for an option without a value."""
    found: dict[str, str] = {}
    option = None
    for word in words:
        if word.startswith("--"):
            option, _, value = word.partition("=")
            found[option] = value
        elif option is not None:
            found[option] = f"{found[option]} {word}".strip()
    return found
