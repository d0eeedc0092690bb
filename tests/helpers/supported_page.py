"""Write docs/supported.md from what the code refuses and what the tests try.

``python tests/helpers/supported_page.py`` writes the page; a test compares it with what :func:`page` gives.
"""

import cases
import default_arguments
import functional_tests
import public_scripts
from places import ROOT

from megatron_ext.checkout.patchset import manifest
from megatron_ext.formats.errors import flag
from megatron_ext.megatron import refusals
from megatron_ext.workload import whole_gradients

PAGE = ROOT / "docs" / "supported.md"

ACCEPTED = {
    "--rampup-batch-size": "a schedule for every number of micro-batches; releases from 0.18 on ignore the option",
    "--step-batch-size-schedule": "the same, from 0.18 on",
    "--decrease-batch-size-if-needed": "every iteration leaves out the same rest of its batch",
    "--overlap-param-gather-with-optimizer-step": "the schedule replaces it, and a line says so",
    "--context-parallel-size": "parameters are sharded over these ranks as over replicas; `measure` needs GPUs, "
    "`describe`, `fit` and `cost estimate` do not",
    "--num-distributed-optimizer-instances": "parameters are sharded over the ranks of one instance; all zero stages, "
    "also with experts",
    "--fp8-format": "compute in fp8, parameters gathered in 16 bits; activations are counted as in 16 bits, which is "
    "more; described and planned, trained on no GPU yet",
    "--log-params-norm": "reads whole, fresh parameters",
    "--async-save": "except for states on the drive, for new parameters that the device casts, and for states in host "
    "memory with a persistent worker",
    "--ckpt-format torch_dist": "also of states on the drive",
}
"""Accepted options that people ask about; each has a test."""

HEADER = """# What is supported

`tests/helpers/supported_page.py` writes this page from what the code refuses and what the tests try. A test fails if
the page is out of date. *Trained*: trained by a schedule on the CPU test bench, equal to Megatron's own gather to the
last bit. *Described*: described and planned from the option's own command line.
"""


def _table(heads: list[str], rows) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def _option(name: str) -> str:
    return f"`{flag(name)}`"


def _models() -> list[str]:
    rows = [
        ["GPT, all releases below", "trained", "zero stages 1, 2, 3; " + ", ".join(sorted(cases.MODELS))],
        ["pipelines", "trained", ", ".join(cases.LAYOUTS)],
        ["experts (`--num-experts`)", "trained", "also measured and planned: [experts](adopting.md#experts)"],
        ["multi-token prediction (`--mtp-num-layers`)", "trained", "whole gradients have to stay on the device"],
        ["norms on queries and keys (`--qk-layernorm`)", "trained", "bf16-tied"],
        ["hybrid Mamba (`--entry pretrain_mamba.py`)", "described", "training needs `mamba-ssm`, which needs a GPU"],
        ["your own script (`--entry`)", "trained", "it must build a model whose layers are `decoder.layers`"],
        ["Megatron-Bridge, NeMo", "refused", "training has to read its options with `megatron.training`"],
        ["T5", "refused", "messages between stages carry two tensors"],
        ["BERT, vision", "refused", "layers outside of one decoder"],
        ["multimodal", "refused", "layers in two models"],
    ]
    return _table(["model", "state", "about"], rows)


def _refused() -> list[str]:
    rows = [[_option(name), refusals.REASONS[name]] for name in sorted(refusals.NEUTRAL)]
    why = f"with gradients that come and go: {whole_gradients.REASON}"
    rows += [[_option(name), why] for name in whole_gradients.OPTIONS]
    return _table(["option", "why not"], rows)


STATES = {"": "described and planned"}


def _link(script: public_scripts.Script) -> str:
    return f"[{script.path.partition('/')[2]}](https://github.com/{script.project}/blob/HEAD/{script.path})"


def _scripts() -> list[str]:
    rows = []
    for script in public_scripts.SCRIPTS:
        lacking = script.refused
        rows.append(
            [
                script.project,
                _link(script),
                f"*{script.entry.rpartition('/')[2]}*" if script.entry else "",
                STATES.get(lacking, f"refused: {lacking}"),
                "its two options" if script.adds else "",
            ]
        )
    return _table(["project", "script", "`--entry`", "state", "to add"], rows)


def _functional_tests() -> list[str]:
    rows = []
    for one in functional_tests.COUNTED:
        options = {f"--{why.partition('--')[2]}": len(names) for why, names in one.refused.items()}
        refused = ", ".join(f"`{option}` {number}" for option, number in sorted(options.items()))
        rows.append([one.release, str(one.tests), f"{one.described} ({one.described / one.tests:.0%})", refused])
    return _table(["release", "tests", "described", "refused"], rows)


def page() -> str:
    """The page's text."""
    ready = sum(not script.refused for script in public_scripts.SCRIPTS)
    releases = [release.ref for release in manifest().releases]
    trained = [
        [name, case[0], f"`{case[1]}`".replace("|", "\\|") if case[1] else "", str(case[2])]
        for name, case in default_arguments.CASES.items()
    ]
    lines = [
        HEADER,
        "## Releases\n",
        f"Patches are for {len(releases)} releases from {releases[0]} to {releases[-1]}; other trees are "
        "patched\nby their syntax tree. `patches/TESTED.md` says which were trained.\n",
        "## Models\n",
        *_models(),
        "## Trained on real checkouts with default arguments\n",
        "`tests/nightly` trains these on four processes, with a stand-in for Transformer Engine.\n",
        *_table(["case", "release", "options", "zero stage"], trained),
        "## Options that are accepted\n",
        *_table(["option", "about"], [[f"`{name}`", about] for name, about in ACCEPTED.items()]),
        "## Options that are refused\n",
        *_refused(),
        "## Public scripts\n",
        f"The options of these scripts at tiny sizes, read by the parser of megatron-core 0.17.1: {ready} of "
        f"{len(public_scripts.SCRIPTS)} are\ndescribed and planned. Options that only a fork's parser knows are left "
        "out. If a fork has its own script, the\ncheckout's `pretrain_gpt.py` builds the model. A schedule needs "
        "`--use-distributed-optimizer` and\n`--overlap-param-gather`; *to add* marks scripts without these two.\n",
        *_scripts(),
        "## Megatron's functional tests\n",
        "All tests that set `--use-distributed-optimizer` and `--overlap-param-gather`, at their own sizes, without\n"
        "their data, tokenizer and paths (`tests/nightly/megatron/test_functional_tests.py`).\n"
        "`--export-te-mcore-model` is an option of the package `nvidia-modelopt`.\n",
        *_functional_tests(),
    ]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
