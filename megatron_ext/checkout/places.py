"""Where each hook belongs, described by the syntax tree and by nothing else.

A place is a gap between two statements of one body. It is found in the text *without*
our lines, so the same code places a hook (``scripts/make_patches.py``) and judges where a
merge has put it (``verify.py``).
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.checkout.hook_table import Hook, hooks_of
from megatron_ext.checkout.syntax import (
    FunctionNode,
    PlaceError,
    assigned_name,
    bodies,
    function_named,
    is_not_none,
    method_named,
    only,
    parameters,
    statement_where,
    tests_attribute,
)


@dataclass(frozen=True)
class Gap:
    """Where one hook line may stand, in line numbers of the text without our lines.

    Attributes:
        hook: the hook.
        line: the line to insert, indented, without a line end.
        first: smallest number of the line it may follow (the statement before ends there).
        last: largest number of the line it may follow (the statement after begins on the next).
        chosen: the line our own patches insert it after.
    """

    hook: Hook
    line: str
    first: int
    last: int
    chosen: int


def find_gaps(file: str, text: str) -> list[Gap]:
    """Every hook's gap in ``text``, the content of ``file`` without our lines.

    Raises:
        PlaceError: the text does not parse, or a hook's place is missing or not unique,
            or a name the hook uses does not mean there what the hook takes it to mean.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise PlaceError(f"{file} does not parse: {error}") from None
    lines = text.split("\n")
    gaps = []
    for hook in hooks_of(file):
        try:
            gaps.append(_FINDERS[hook.name](hook, tree, lines))
        except PlaceError as error:
            raise PlaceError(f"{hook.name}: {error}") from None
    return gaps


# --- gaps ---------------------------------------------------------------------------------


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def _gap_before(hook: Hook, body: list[ast.stmt], index: int, lines: list[str], **names) -> Gap:
    """The gap in front of ``body[index]``; our patches go above its comment, if it has one."""
    _check_reachable(body[:index])
    statement = body[index]
    last = _first_line(statement) - 1
    chosen = last
    while chosen > 0 and lines[chosen - 1].strip().startswith("#"):
        chosen -= 1
    first = body[index - 1].end_lineno if index else chosen
    return _gap(hook, statement, first, last, max(first, chosen), **names)


def _gap_after(hook: Hook, body: list[ast.stmt], index: int, lines: list[str], **names) -> Gap:
    """The gap behind ``body[index]``; our patches go directly below it."""
    _check_reachable(body[: index + 1])
    statement = body[index]
    first = last = statement.end_lineno
    # What follows may be blank lines and comments only, up to the next line of code.
    while last < len(lines) and (not lines[last].strip() or lines[last].strip().startswith("#")):
        last += 1
    return _gap(hook, statement, first, last, first, **names)


def _check_reachable(before: list[ast.stmt]) -> None:
    if any(isinstance(s, (ast.Return, ast.Raise, ast.Continue, ast.Break)) for s in before):
        raise PlaceError("the code there is never reached")


def _gap(hook: Hook, beside: ast.stmt, first: int, last: int, chosen: int, **names) -> Gap:
    line = " " * beside.col_offset + hook.line(**names)
    return Gap(hook, line, first, last, chosen)


def _check_names(
    functions: list[FunctionNode], gap_line: int, needed: set[str], rebound: set[str]
) -> None:
    """Names mean at the hook what the hook takes them to mean.

    ``needed`` must be bound in ``functions`` (outermost first) above the hook. ``rebound`` are
    the names the hook line binds itself: a use of one above the hook would turn from a
    global into an unbound local, and ``hooks`` or ``gather_schedule`` must not be used at all.
    """
    outer, inner = functions[0], functions[-1]
    bound = set()
    for function in functions:
        bound |= parameters(function)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                if node.lineno <= gap_line or function is not inner:
                    bound.add(node.id)
    for name in sorted(needed - bound):
        raise PlaceError(f"no variable {name} in {inner.name}")
    for node in ast.walk(outer):
        name = node.id if isinstance(node, ast.Name) else getattr(node, "arg", None)
        if isinstance(node, ast.Name) and name in rebound and node.lineno <= gap_line:
            raise PlaceError(f"{name} is used above it in {outer.name}")
        if isinstance(node, (ast.Name, ast.arg)) and name in ("hooks", "gather_schedule"):
            raise PlaceError(f"{outer.name} has a variable {name} of its own")


# --- one finder a hook --------------------------------------------------------------------


def _pretrain_start(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    def imports_torch(s: ast.stmt) -> bool:
        return isinstance(s, ast.Import) and [a.name for a in s.names] == ["torch"]

    found = [i for i, s in enumerate(tree.body) if imports_torch(s)]
    index = only(found, "import of torch at the top of the module")
    for statement in tree.body[:index]:
        module = getattr(statement, "module", None) or ""
        if isinstance(statement, ast.ImportFrom) and module.split(".")[0] == "megatron":
            raise PlaceError("a module of megatron is imported before torch")
    return _gap_before(hook, tree.body, index, lines)


def _arguments_add(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    function = function_named(tree.body, "parse_args")

    def applies_provider(s: ast.stmt) -> bool:
        if not isinstance(s, ast.If):
            return False
        tested = {n.id for n in ast.walk(s.test) if isinstance(n, ast.Name)}
        return "extra_args_provider" in tested and assigned_name(s.body[-1]) == "parser"

    body, index = statement_where(function, applies_provider, "use of extra_args_provider")
    gap = _gap_after(hook, body, index, lines)
    _check_names([function], gap.chosen, {"parser"}, set())
    return gap


def _training_setup(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    function = function_named(tree.body, "train")

    def sets_param_sync(s: ast.stmt) -> bool:
        return tests_attribute(s, "args", "overlap_param_gather", "align_param_gather")

    body, index = statement_where(function, sets_param_sync, "choice of param_sync_func")
    gap = _gap_before(hook, body, index, lines)
    _check_names([function], gap.chosen, {"args", "model", "optimizer", "config"}, set())
    return gap


def _training_end(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    function = function_named(tree.body, "train")
    body = function.body
    loops = [i for i, s in enumerate(body) if isinstance(s, ast.While)]
    if not loops or not isinstance(body[-1], ast.Return):
        raise PlaceError("train does not end with a loop and a return")

    def exits(statement: ast.stmt) -> bool:
        called = [n.func for n in ast.walk(statement) if isinstance(n, ast.Call)]
        return any(isinstance(f, ast.Attribute) and f.attr == "exit" for f in called)

    # A training that a limit or a signal has ended leaves the process in front of the return.
    leaving = [i for i in range(loops[-1] + 1, len(body)) if exits(body[i])]
    gap = _gap_before(hook, body, leaving[0] if leaving else len(body) - 1, lines)
    _check_names([function], gap.chosen, set(), set())
    return gap


def _ddp_built(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    function = method_named(tree, "DistributedDataParallel", "__init__")

    def last_attribute(s: ast.stmt) -> bool:
        return (
            isinstance(s, ast.Assign)
            and isinstance(s.targets[0], ast.Attribute)
            and s.targets[0].attr == "overlap_param_gather_with_optimizer_step"
        )

    body, index = statement_where(function, last_attribute, "last attribute set by __init__")
    if body is not function.body or index != len(body) - 1:
        raise PlaceError("__init__ does not end where it is expected to")
    gap = _gap_after(hook, body, index, lines)
    _check_names([function], gap.chosen, {"self"}, set())
    return gap


def _optimizer_params_updated(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    function = method_named(tree, "DistributedOptimizer", "step_with_ready_grads")

    def parents_step(s: ast.stmt) -> bool:
        if assigned_name(s) != "update_successful" or not isinstance(s.value, ast.Call):
            return False
        called = s.value.func
        return (
            isinstance(called, ast.Attribute)
            and called.attr == "step_with_ready_grads"
            and isinstance(called.value, ast.Call)
            and isinstance(called.value.func, ast.Name)
            and called.value.func.id == "super"
        )

    body, index = statement_where(function, parents_step, "call of the parent's step_with_ready_grads")
    if body is not function.body:
        raise PlaceError("the parent's step_with_ready_grads is called conditionally")
    gap = _gap_after(hook, body, index, lines)
    _check_names([function], gap.chosen, {"self", "update_successful"}, set())
    return gap


def _interleaved(tree: ast.Module) -> FunctionNode:
    return function_named(tree.body, "forward_backward_pipelining_with_interleaving")


def _interleaved_begin(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    function = _interleaved(tree)

    def synchronises_two_chunks(s: ast.stmt) -> bool:
        return is_not_none(s, "config", "param_sync_func") and not isinstance(
            s.test, ast.BoolOp
        )

    body, index = statement_where(function, synchronises_two_chunks, "first synchronisation of chunks")
    if body is not function.body:
        raise PlaceError("the first synchronisation of chunks is conditional")
    gap = _gap_before(hook, body, index, lines)
    needed = {"config", "model", "num_microbatches", "forward_only"}
    _check_names([function], gap.chosen, needed, {"gather_schedule"})
    return gap


def _microbatch_name(function: FunctionNode) -> str:
    for name in ("virtual_microbatch_id", "microbatch_id"):
        if name in parameters(function):
            return name
    raise PlaceError(f"{function.name} has no micro-batch parameter")


def _helper_gap(hook, tree, lines, names: tuple[str, ...], test, what: str, needed: set) -> Gap:
    outer = _interleaved(tree)
    helper = function_named(outer.body, *names)
    body, index = statement_where(helper, test, what)
    if body is not helper.body:
        raise PlaceError(f"{what} is conditional")
    microbatch = _microbatch_name(helper)
    gap = _gap_before(hook, body, index, lines, microbatch=microbatch)
    # Only the helper's own names count: the outer function's model_chunk_id is a loop variable.
    _check_names([helper], gap.chosen, needed | {microbatch}, set())
    return gap


def _interleaved_pre_forward(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    return _helper_gap(
        hook,
        tree,
        lines,
        ("forward_step_helper_preprocess", "forward_step_helper"),
        lambda s: is_not_none(s, "config", "param_sync_func"),
        "test of param_sync_func in the forward helper",
        {"model_chunk_id"},
    )


def _interleaved_pre_backward(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    def pops_output(s: ast.stmt) -> bool:
        return (
            assigned_name(s) == "output_tensor"
            and isinstance(s.value, ast.Call)
            and isinstance(s.value.func, ast.Attribute)
            and s.value.func.attr == "pop"
        )

    return _helper_gap(
        hook,
        tree,
        lines,
        ("backward_step_helper_preprocess", "backward_step_helper"),
        pops_output,
        "pop of the output tensor in the backward helper",
        {"model_chunk_id"},
    )


def _interleaved_post_backward(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    return _helper_gap(
        hook,
        tree,
        lines,
        ("backward_step_helper_postprocess", "backward_step_helper"),
        lambda s: is_not_none(s, "config", "grad_sync_func"),
        "test of grad_sync_func in the backward helper",
        set(),
    )


def _end(function: FunctionNode, hook: Hook, lines: list[str], begin: Gap) -> Gap:
    """Before the function's last statement that tests ``finalize_model_grads_func``."""
    found = [
        i
        for i, s in enumerate(function.body)
        if tests_attribute(s, "config", "finalize_model_grads_func")
    ]
    if not found:
        raise PlaceError(f"{function.name} does not finalize gradients")
    gap = _gap_before(hook, function.body, found[-1], lines)
    if gap.first <= begin.last:
        raise PlaceError(f"{function.name} finalizes gradients before the iteration begins")
    # An early return between begin and end would leave the iteration open.
    for node in (n for s in bodies(function) for n in s):
        if isinstance(node, ast.Return) and begin.last < node.lineno <= gap.first:
            raise PlaceError(f"{function.name} returns before the iteration ends")
    return gap


def _interleaved_end(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
    return _end(_interleaved(tree), hook, lines, _interleaved_begin(hook, tree, lines))


def _plain_begin(name: str):
    def find(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
        function = function_named(tree.body, name)
        # As early as config is known: later releases pick their backward function early, too.
        found = [i for i, s in enumerate(function.body) if assigned_name(s) == "config"]
        index = only(found, "assignment of config")
        gap = _gap_after(hook, function.body, index, lines)
        needed = {"config", "model", "num_microbatches", "forward_only"}
        rebound = {"forward_step", "backward_step"}
        _check_names([function], gap.last, needed, rebound)
        return gap

    return find


def _plain_end(name: str):
    def find(hook: Hook, tree: ast.Module, lines: list[str]) -> Gap:
        begin = _plain_begin(name)(hook, tree, lines)
        return _end(function_named(tree.body, name), hook, lines, begin)

    return find


_FINDERS: dict[str, Callable[[Hook, ast.Module, list[str]], Gap]] = {
    "pretrain.start": _pretrain_start,
    "arguments.add": _arguments_add,
    "training.setup": _training_setup,
    "training.end": _training_end,
    "ddp.built": _ddp_built,
    "optimizer.params_updated": _optimizer_params_updated,
    "schedules.interleaved.begin": _interleaved_begin,
    "schedules.interleaved.pre_forward": _interleaved_pre_forward,
    "schedules.interleaved.pre_backward": _interleaved_pre_backward,
    "schedules.interleaved.post_backward": _interleaved_post_backward,
    "schedules.interleaved.end": _interleaved_end,
    "schedules.1f1b.begin": _plain_begin("forward_backward_pipelining_without_interleaving"),
    "schedules.1f1b.end": _plain_end("forward_backward_pipelining_without_interleaving"),
    "schedules.no_pipelining.begin": _plain_begin("forward_backward_no_pipelining"),
    "schedules.no_pipelining.end": _plain_end("forward_backward_no_pipelining"),
}
