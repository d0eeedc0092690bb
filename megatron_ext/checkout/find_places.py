"""Where each hook belongs, described by the syntax tree alone.

A place is a gap (``gaps.py``). It is found in the text *without* hook lines, so the same code places a hook
(``place_hooks.py``, ``scripts/make_patches.py``) and checks where a hook line stands (``verify.py``). A finder proves
four things: its place is the only one of its form, control reaches it, the names that the hook uses are bound there,
and it comes before or after the calls whose order matters.
"""

import ast
import sys
from collections.abc import Callable
from functools import partial

from megatron_ext.checkout.gaps import HookGap, check_above, check_below, gap_after, gap_before, proven, reached
from megatron_ext.checkout.hook_table import Hook, hooks_of
from megatron_ext.checkout.syntax import (
    FunctionNode,
    PlaceError,
    assigned_name,
    assigned_value,
    calls,
    function_named,
    method_named,
    only,
    own_nodes,
    parameters,
    span,
    statement_where,
    tests_attribute,
)


def find_gaps(file: str, text: str) -> list[HookGap]:
    """Every hook's gap in ``text``, the content of ``file`` without hook lines.

    Raises:
        PlaceError: the text does not parse, a hook's place is missing or not unique, or a name in the hook line has
            another meaning there than the hook expects.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        version = ".".join(map(str, sys.version_info[:2]))
        raise PlaceError(f"{file} does not parse in Python {version}: {error}") from None
    lines = text.split("\n")
    gaps = []
    for hook in hooks_of(file):
        try:
            gaps.append(_FINDERS[hook.name](hook, tree, lines))
        except PlaceError as error:
            raise PlaceError(f"{hook.name}: {error}") from None
    return gaps


def _pretrain_start(hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    def imports(statement: ast.stmt) -> bool:
        """Whether ``statement`` imports torch or a module of Megatron when the script starts."""
        if isinstance(statement, (*FunctionNode.__args__, ast.ClassDef)):
            return False
        names = []
        for node in ast.walk(statement):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
        return bool({name.split(".")[0] for name in names} & {"torch", "megatron"})

    found = [index for index, statement in enumerate(tree.body) if imports(statement)]
    if not found:
        raise PlaceError("the script imports neither torch nor megatron")
    return gap_before(hook, tree.body, found[0], lines)


def _arguments_add(hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    function = function_named(tree.body, "parse_args")

    def applies_provider(s: ast.stmt) -> bool:
        if not isinstance(s, ast.If):
            return False
        tested = {n.id for n in ast.walk(s.test) if isinstance(n, ast.Name)}
        return "extra_args_provider" in tested and assigned_name(s.body[-1]) == "parser"

    body, index = statement_where(function, applies_provider, "`parser = extra_args_provider(parser)` in an `if`")
    above = calls(function, "parse_args", "parse_known_args"), "the options are parsed"
    return proven(function, gap_after(hook, body, index, lines), {"parser"}, above=above)


def _training_setup(hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    function = function_named(tree.body, "train")
    test = lambda s: tests_attribute(s, "args", "overlap_param_gather", "align_param_gather")
    body, index = statement_where(function, test, "`if args.overlap_param_gather and args.align_param_gather`")
    loops = [node.lineno for node in own_nodes(function) if isinstance(node, ast.While)]
    needed, above = {"args", "model", "optimizer", "config"}, (loops, "the loop of train begins")
    return proven(function, gap_before(hook, body, index, lines), needed, above=above)


def _training_end(hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    function = function_named(tree.body, "train")
    body = function.body
    loops = [i for i, s in enumerate(body) if isinstance(s, ast.While)]
    if not loops or not isinstance(body[-1], ast.Return):
        raise PlaceError(f"{span(function)} does not end with a loop and a return")
    # When a limit or a signal has ended training, the process exits before the return.
    exits = lambda s: any(isinstance(n, ast.Call) and getattr(n.func, "attr", "") == "exit" for n in ast.walk(s))
    leaving = [i for i in range(loops[-1] + 1, len(body)) if exits(body[i])]
    gap = gap_before(hook, body, leaving[0] if leaving else len(body) - 1, lines)
    return proven(function, gap, set(), above=(calls(function, "exit", "_exit"), "train leaves the process"))


def _ddp_built(hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    function = method_named(tree, "DistributedDataParallel", "__init__")
    attribute = "self.overlap_param_gather_with_optimizer_step"
    test = lambda s: isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == attribute
    body, index = statement_where(function, test, f"`{attribute} = ...`")
    if body is not function.body or index != len(body) - 1:
        said = f"{span(function)} does not end with `{attribute} = ...` (line {body[index].lineno})"
        raise PlaceError(f"{said} but with the statement at line {function.body[-1].lineno}")
    return proven(function, gap_after(hook, body, index, lines), {"self"})


def _unconditional(function: FunctionNode, test: Callable[[ast.stmt], bool], wanted: str) -> tuple[list[ast.stmt], int]:
    """The function's own statements, and the index of the one for which ``test`` holds.

    Raises:
        PlaceError: the statement runs under a condition, or there is not exactly one.
    """
    body, index = statement_where(function, test, wanted)
    if body is not function.body:
        raise PlaceError(f"{wanted} at line {body[index].lineno} is conditional")
    return body, index


def _optimizer_params_updated(hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    function = method_named(tree, "DistributedOptimizer", "step_with_ready_grads")

    def parents_step(s: ast.stmt) -> bool:
        value = assigned_value(s, "update_successful")
        return isinstance(value, ast.Call) and ast.unparse(value.func) == "super().step_with_ready_grads"

    wanted = "`update_successful = super().step_with_ready_grads()`"
    body, index = _unconditional(function, parents_step, wanted)
    above = calls(function, "start_param_sync"), "the parameters are gathered"
    return proven(function, gap_after(hook, body, index, lines), {"self", "update_successful"}, above=above)


_INTERLEAVED = "forward_backward_pipelining_with_interleaving"


def _interleaved_begin(hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    function = function_named(tree.body, _INTERLEAVED)
    body, index = _unconditional(function, *_is_there("param_sync_func"))
    above = calls(function, "forward_step_helper", "backward_step_helper"), "a step runs"
    needed = {"config", "model", "num_microbatches", "forward_only"}
    return proven(function, gap_before(hook, body, index, lines), needed, {"gather_schedule"}, above=above)


def _is_there(attribute: str) -> tuple[Callable[[ast.stmt], bool], str]:
    """A test for the statement ``if config.ATTRIBUTE is not None:``, with nothing else in its condition, and its text
    for messages."""
    wanted = f"if config.{attribute} is not None"
    return lambda s: isinstance(s, ast.If) and f"if {ast.unparse(s.test)}" == wanted, f"`{wanted}`"


def _helper_gap(part: str, test, what: str, needed: set, hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    """The gap before the one statement for which ``test`` holds, in a helper of the interleaved schedule.

    ``part`` names the helper, e.g. ``forward_step_helper_preprocess``. In releases before Megatron split the helper
    into three, the whole helper is searched.
    """
    outer = function_named(tree.body, _INTERLEAVED)
    step, side = part.split("_helper_")
    helper = function_named(outer.body, part, f"{step}_helper", where=span(outer))
    body, index = _unconditional(helper, test, what)
    names = [name for name in ("virtual_microbatch_id", "microbatch_id") if name in parameters(helper)]
    if not names:
        raise PlaceError(f"{span(helper)} has no micro-batch parameter")
    # Only the helper's own names count: the outer function's model_chunk_id is a loop variable.
    gap = gap_before(hook, body, index, lines, microbatch=names[0])
    gap = proven(helper, gap, {*needed, names[0]})
    _check_step_order(outer, helper, gap, step, before=side == "preprocess")
    return gap


def _check_step_order(outer: FunctionNode, helper: FunctionNode, gap: HookGap, step: str, *, before: bool) -> None:
    """Check that the hook comes before (or after) the call of ``step``, in its helper or in the helper's caller."""
    if lines := calls(helper, step):
        check = check_above if before else check_below
        return check(gap, lines, f"{step} is called")
    whole = function_named(outer.body, f"{step}_helper", where=span(outer))
    steps, parts = calls(whole, step), calls(whole, helper.name)
    if not steps or not parts:
        raise PlaceError(f"{span(whole)} does not call {helper.name if steps else step}")
    if max(parts) >= min(steps) if before else min(parts) <= max(steps):
        raise PlaceError(f"{whole.name} calls {helper.name} {'after' if before else 'before'} {step}, line {parts[0]}")


def _pops_output(s: ast.stmt) -> bool:
    value = assigned_value(s, "output_tensor")
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "pop"


def _end(name: str, find_begin: "Finder", hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    """The gap before the last statement of the function ``name`` that tests ``finalize_model_grads_func``."""
    function, begin = function_named(tree.body, name), find_begin(hook, tree, lines)
    found = [i for i, s in enumerate(function.body) if tests_attribute(s, "config", "finalize_model_grads_func")]
    if not found:
        raise PlaceError(f"no `if config.finalize_model_grads_func` in the body of {span(function)}")
    gap = gap_before(hook, function.body, found[-1], lines)
    check_below(gap, [begin.last + 1], "the iteration begins")
    # An early return between begin and end would leave the iteration open.
    return reached(function, gap)


def _plain_begin(name: str, hook: Hook, tree: ast.Module, lines: list[str]) -> HookGap:
    function = function_named(tree.body, name)
    # As soon as config is known, because later releases choose their backward function early.
    found = [i for i, s in enumerate(function.body) if assigned_name(s) == "config"]
    index = only(found, "`config = ...`", span(function), [function.body[i].lineno for i in found])
    needed, rebound = {"config", "model", "num_microbatches", "forward_only"}, {"forward_step", "backward_step"}
    gap = proven(function, gap_after(hook, function.body, index, lines), needed, rebound)
    for step in sorted(rebound):
        if not any(isinstance(node, ast.Name) and node.id == step for node in ast.walk(function)):
            raise PlaceError(f"{span(function)} does not call {step}")
    return gap


Finder = Callable[[Hook, ast.Module, list[str]], HookGap]
_HAS_PARAM_SYNC = (*_is_there("param_sync_func"), {"model_chunk_id"})
_HAS_GRAD_SYNC = (*_is_there("grad_sync_func"), set())
_POPS_OUTPUT = (_pops_output, "`output_tensor = ....pop(...)`", {"model_chunk_id"})
"""For a helper of the interleaved schedule: a test for a statement, its text, and names that its hook uses."""
_1F1B, _NO_PIPELINING = "forward_backward_pipelining_without_interleaving", "forward_backward_no_pipelining"

_FINDERS: dict[str, Finder] = {
    "pretrain.start": _pretrain_start,
    "arguments.add": _arguments_add,
    "training.setup": _training_setup,
    "training.end": _training_end,
    "ddp.built": _ddp_built,
    "optimizer.params_updated": _optimizer_params_updated,
    "schedules.interleaved.begin": _interleaved_begin,
    "schedules.interleaved.pre_forward": partial(_helper_gap, "forward_step_helper_preprocess", *_HAS_PARAM_SYNC),
    "schedules.interleaved.pre_backward": partial(_helper_gap, "backward_step_helper_preprocess", *_POPS_OUTPUT),
    "schedules.interleaved.post_backward": partial(_helper_gap, "backward_step_helper_postprocess", *_HAS_GRAD_SYNC),
    "schedules.interleaved.end": partial(_end, _INTERLEAVED, _interleaved_begin),
    "schedules.1f1b.begin": partial(_plain_begin, _1F1B),
    "schedules.1f1b.end": partial(_end, _1F1B, partial(_plain_begin, _1F1B)),
    "schedules.no_pipelining.begin": partial(_plain_begin, _NO_PIPELINING),
    "schedules.no_pipelining.end": partial(_end, _NO_PIPELINING, partial(_plain_begin, _NO_PIPELINING)),
}
