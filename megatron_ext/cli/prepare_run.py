"""``megatron-ext prepare``: make workload, cost table and schedule of a training script with one command.

Each of its steps keeps the file that is already there if it still matches.
"""

import os
import shlex
from pathlib import Path

import click
import msgspec

from megatron_ext.cli.checkout_model import for_workload, refuse_early, refuse_script, use_megatron_of, with_sizes
from megatron_ext.cli.fit import answer, fit_options, fixed_names, with_defaults
from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.script_command import BareScriptCommand, entry_option
from megatron_ext.cli.table_check import naming_files
from megatron_ext.cost import cost_table, environment
from megatron_ext.formats import directory_lock, json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.measure import cluster_launch
from megatron_ext.measure.options import Options
from megatron_ext.megatron import script_arguments
from megatron_ext.schedule import match, schedules, user_defined_schedule
from megatron_ext.workload import workload
from megatron_ext.workload.launcher_ranks import ranks_on_this_node


class Preparation:
    """Workload, cost table and schedule in one directory.

    Args:
        checkout: the Megatron tree.
        out: the directory.
        arguments: those of the training script, and options of the plan among them.
        entry: the training script, if it is not the tree's pretrain_gpt.py.
        policy, seconds, nvme_path: as for ``plan`` and ``measure``.

    Raises:
        InputError: the text of the arguments already shows that something is wrong.
    """

    def __init__(
        self, checkout: str, out: Path, arguments, *, entry: str | None, policy: str, seconds: float, nvme_path
    ):
        from megatron_ext.planner.policies import check_policy

        self.checkout, self.out, self.entry, self.policy, self.kept = checkout, out, entry, policy, []
        self.workload_path, self.table_path, self.schedule_path = (
            out / f"{name}.json" for name in ("workload", "cost_table", "schedule")
        )
        self.schedules_path = out / "schedules"
        check_policy(policy)
        self.script = script_arguments.read(arguments, verb="prepare")
        self.script.data_parallel_size()
        self.options = Options(seconds=seconds, nvme_path=nvme_path)
        refuse_early(self.script, self.options)
        self.arguments = [*self._places(), *arguments]
        self.is_first = os.environ.get("RANK", "0") == "0"

    def check_node(self) -> None:
        """Refuse what this node lacks, which other nodes may have."""
        from megatron_ext.checkout import check
        from megatron_ext.runtime.drive import refuse_no_drive

        use_megatron_of(self.checkout, self.entry)
        if self.options.nvme_path is not None:  # the run would refuse it too
            refuse_no_drive(self.options.nvme_path, "--nvme-path")
        refuse_script(self.script, "prepare")
        self.patched = self.is_first and check(self.checkout).state == "applied"  # one process at a time may look
        if self.is_first:
            json_files.make_directory(self.out)
            directory_lock.hold(self.out, field="--out")
            json_files.check_writable(self.workload_path)
            for path in (self.workload_path, self.table_path, self.schedule_path):
                json_files.remove_half_written(path)

    def _places(self) -> list[str]:
        """The option that says how many ranks a node has, if a launcher says so and the arguments do not."""
        local = ranks_on_this_node()
        return [f"--gpus-per-node={local}"] if local and self.script.ours.gpus_per_node is None else []

    def _say(self, text: str) -> None:
        if self.is_first:
            click.echo(f"prepare: {text}", err=True)

    def describe(self) -> None:
        """Describe the model. The file is written if the one that is there differs."""
        from megatron_ext.megatron.describe_from_checkout import describe_command_line

        self._say("describing the model")
        self.model = describe_command_line(self.checkout, self.arguments, self.entry)
        if self.model.workload.ramp:
            self.schedule_path = self.schedules_path
        if self._same_workload():
            self._keep(self.workload_path)
        elif self.is_first:
            # The schedules, and the request of fit, belong to another workload.
            others = (self.workload_path.with_name(name) for name in ("schedule.json", "fit.json"))
            for file in (*others, *self.schedules_path.glob("*.json")):
                file.unlink(missing_ok=True)
            workload.save(self.workload_path, self.model.workload)

    def _same_workload(self) -> bool:
        try:
            return self.workload_path.exists() and workload.load(self.workload_path) == self.model.workload
        except InputError:
            return False

    def measure(self) -> bool:
        """Measure unless the existing table holds for this model and machine. Returns whether this process goes on.

        Under a launcher rank 0 decides for all ranks: other nodes may see other files, and a rank that measured alone
        would wait for ever.
        """
        options = for_workload(with_sizes(self.options, self.script), self.model)
        reason = cluster_launch.said_by_first(self.table_differs(options))
        if reason is None:
            self._keep(self.table_path)
            return self.is_first
        self._say(f"measuring for {options.seconds:g} s on {options.world_size} ranks{reason}")
        from megatron_ext.measure import kept_measurement, measure

        options = msgspec.structs.replace(options, keep_path=kept_measurement.path_of(str(self.table_path)))
        table = measure(options)
        if table is None:
            return False
        cost_table.save(self.table_path, table)
        kept_measurement.remove(str(self.table_path))
        return True

    def table_differs(self, options: Options) -> str | None:
        """Why the table cannot be kept (empty if there is no table); None if it can."""
        from megatron_ext.runtime.machine import environment as this_environment

        if not self.table_path.exists():
            return ""
        try:
            table = cost_table.load(self.table_path)
        except InputError as error:
            return f"; {error}"
        found = environment.run_differences(table.metadata, self.model.workload)
        found += environment.environment_differences(table.metadata, this_environment())
        points = table.routes.gpu.points if table.routes.gpu else ()
        if not points or points[-1].size_bytes < options.rounded(options.max_bytes):
            found.append(f"groups of up to {options.max_bytes} bytes were not measured")
        if options.expert_data_parallel_size is not None and table.experts is None:
            found.append("gathers of experts were not measured")
        if options.nvme_path is not None and table.routes.nvme is None:
            found.append("the drive was not measured")
        return f"; {self.table_path} does not hold ({'; '.join(found)})" if found else None

    def plan(self):
        """Plan unless the existing schedule was made from these files. Returns the verdict."""
        from megatron_ext import planner

        table, work = cost_table.load(self.table_path), self.model.workload
        digest = json_files.sha256(self.table_path)
        with naming_files(str(self.table_path), str(self.workload_path)):
            schedule = self._kept_schedule(digest)
            if schedule is None:
                self._say(f"planning ({self.policy})")
                schedule = planner.plan(work, table, policy=self.policy, cost_table_sha256=digest)
                if work.ramp:
                    ramp = planner.plan_ramp(schedule, work, table)
                    self._say(planner.ramp_note(ramp) or "")
                    schedules.save(self.schedule_path, [*ramp, schedule])
                else:
                    user_defined_schedule.save(self.schedule_path, schedule)
            return planner.verdict(work, table, schedule)

    def _kept_schedule(self, table_sha256: str):
        """The existing schedule if this policy planned it for this model from this table; otherwise None."""
        work = self.model.workload
        if not self.schedule_path.exists():
            return None
        try:
            found = schedules.load(self.schedule_path)
            if set(found) != {*work.ramp, work.parallel.num_microbatches}:
                return None
            for number, schedule in found.items():
                match.match(schedule, work.with_microbatches(number))
        except InputError:
            return None
        schedule = found[work.parallel.num_microbatches]
        name, _, seed = self.policy.partition(":")
        metadata, wanted = schedule.metadata, int(seed) if seed else None
        made = (metadata.cost_table_sha256, metadata.planner, metadata.options.seed)
        if made != (table_sha256, name, wanted) or schedule.predicted is None:
            return None
        self._keep(self.schedule_path)
        return schedule

    def _keep(self, path: Path) -> None:
        self.kept.append(path.name)
        self._say(f"kept: {path}")


def _fitted(words, *, hardware: str | None, fixed: str, **asked):
    """What ``fit`` finds for the number of ranks that the arguments or a launcher give."""
    from megatron_ext.cost import hardware_sheet
    from megatron_ext.planner.fit.request import Request, fit_problem_of

    if hardware is None:
        raise InputError("is needed with --fit", field="--hardware")
    world = script_arguments.read(words, verb="prepare").world_size()
    nodes = -(-world // hardware_sheet.load(hardware).gpus_per_node)
    more = {"hardware": hardware, "fixed": fixed_names(fixed), "nodes": nodes, "world_size": world}
    request = Request(words=with_defaults(tuple(words)), **more, **asked)
    return answer(request, fit_problem_of(request))


@click.command(cls=BareScriptCommand)
@click.option("--checkout", required=True, help="The Megatron-LM checkout that trains.")
@entry_option
@click.option("--out", required=True, type=click.Path(file_okay=False), help="Directory for the three files.")
@click.option("--policy", default="hybrid", show_default=True, help="As for plan.")
@click.option("--fit", "fitting", is_flag=True, help="First find the fastest settings that fit; needs --hardware.")
@fit_options
@click.option("--seconds", type=float, default=60.0, show_default=True, help="Time for measuring, as for measure.")
@click.option("--nvme-path", type=click.Path(), help="Directory on a drive, if the nvme route is wanted.")
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
def prepare(
    checkout: str, entry, out: str, policy: str, seconds: float, nvme_path, fitting, script_arguments, as_json, **asked
) -> None:
    """Describe, measure and plan from the arguments of a training script: all that its pretrain_gpt.py is given.

    Give --data-parallel-size, or run under a launcher. Files in the directory that still match are kept.
    """
    for name, value in asked.items():
        if value and not fitting:
            raise InputError("needs --fit", field="--fix" if name == "fixed" else f"--{name.replace('_', '-')}")
    found = _fitted(script_arguments, **asked) if fitting else None
    if found is not None:
        script_arguments = (*(f"{name}={value}" for name, value in found.ours().items()), *found.words(unknown=True))
    steps = Preparation(
        checkout, Path(out), script_arguments, entry=entry, policy=policy, seconds=seconds, nvme_path=nvme_path
    )
    with cluster_launch.ends_all():
        steps.check_node()
        steps.describe()
        if found is not None and steps.is_first:
            chosen = {"chosen": found.fit.winner.setting.options(), "predicted_us": found.fit.winner.us}
            json_files.save(os.path.join(out, "fit.json"), msgspec.structs.replace(found.request, **chosen))
        goes_on = steps.measure()
    if not goes_on:  # under a launcher, and not rank 0
        return
    from megatron_ext.planner.fit import fit_text
    from megatron_ext.planner.fit.fit_verdict import verdict_of_fit
    from megatron_ext.planner.last_lines import training_by

    judged = steps.plan()
    schedule = os.path.abspath(steps.schedule_path)
    by = training_by(schedule, user_defined_schedule.read_unchecked(schedule), nvme_path)
    more, last = [], judged.ending(by)
    answer = verdict_of_fit(found) if found is not None else None
    if found is not None and answer is not None:
        more, last = fit_text.as_prepared(found, answer, judged, os.path.dirname(schedule), by)
    lines = [*judged.said, *more]
    if not steps.patched:
        lines += ["patch the checkout:", f"    megatron-ext patch apply {shlex.quote(checkout)}"]
    paths = {"workload": steps.workload_path, "cost_table": steps.table_path, "schedule": steps.schedule_path}
    figures: dict[str, object] = {name: str(path) for name, path in paths.items()}
    figures |= {"kept": steps.kept, "patched": steps.patched, "verdict": judged.text}
    figures["fit"] = found and answer and fit_text.as_json(found, answer)
    emit(as_json, figures | judged.figures, "\n".join([*lines, *last]))
