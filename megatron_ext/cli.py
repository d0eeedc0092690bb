"""The ``megatron-ext`` command: one thin function a verb.

Exit codes: 0 success, 2 bad input (one line that names file, field and value), 1 an
internal failure. ``--json`` puts one JSON object on standard output and everything
meant for people on standard error.

click (https://click.palletsprojects.com) parses: nested verbs and typed options, with
usage errors as exceptions that are turned into one line here.
"""

import contextlib
import os
import sys

import click
import msgspec

from megatron_ext import __version__
from megatron_ext.errors import InputError


def emit(as_json: bool, payload: dict, text: str) -> None:
    """Print ``payload`` as one JSON object, or ``text`` for people.

    With ``--json`` the text goes to standard error, so a pipe reads only the object.
    """
    if as_json and text:
        click.echo(text, err=True)
    try:
        click.echo(msgspec.json.encode(payload).decode() if as_json else text)
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # or the interpreter tries once more when it ends
        raise InputError(f"cannot be written: {error.strerror}", file="standard output") from None


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="megatron-ext")
def cli() -> None:
    """Measure gather routes, plan a user_defined_schedule, patch and train Megatron by it."""


@cli.group()
def patch() -> None:
    """Hook a Megatron-LM checkout, an unpacked release, or the core-only tree from PyPI."""


checkout_argument = click.argument("checkout", default=".", envvar="MEGATRON_PATH")
dry_run_option = click.option("--dry-run", is_flag=True, help="Show the diff and change nothing.")


@patch.command("apply")
@checkout_argument
@dry_run_option
@json_option
def patch_apply(checkout: str, dry_run: bool, as_json: bool) -> None:
    """Insert the hook lines; a patched tree stays as it is."""
    from megatron_ext.checkout import apply, show

    report = apply(checkout, dry_run=dry_run)
    emit(as_json, show.as_dict(report), show.as_text(report, "apply"))


@patch.command("check")
@checkout_argument
@json_option
def patch_check(checkout: str, as_json: bool) -> int:
    """Say whether the tree is clean, applied, drifted or in conflict; the last two end with exit code 1."""
    from megatron_ext.checkout import check, show

    report = check(checkout)
    emit(as_json, show.as_dict(report), show.as_text(report, "check"))
    return 1 if report.state in ("drifted", "conflict") else 0


@patch.command("revert")
@checkout_argument
@dry_run_option
@json_option
def patch_revert(checkout: str, dry_run: bool, as_json: bool) -> None:
    """Take every hook line out; the owner's changes stay."""
    from megatron_ext.checkout import revert, show

    report = revert(checkout, dry_run=dry_run)
    emit(as_json, show.as_dict(report), show.as_text(report, "revert"))


@patch.command("list")
@click.argument("checkout", required=False)
@json_option
def patch_list(checkout: str | None, as_json: bool) -> None:
    """List the releases that are served and the lines that are inserted."""
    from megatron_ext.checkout import show

    payload = show.releases(checkout)
    emit(as_json, payload, show.releases_text(payload))


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True})
@click.option("--out", required=True, help="Where the workload is written.")
@click.option("--checkout", envvar="MEGATRON_PATH", help="A Megatron-LM checkout: its own pretrain_gpt.py reads the options and builds the model.")
@click.argument("megatron_options", nargs=-1, type=click.UNPROCESSED)
@json_option
def describe(out: str, checkout: str | None, megatron_options, as_json: bool) -> None:
    """Write the workload of a real model, from Megatron's own options.

    With a checkout, give all that your script gives pretrain_gpt.py, and --data-parallel-size.
    Without one, a subset of Megatron's options is known; those that change nothing are read over.
    """
    import warnings

    from megatron_ext.workload import model as workload
    from megatron_ext.workload import show as showing

    warnings.simplefilter("ignore", UserWarning)  # Megatron's, on what is not installed: nothing is trained here
    if checkout:
        from megatron_ext.megatron import own_script

        described = own_script.describe_command_line(checkout, megatron_options)
    else:
        from megatron_ext.megatron import cpu_compat

        try:
            with no_device():  # a model without data goes onto none
                cpu_compat.install()
                from megatron_ext.megatron import describe as description

                described = description.describe_options(description.parse(megatron_options))
        except ModuleNotFoundError as error:
            raise InputError(f"there is no package {error.name} here: give a checkout by --checkout, or run in an environment with megatron-core") from None
        taken = description.sizes_taken(megatron_options)
        if taken:
            click.echo(f"describe: not given, taken to be: {', '.join(f'{option} {size}' for option, size in taken.items())}", err=True)
    workload.save(out, described)
    emit(as_json, {"workload": out, **showing.summary(described)}, showing.text(described, out))


@contextlib.contextmanager
def no_device():
    """Hide CUDA devices from torch, and from what it starts."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def environment_options(command):
    """What ``plan`` and ``simulate`` take to hold a table against the run, and against this machine."""
    for option in (
        click.option("--allow-differences", is_flag=True, help="Use a table measured for other parallel sizes, another precision or shape; only say what differs."),
        click.option("--this-machine", is_flag=True, help="Compare the table's hardware and software with this machine's too: it is the one that trains."),
    ):
        command = option(command)
    return command


def table_differences(table, work, *, this_machine: bool, allow: bool, file) -> list[str]:
    """What differs between the table's environment and the run; said on standard error if allowed.

    Raises:
        InputError: something differs and is not allowed.
    """
    from megatron_ext.cost import environment

    found = environment.run_differences(table.metadata, work)
    if this_machine:
        from megatron_ext.runtime.machine import environment as this_environment

        found += environment.differences(table.metadata, this_environment())
    for line in environment.refuse(found, allow=allow, file=file, how="allow it by --allow-differences"):
        click.echo(f"{file}: measured in another environment: {line}", err=True)
    return found


@cli.command()
@click.option("--cost-table", required=True, help="Cost table of the machines.")
@click.option("--workload", "workload_path", required=True, help="What is trained.")
@click.option("--out", required=True, help="Where the schedule is written.")
@click.option("--policy", default="hybrid", show_default=True, help="hybrid, exact, random:SEED, or a baseline: all-gpu, all-cpu, window-1 or -2, share-25, -50 or -75, urgency, pipeswitch, hierarchical.")
@click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range.")
@environment_options
@json_option
def plan(cost_table: str, workload_path: str, out: str, policy: str, extrapolate: bool, allow_differences: bool, this_machine: bool, as_json: bool) -> None:
    """Decide by which route, when, and for how long; print what that is worth."""
    from megatron_ext import files, planner
    from megatron_ext.cost import model as cost
    from megatron_ext.schedule import model as schedule
    from megatron_ext.workload import model as workload

    table, work = cost.load(cost_table), workload.load(workload_path)
    with naming_files(cost_table, workload_path):
        differences = table_differences(table, work, this_machine=this_machine, allow=allow_differences, file=cost_table)
        digest = files.sha256(cost_table)
        planned = planner.plan(work, table, policy=policy, cost_table_sha256=digest, extrapolate=extrapolate)
        judged = planner.verdict(work, table, planned, extrapolate=extrapolate)
    schedule.save(out, planned)
    emit(as_json, {"schedule": out, "policy": policy, "verdict": judged.text, **judged.figures, "differences": differences}, judged.text)


@cli.command()
@click.option("--cost-table", required=True, help="Cost table of the machines.")
@click.option("--workload", "workload_path", required=True, help="What is trained.")
@click.option("--schedule", "schedule_path", help="Without one: stock Megatron's own rule.")
@click.option("--trace", help="Write a Chrome trace here.")
@click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range.")
@environment_options
@json_option
def simulate(cost_table: str, workload_path: str, schedule_path: str | None, trace: str | None, extrapolate: bool, allow_differences: bool, this_machine: bool, as_json: bool) -> None:
    """Say what one iteration takes by a schedule, or by stock Megatron's own rule."""
    from megatron_ext import simulator
    from megatron_ext.cost import model as cost
    from megatron_ext.schedule import match, validate
    from megatron_ext.schedule import trace as traces
    from megatron_ext.workload import model as workload

    table, work = cost.load(cost_table), workload.load(workload_path)
    given = validate.load(schedule_path) if schedule_path else None
    if given is not None:
        match.match(given, work, file=schedule_path)
    with naming_files(cost_table, workload_path):
        table_differences(table, work, this_machine=this_machine, allow=allow_differences, file=cost_table)
        result = simulator.simulate(work, table, given, trace=bool(trace), extrapolate=extrapolate)
    if trace:
        about = {"kind": "simulated", "schedule": schedule_path or "stock", "step_time_us": result.step_time_us}
        traces.save(trace, result.events, about=about)
    emit(as_json, result.as_json(), result.as_text())


@cli.command()
@click.argument("schedule_path", metavar="SCHEDULE")
@click.option("--all", "every_row", is_flag=True, help="Every row, however many.")
@json_option
def show(schedule_path: str, every_row: bool, as_json: bool) -> None:
    """Print the steps with what is unsharded where; an arrow marks where an invalid schedule fails."""
    from megatron_ext.schedule import model, validate
    from megatron_ext.schedule import show as showing

    schedule = model.decode(schedule_path)
    failure = None
    try:
        validate.validate(schedule, file=schedule_path)
    except validate.InvalidSchedule as error:
        failure = error
    text = showing.grid(schedule, failure, every_row=every_row)
    payload = {
        "valid": failure is None, "error": None if failure is None else str(failure),
        "pp_rank": getattr(failure, "pp_rank", None), "step_index": getattr(failure, "step_index", None), "grid": text,
    }  # fmt: skip
    emit(as_json, payload, f"{showing.summary(schedule)}\n{text}")
    if failure is not None:
        raise failure


@contextlib.contextmanager
def naming_files(cost_table: str, workload_path: str):
    """Say which of the files given an error is about, where the error itself could not know."""
    try:
        yield
    except InputError as error:
        if error.file is not None:
            raise
        from megatron_ext.cost.model import CostTable

        root = (error.field or "").partition(".")[0].partition("[")[0]
        if root in CostTable.__struct_fields__:
            raise InputError(str(error), file=cost_table) from None
        raise InputError(str(error), file=None if root == "policy" else workload_path) from None


READ_BY = {"nccl-tests": ("placement", "collective", "algorithm"), "curves": ("placement", "system"), "nvbandwidth": ()}
"""Options of ``measure`` that a format of ``--import`` reads; measuring itself reads none of them."""


def refuse_unread(imported: str | None) -> None:
    """An option that would be passed over is a mistake; InputError names it."""
    context, read = click.get_current_context(), {"out", "imported", "as_json", *READ_BY.get(imported, ())}
    of_imports = {name for names in READ_BY.values() for name in names}
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        if given and (parameter.name not in read if imported in READ_BY else parameter.name in of_imports and imported is None):
            how = f"is not read with --import {imported}" if imported else "is read with --import alone"
            raise InputError(how, field=parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.name.upper())


@cli.command()
@click.option("--out", required=True, help="Where the cost table is written.")
@click.option("--import", "imported", nargs=2, metavar="FORMAT LOG", help="Read another tool's log instead: nccl-tests, nvbandwidth, curves.")
@click.option("--system", help="With --import curves: which of the file's systems.")
@click.option("--placement", type=click.Choice(["in_place", "out_of_place"]), default="in_place", show_default=True, help="With --import: which column; gathers work in place.")
@click.option("--collective", help="With --import nccl-tests: what was measured, where the log does not say.")
@click.option("--algorithm", help="With --import nccl-tests: name of the curve, to combine several.")
@click.option("--data-parallel-size", "--dp", type=int, default=2, show_default=True)
@click.option("--pipeline-model-parallel-size", "--pp", type=int, default=1, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--min-bytes", type=int, default=4096, show_default=True, help="Smallest whole group.")
@click.option("--max-bytes", type=int, default=256 << 20, show_default=True, help="Largest whole group.")
@click.option("--sizes", help="Comma-separated sizes in bytes, in place of the grid.")
@click.option("--also-sizes", help="Comma-separated sizes in bytes at which gathers are measured beside the grid: a schedule's groups.")
@click.option("--max-rank-bytes", type=int, help="Whole parameters of one rank, for the optimizer step.")
@click.option("--seconds", type=float, default=90.0, show_default=True, help="Time for measuring; starting the ranks comes on top.")
@click.option("--threads", type=int, default=1, show_default=True, help="Processor threads of one rank.")
@click.option("--hidden-size", type=int, default=512, show_default=True, help="Shape of the products that stand for compute.")
@click.option("--seq-length", type=int, default=128, show_default=True)
@click.option("--micro-batch-size", type=int, default=1, show_default=True)
@click.option("--links", help="Comma-separated subset of what is measured.")
@click.option("--modules", help="package.module:function that gives the layers to measure, for example megatron_ext.megatron.layer_runners:layer_runners; its arguments follow behind --.")
@click.option("--evict-bytes", type=int, default=0, show_default=True, help="Bytes touched between two visits of a layer, as other layers would; for modules that hold only one.")
@click.option("--nvme-path", type=click.Path(), help="Directory on the drive; without it the nvme route is not offered.")
@click.argument("module_args", nargs=-1)
@json_option
def measure(out: str, imported, system, placement, collective, algorithm, links, sizes, also_sizes, as_json: bool, **options) -> None:
    """Measure links, contention and compute, and write a cost table.

    MODULE_ARGS (after --) are handed to the function that --modules names.
    """
    from megatron_ext import files
    from megatron_ext.cost import model as cost

    refuse_unread(imported[0] if imported else None)
    if imported:
        from megatron_ext.cost import imports

        table = imports.read(*imported, system=system, placement=placement, collective=collective, algorithm=algorithm)
    else:
        from megatron_ext.measure import measure as run
        from megatron_ext.measure.options import LINKS, Options
        from megatron_ext.measure.progress import bar

        if sizes:
            options["sizes"] = Options.parse_sizes(sizes)
        if also_sizes:
            options["also_sizes"] = Options.parse_sizes(also_sizes, "--also-sizes")
        chosen = tuple(links.split(",")) if links else LINKS
        if os.environ.get("RANK", "0") == "0":
            files.check_writable(out)
        with bar(os.environ.get("RANK", "0") == "0") as progress:
            table = run(Options(links=chosen, **options), progress)
        if table is None:  # under a launcher, and not rank 0
            return
    cost.save(out, table)
    emit(as_json, {"cost_table": out, "notes": list(table.metadata.notes)}, "\n".join([f"wrote {out}", *table.metadata.notes]))


@cli.group("cost")
def cost_group() -> None:
    """Read, check, combine and compare cost tables."""


@cost_group.command("predict")
@click.argument("table_path", metavar="TABLE")
@click.option("--route", required=True, help="gpu, cpu or nvme; or another curve: publish.cpu, p2p, reduce, optimizer.")
@click.option("--bytes", "size_bytes", type=int, required=True, help="Bytes of the whole group.")
@click.option("--busy", multiple=True, help="A link that works at the same time (repeatable).")
@click.option("--groups", type=int, default=1, show_default=True, help="So many groups of that size in one coalesced call.")
@click.option("--extrapolate", is_flag=True, help="Allow sizes outside the measured range.")
@json_option
def cost_predict(table_path: str, route: str, size_bytes: int, busy, groups: int, extrapolate: bool, as_json: bool) -> None:
    """Predict one gather: {us, low_us, high_us}."""
    from megatron_ext.cost import model, show

    figures = show.predicted(model.load(table_path), route, size_bytes, busy=busy, groups=groups, extrapolate=extrapolate, file=table_path)
    emit(as_json, figures, show.prediction_text(figures))


@cost_group.command("show")
@click.argument("table_path", metavar="TABLE")
@click.option("--plot", "plot_path", type=click.Path(), help="Write a plot of every curve and its residuals (PNG).")
@json_option
def cost_show(table_path: str, plot_path, as_json: bool) -> None:
    """Check a table: every curve, how rough it is, what it holds for."""
    from megatron_ext.cost import model, show

    table = model.load(table_path)
    if plot_path:
        from megatron_ext.cost import plot

        plot.save(table, plot_path)
    emit(as_json, show.summary(table), show.text(table))


@cost_group.command("check")
@click.argument("table_path", metavar="TABLE")
@click.option("--workload", "workload_path", help="A run whose parallel sizes the table should hold for.")
@click.option("--this-machine", is_flag=True, help="Compare hardware and software with this machine's.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--allow-differences", is_flag=True, help="Only report what differs.")
@json_option
def cost_check(table_path: str, workload_path, this_machine: bool, device: str, allow_differences: bool, as_json: bool) -> None:
    """Refuse a table that was measured on other hardware, software, world sizes or of another model."""
    from megatron_ext.cost import environment, model
    from megatron_ext.workload import model as workload

    table, here, model_differs = model.load(table_path), {}, []
    if workload_path:
        work = workload.load(workload_path)
        here["world_sizes"] = environment.world_sizes(work.parallel)
        model_differs = environment.model_differences(table.metadata, work)
    if this_machine:
        from megatron_ext.runtime.machine import environment as this_environment

        here |= this_environment(device)
    if not here:
        raise InputError("nothing to compare with: give --workload or --this-machine", file=table_path)
    found = environment.differences(table.metadata, here) + model_differs
    environment.refuse(found, allow=allow_differences, file=table_path, how="allow it by --allow-differences")
    emit(as_json, {"differences": found}, "\n".join(found) or "the table holds for this environment")


@cost_group.command("combine")
@click.argument("tables", metavar="[PART=]TABLE...", nargs=-1, required=True)
@click.option("--out", required=True)
@json_option
def cost_combine(tables, out: str, as_json: bool) -> None:
    """One table out of several; the first that has a part gives it, unless PART= says which.

    PART is links, compute or a field: links=cluster.json compute=one_gpu.json
    """
    from megatron_ext.cost import combine, model

    named = [entry.rpartition("=")[::2] for entry in tables]
    table = combine.combine({path: model.load(path) for _, path in named}, {part: path for part, path in named if part})
    model.save(out, table)
    taken = table.metadata.source["parts"]
    emit(as_json, {"cost_table": out, "parts": taken}, "\n".join(f"{part}: {path}" for part, path in taken.items()))


@cost_group.command("compare")
@click.argument("first_path", metavar="TABLE")
@click.argument("second_path", metavar="OTHER")
@json_option
def cost_compare(first_path: str, second_path: str, as_json: bool) -> None:
    """Say what changed from one table to another, and by how much."""
    from megatron_ext.cost import compare, model

    changes = compare.compare(model.load(first_path), model.load(second_path))
    emit(as_json, changes, compare.text(changes))


@cli.command()
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range.")
@json_option
def report(run_dir: str, extrapolate: bool, as_json: bool) -> None:
    """Compare a scheduled run with stock Megatron and with its prediction; draw a timeline."""
    from megatron_ext import report as reports

    run = reports.load(run_dir)
    with naming_files(str(run.file("cost_table")), str(run.file("workload"))):
        built = reports.build(run, extrapolate=extrapolate)
    reports.write(built)
    emit(as_json, reports.show.as_json(built), reports.show.as_text(built))


@cli.command()
@click.argument("kind", type=click.Choice(["cost_table", "workload", "user_defined_schedule"]))
def schema(kind: str) -> None:
    """Print the JSON schema of a file kind, for whoever writes one by hand or by program."""
    from megatron_ext.cost.model import CostTable
    from megatron_ext.schedule.model import Schedule
    from megatron_ext.workload.model import Workload

    struct = {"cost_table": CostTable, "workload": Workload, "user_defined_schedule": Schedule}[kind]
    emit(False, {}, msgspec.json.format(msgspec.json.encode(msgspec.json.schema(struct))).decode())


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        result = cli.main(args=argv, prog_name="megatron-ext", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return 2
    except click.ClickException as error:
        click.echo(f"megatron-ext: {error.format_message()}", err=True)
        return 2
    except InputError as error:
        text = str(error)
        click.echo(text if text.startswith("megatron-ext ") else f"megatron-ext: {text}", err=True)
        return 2
    except click.exceptions.Abort:
        click.echo("megatron-ext: interrupted", err=True)
        return 130


if __name__ == "__main__":
    sys.exit(main())
