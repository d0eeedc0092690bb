"""Hooks are placed by structure, and nowhere else."""

import pytest
import toy_megatron
from toy_megatron import TEXTS

from megatron_ext.checkout.find_places import find_gaps
from megatron_ext.checkout.hook_table import (
    ARGUMENTS,
    DDP,
    FILES,
    HOOKS,
    OPTIMIZER,
    PRETRAIN,
    SCHEDULES,
    TRAINING,
    hooks_of,
)
from megatron_ext.checkout.place_hooks import place_hooks
from megatron_ext.checkout.syntax import PlaceError
from megatron_ext.checkout.verify import is_hook_line, strip_hooks, verify_text


@pytest.fixture
def patched():
    """path -> patched text of the toy."""
    return {path: place_hooks(path, TEXTS[path])[0] for path in FILES}


def test_every_hook_has_one_place():
    found = [gap.hook.name for path in FILES for gap in find_gaps(path, TEXTS[path])]
    assert sorted(found) == sorted(hook.name for hook in HOOKS)


def test_the_patched_toy_calls_every_hook_at_its_moment(patched, monkeypatch):
    plain = toy_megatron.run(TEXTS, monkeypatch)
    log = toy_megatron.run(patched, monkeypatch)
    hooks = "add_arguments on_train_setup on_train_end on_ddp_built on_params_updated begin_iteration begin_steps "
    hooks += "pre_forward pre_backward post_backward end_iteration"
    assert [e for e in log if not (isinstance(e, tuple) and e[0] in hooks.split())] == plain

    assert log.index(("add_arguments",)) == 0
    assert log[log.index(("on_train_setup",)) - 1] == "no sync"
    assert log[log.index(("on_train_end",)) - 1] == "close"
    assert log[log.index(("on_ddp_built",)) - 1] == ("bucket", "b")
    updated = log.index(("on_params_updated", True))
    assert log[updated - 1 : updated + 2] == ["update", ("on_params_updated", True), "timers"]

    begin = log.index(("begin_iteration", 2, False))
    end = log.index(("end_iteration",), begin)
    inside = [e for e in log[begin:end] if isinstance(e, tuple)]
    for k in range(4):
        forward = inside.index(("F", k, k // 2))
        assert ("pre_forward", k, k // 2) in inside[max(0, forward - 2) : forward]
        backward = inside.index(("B", k, 1 - k // 2))
        assert inside[backward - 1] == ("pre_backward", k, 1 - k // 2)
        assert inside[backward + 1] == ("post_backward", k)
    assert log[end + 1] == "finalize"
    for steps, count in ((2, 2), (3, 3)):
        for forward_only in (False, True):
            begin = log.index(("begin_steps", steps, forward_only))
            inside = log[begin : log.index(("end_iteration",), begin)]
            assert inside.count(("pre_forward", count - 1, 0)) == 1
            assert inside.count(("pre_backward", count - 1, 0)) == (not forward_only)


@pytest.mark.parametrize("path", FILES)
def test_a_patched_file_verifies_and_strips_to_itself(path, patched):
    assert verify_text(path, patched[path]) == []
    assert strip_hooks(path, patched[path]) == TEXTS[path]


@pytest.mark.parametrize("path", FILES)
def test_a_file_without_hooks_lacks_them_all(path):
    assert verify_text(path, TEXTS[path]) == [f"{hook.name}: not in its place" for hook in hooks_of(path)]


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("change", ["up", "down", "deeper", "shallower", "twice", "other", "gone"])
def test_a_hook_that_is_moved_or_changed_is_seen(path, change, patched):
    rows = patched[path].split("\n")
    for number, row in [(n, r) for n, r in enumerate(rows) if is_hook_line(r)]:
        moved = rows[:number] + rows[number + 1 :]
        code = [n for n, r in enumerate(moved) if r.strip() and not r.strip().startswith("#")]
        if change == "up":
            moved.insert([n for n in code if n < number][-1], row)
        elif change == "down":
            moved.insert([n for n in code if n >= number][0] + 1, row)
        elif change == "deeper":
            moved.insert(number, "    " + row)
        elif change == "shallower":
            moved.insert(number, row[4:] if row.startswith("    ") else " " + row)
        elif change == "twice":
            moved[number:number] = [row, row]
        elif change == "other":
            moved.insert(
                number, row.replace("hooks.", "hooks.old_").replace("gather_schedule.", "gather_schedule.old_")
            )
        assert verify_text(path, "\n".join(moved)), f"line {number} {change}"


@pytest.mark.parametrize("path", FILES)
def test_comments_and_blank_lines_around_a_hook_do_not_matter(path, patched):
    rows = []
    for row in patched[path].split("\n"):
        pad = row[: len(row) - len(row.lstrip())]
        rows += [f"{pad}# a note", row, "", f"{pad}# another"] if is_hook_line(row) else [row]
    assert verify_text(path, "\n".join(rows)) == []


KEEP = "        self.module = module"
CHUNK_OF = "        model_chunk_id = chunk_of(virtual_microbatch_id, True)\n"
AFTER = "        backward_step_helper_postprocess(virtual_microbatch_id)\n"
FIRST = "        model = model[0]\n"

SPOILED = [
    (PRETRAIN, "import torch\nfrom megatron.training.training import train\n", "import numpy\n"),
    (PRETRAIN, "import torch\n", "x = 1; import torch\n"),
    (ARGUMENTS, "    if not extra", "    parser.parse_known_args()\n    if not extra"),
    (ARGUMENTS, "parser = extra_args_provider(parser)", "extra_args_provider(parser)"),
    (ARGUMENTS, "def parse_args", "def read_args"),
    (TRAINING, "args.align_param_gather and ", ""),
    (TRAINING, "def train(args, model, optimizer,", "def train(args, model, opt,"),
    (TRAINING, "    return log", "    log.append(1)"),
    (TRAINING, "        step += 1", "        step += 1\n        if step > 5:\n            return log"),
    (TRAINING, "        step += 1", "        step += 1\n        sys.exit(0)"),
    (TRAINING, "    for chunk in model:", "    if args.other:\n        return other(model)\n    for chunk in model:"),
    (TRAINING, "    while step < 2:", "    if step < 2:"),
    (DDP, "gather_with_optimizer_step = None", "gather_with_optimizer_step = None\n        self.x = 1"),
    (OPTIMIZER, "update_successful = (super()", "done = (super()"),
    (OPTIMIZER, "        update_successful", "        self.model.start_param_sync()\n        update_successful"),
    (DDP, KEEP, f"        if module is None:\n            return\n{KEEP}"),
    (OPTIMIZER, "step_with_ready_grads())\n", "step_with_ready_grads())\n        hooks = []\n"),
    (SCHEDULES, "        input_tensor = inputs.pop(0)\n", "        return None, None\n"),
    (SCHEDULES, "        output_tensor = outputs.pop(0)\n", "        output_tensor = outputs[0]\n"),
    (
        SCHEDULES,
        "def backward_step_helper_postprocess(virtual_microbatch_id)",
        "def backward_step_helper_postprocess(k)",
    ),
    (SCHEDULES, CHUNK_OF, f"{CHUNK_OF}        forward_step(model, 0)\n"),
    (SCHEDULES, AFTER, f"{AFTER}        backward_step(model, 0)\n"),
    (SCHEDULES, "    chunks = len(model)\n    total", "    raise SystemExit\n    chunks = len(model)\n    total"),
    (SCHEDULES, "    run_backward = backward_step\n", "    run_backward = other\n"),
    (SCHEDULES, "    chunks = len(model)\n", "    chunks = len(model)\n    gather_schedule = 1\n"),
    (SCHEDULES, "    results = []\n", "    return None\n"),
    (SCHEDULES, "    config = model[0].config\n", "    config = model[0].config\n    return None\n"),
    (SCHEDULES, f"{FIRST}    config =", f"{FIRST}    print(backward_step)\n    config ="),
]


@pytest.mark.parametrize("path, old, new", SPOILED)
def test_a_tree_of_another_form_is_refused(path, old, new):
    assert old in TEXTS[path]
    with pytest.raises(PlaceError):
        find_gaps(path, TEXTS[path].replace(old, new))


def test_text_that_does_not_parse_is_refused():
    with pytest.raises(PlaceError, match="does not parse"):
        find_gaps(TRAINING, "def train(:\n")


def test_the_hook_comes_before_whatever_imports_torch_or_megatron():
    text = TEXTS[PRETRAIN].replace("import time\n", "import time\nimport megatron.core\n")
    (gap,) = find_gaps(PRETRAIN, text)
    assert text.split("\n")[gap.chosen] == "import megatron.core"
    (hook,) = hooks_of(PRETRAIN)
    late = text.replace("import torch\n", f"{hook.line()}\nimport torch\n")
    assert verify_text(PRETRAIN, late) == ["line 8 is not where its hook belongs", "pretrain.start: not in its place"]


def test_an_early_return_is_found_where_it_is(patched):
    text = patched[TRAINING].replace(
        "        step += 1", "        step += 1\n        if step > 5:\n            return log"
    )
    (problem,) = verify_text(TRAINING, text)
    line = text.split("\n").index("            return log") + 1
    assert problem == f"training.end: train may return at line {line}, before the hook is reached"


def test_a_hook_line_inside_a_string_is_seen(patched):
    (hook,) = hooks_of(DDP)
    line = f"        {hook.line()}\n"
    text = patched[DDP].replace(line, f'        note = """\n{line}"""\n')
    assert verify_text(DDP, text)


def test_tabs_indent_as_their_neighbours():
    text = TEXTS[DDP].replace("    ", "\t")
    (gap,) = find_gaps(DDP, text)
    assert gap.line.startswith("\t\tfrom")
