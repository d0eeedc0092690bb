"""A user's request to ``fit``: a machine, limits, settings that are fixed, and the arguments of a training script."""

from itertools import product
from typing import NamedTuple

import msgspec

from megatron_ext.cost import cost_table, hardware_sheet
from megatron_ext.cost.device_reserve import device_reserve, temporary_bytes
from megatron_ext.cost.hardware_sheet import HardwareSheet
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import gpt_arguments
from megatron_ext.megatron.ignored_options import parse
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.planner.fit.costs import SettingCosts
from megatron_ext.planner.fit.search_settings import Fit, SettingSearch
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.planner.fit.space import LAYOUT, NAMES, Space
from megatron_ext.schedule.bill_by_step import activation_peaks
from megatron_ext.workload.workload import Limits, Workload

HOST_PART = 0.8
"""Part of the host's memory that a run may fill. The rest is for the system, the data loader and Python."""


NEEDED = ("--num-layers", "--global-batch-size")
"""Options that are required: without them there is no model, or the size of an iteration is not known."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request. A run directory keeps it as fit.json.

    Attributes:
        hardware: a machine's name or a sheet's path; None if ``cost_tables`` alone give the costs.
        cost_tables: paths of tables that were measured with the given settings, and with other micro-batch sizes.
        world_size: total number of GPUs, if some nodes are not full.
        words: the script's arguments, including limits.
        fixed: names from :data:`megatron_ext.planner.fit.space.NAMES`.
        chosen: the options of the winner. ``predicted_us`` is its iteration time. Both are empty until they are known.
    """

    hardware: str | None
    cost_tables: tuple[str, ...] = ()
    nodes: int = 1
    world_size: int | None = None
    words: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    search_layout: bool = False
    allow_delayed_update: bool = False
    chosen: dict[str, str] = {}
    predicted_us: float | None = None


class FitProblem(NamedTuple):
    """A request that was read and checked: what is searched, by which costs, within which limits.

    Attributes:
        passed_over: options that no list names.
        changed, refused: if the given sizes do not divide the batch or the layers: options that replace them in the
            space's given setting, and what is wrong with the given sizes.
    """

    space: Space
    costs: SettingCosts
    sheet: HardwareSheet | None
    limits: Limits
    passed_over: list[str]
    changed: tuple[str, ...] = ()
    refused: str = ""

    def room(self, setting: Setting, workload: Workload) -> int:
        """Device bytes that a plan may hold by its bill: the limit, or what the device has in addition to the
        reserve."""
        if self.limits.device_bytes is not None or self.sheet is None:
            return self.most_bytes
        return self.most_bytes - self.reserve(setting, workload, self.sheet)

    def reserve(self, setting: Setting, workload: Workload, sheet: HardwareSheet) -> int:
        """Device bytes beyond the bill on a machine with this data sheet."""
        parallel = setting.parallel
        layers = max(sum(c.num_layers for c in workload.chunks_of_rank(rank)) for rank in range(parallel.pp))
        activations = max(activation_peaks(workload), default=0)
        how = {"layers": layers, "activation_bytes": activations, "table": self.costs.table}
        how |= {"within_layer": temporary_bytes(workload), "context_parallel": setting.batch.context_parallel}
        return device_reserve(sheet, parallel, **how)

    @property
    def most_bytes(self) -> int:
        """Bytes of a device: the limit, or its memory."""
        if self.limits.device_bytes is not None:
            return self.limits.device_bytes
        assert self.sheet is not None
        return int(self.sheet.device.memory_bytes.value)

    def search(self) -> Fit:
        """Search the space. Raises InputError if nothing fits."""
        return SettingSearch(self.space, self.costs, self.limits, self.room, self.most_bytes).run()


def fit_problem_of(request: Request, corrected_by: cost_table.CostTable | None = None) -> FitProblem:
    """Read the sheet, the table and the script's arguments.

    Args:
        corrected_by: a table measured with the winner of the request. It corrects the sheet.

    Raises:
        InputError: the message names the option, the file or the field.
    """
    if request.hardware is None and not request.cost_tables:
        raise InputError("or --cost-table is needed", field="--hardware")
    if unknown := set(request.fixed) - {*NAMES, "all"}:
        raise InputError(f"is not a setting; known: all, {', '.join(NAMES)}", field="--fix", value=min(unknown))
    sheet = None if request.hardware is None else hardware_sheet.load(request.hardware)
    passed_over: list[str] = []
    args, changed, refused = _parsed(request, sheet, passed_over)
    sizes = gpt_arguments.shape_of(args), gpt_arguments.parallel_of(args), gpt_arguments.batch_of(args)
    given = Setting(*sizes, args.zero_stage, optimizer_settings(args))
    limits = gpt_arguments.limits_of(args)
    if sheet is None and limits.device_bytes is None:
        raise InputError("is needed: a cost table does not have the memory of a device", field="--limit-device-bytes")
    if limits.host_bytes is None and sheet is not None:
        limits = msgspec.structs.replace(limits, host_bytes=int(HOST_PART * sheet.host.memory_bytes.value))
    multiple = args.make_vocab_size_divisible_by

    def vocab(tp: int) -> int:
        return -(-args.vocab_size // (multiple * tp)) * multiple * tp

    fixed = frozenset(NAMES if "all" in request.fixed else request.fixed)
    sequence_parallel = getattr(args, "sequence_parallel", False)
    space = Space(given, fixed, request.search_layout, request.allow_delayed_update, vocab, sequence_parallel)
    costs = _costs(request, sheet, space, limits, corrected_by)
    if not costs.allows(given):
        refused = refused or "no cost table was measured with its micro-batch size"
    return FitProblem(space, costs, sheet, limits, passed_over, changed, refused)


def _costs(request: Request, sheet: HardwareSheet | None, space: Space, limits: Limits, corrected_by) -> SettingCosts:
    tables, measured = [cost_table.load(path) for path in request.cost_tables], space.given
    if corrected_by is not None:
        tables = [corrected_by]
        measured = next((one for one in space.settings() if one.options() == request.chosen), measured)
    return SettingCosts.by(sheet, tables, measured, measured.workload(limits))


def _parsed(request: Request, sheet: HardwareSheet | None, passed_over: list[str]):
    """The script's options. If their sizes do not divide the batch or the layers but are searched, other sizes replace
    them. The names of the replaced options follow, and the error for the given sizes."""
    for name in NEEDED[: 1 if "all" in request.fixed else 2]:  # if everything is fixed, the batch cannot change
        if not any(word.partition("=")[0] == name for word in request.words):
            raise InputError("is needed, after --: fit keeps the model and the global batch", field=name)
    others = {"micro-batch-size": ["1"]}
    if request.search_layout:
        others |= dict.fromkeys(LAYOUT[:2], [str(1 << power) for power in range(8)])
    kept = {*NAMES} if "all" in request.fixed else {*request.fixed}
    free = {name: values for name, values in others.items() if name not in kept}
    changes = ({f"--{name}": value for name, value in zip(free, values)} for values in product(*free.values()))
    refused = None
    for more in ({}, *changes):
        try:
            passed_over.clear()
            words = *request.words, *(word for pair in more.items() for word in pair)
            return _parse(words, request, sheet, passed_over), tuple(more), str(refused or "")
        except InputError as error:
            refused = refused or error
            if refused.field not in ("--global-batch-size", "--num-layers"):
                break
    assert refused is not None
    raise refused from None


def _parse(words: tuple[str, ...], request: Request, sheet: HardwareSheet | None, passed_over: list[str]):
    world, per_node = request.world_size, None
    if sheet is not None:
        world = world or request.nodes * sheet.gpus_per_node
        per_node = min(world, sheet.gpus_per_node)
    try:
        return parse(
            words,
            verb="fit",
            passed_over=passed_over,
            world_size=world,
            transformer_impl="transformer_engine",  # Megatron's own default
            gpus_per_node=per_node,
        )
    except InputError as error:
        if error.field != "WORLD_SIZE":
            raise
        # `fit` starts no processes: here the numbers are GPUs that the user gave.
        reason = error.message.replace("processes", "GPUs").replace("is not a multiple", "need a multiple")
        by = ("--nodes", request.nodes) if request.world_size is None else ("--gpus", request.world_size)
        raise InputError(f"gives {world} GPUs; the parallel sizes {reason}", field=by[0], value=by[1]) from None


def with_changes(words: tuple[str, ...], add: dict[str, str], take_out: list[str]) -> tuple[str, ...]:
    """A command line with the options ``add`` replaced or added, and ``take_out`` removed."""
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            dropping = name in add or name in take_out
        if not dropping:
            kept.append(word)
    return (*kept, *(part for name, value in add.items() for part in (name, value) if part))
