"""Argument lists of Megatron's own functional tests that set a distributed optimizer and overlapped gathers.

They are read from a clone of Megatron-LM, at a release; nothing of them is kept here but which are refused. Data,
tokenizers and paths are left out; all that decides what is built, who holds it and when it is gathered stays.
"""

import subprocess
from pathlib import Path
from typing import NamedTuple

import yaml
from released import MIRROR

CASES = "tests/functional_tests/test_cases"
NEEDED = ("--use-distributed-optimizer", "--overlap-param-gather")

LEFT_OUT = ("--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--data-path", "--data-cache-path")
DATA = "--mock-data --tokenizer-type NullTokenizer --vocab-size 32000".split()


class FunctionalTest(NamedTuple):
    """One test.

    Attributes:
        name: its folder below ``CASES``.
        options: what its script is given, and ``--data-parallel-size``.
    """

    name: str
    options: list[str]

    def entry(self, tree: Path) -> str:
        """The script that it starts, as ``tests/test_utils/recipes`` says."""
        if self.name.partition("/")[0] not in ("hybrid", "nemotron"):
            return "pretrain_gpt.py"
        return next(name for name in ("pretrain_hybrid.py", "pretrain_mamba.py") if (tree / name).exists())


class Counted(NamedTuple):
    """What ``describe`` says of the tests of a release; tests/nightly counts them anew.

    Attributes:
        release: its name.
        commit: where the tests and the checkout are taken from.
        tests: how many set both options.
        refused: tests that are refused, by how the message begins.
    """

    release: str
    commit: str
    tests: int
    refused: dict[str, tuple[str, ...]]

    @property
    def described(self) -> int:
        return self.tests - sum(map(len, self.refused.values()))


_EP_4 = "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1"
_GRAPHS = (f"{_EP_4}_resume_torch_dist_attn_cudagraph", "moe/gpt3_moe_mcore_te_tp4_ep2_etp2_pp2_scoped_cudagraph")
_FSDP = ("moe/deepseek_proxy_fsdp_ep2_fsdp2", "moe/deepseek_proxy_fsdp_ep2_fsdp2_1node")
_IN_BOTH = {
    "--use-megatron-fsdp": _FSDP,
    "--cuda-graph-impl": _GRAPHS,
    "--overlap-moe-expert-parallel-comm": (f"{_EP_4}_selective_recompute_experimental",),
}
_IN_MAIN = {
    "--use-megatron-fsdp": ("moe/deepseek_proxy_fsdp_ep2_fsdp2_ep_overlap",),
    "--cuda-graph-impl": (f"{_GRAPHS[1]}_1node",),
    "--fp8-param-gather": ("nemotron/nemotron3_super_release_gb200", "nemotron/nemotron3_super_release_gb200_sm"),
    "unrecognized arguments: --export-te-mcore-model": (
        "hybrid/hybrid_nemotron_v3_pico_7b_a1b_tp1_ep8_QAD_dgx_h100_1N8G",
    ),
}
COUNTED = (
    Counted("0.17.1", "266f1c97dca477ca8b92c16087506da2000b0b84", 45, _IN_BOTH),
    Counted(
        "main",
        "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
        59,
        {why: _IN_BOTH.get(why, ()) + _IN_MAIN.get(why, ()) for why in (_IN_BOTH | _IN_MAIN)},
    ),
)


def git(*words: str) -> str:
    """What git says of the mirror."""
    assert MIRROR, "set MEGATRON_MIRROR to a clone of Megatron-LM"
    return subprocess.run(["git", "-C", MIRROR, *words], check=True, capture_output=True, text=True).stdout


def functional_tests(commit: str) -> list[FunctionalTest]:
    """Those that train with both options."""
    found = []
    for file in git("ls-tree", "-r", "--name-only", commit, CASES).split():
        if file.endswith("/model_config.yaml"):
            given = yaml.safe_load(git("show", f"{commit}:{file}")).get("MODEL_ARGS") or {}
            if isinstance(given, dict) and all(given.get(name) for name in NEEDED):
                name = file.removeprefix(f"{CASES}/").removesuffix("/model_config.yaml")
                found.append(FunctionalTest(name, _options(given)))
    return found


def _options(given: dict) -> list[str]:
    """As the script that starts the tests gives them: flags without a value, lists without their brackets."""
    options = []
    for name, value in given.items():
        text = str(value).strip()
        if name in LEFT_OUT or "$" in text or value is False:
            continue
        if value is True or text == "true":
            options.append(name)
        else:
            options += [name, *(text[1:-1].split() if text.startswith("[") and text.endswith("]") else [text])]
    ranks = _data_parallel(given)
    each = ranks * int(given.get("--micro-batch-size", 1))
    batch = -(-int(given.get("--global-batch-size", each)) // each) * each
    sizes = ["--data-parallel-size", str(ranks)]
    if "--step-batch-size-schedule" not in given:  # Megatron takes one of the two
        sizes += ["--global-batch-size", str(batch)]
    return [*options, *DATA, *sizes]


def _data_parallel(given: dict) -> int:
    """The fewest ranks, two or more, with which all expert-parallel ranks are there."""

    def size(name: str) -> int:
        return int(given.get(f"--{name}-parallel-size", 1))

    dense = size("tensor-model") * size("context")
    experts = size("expert-model") * int(given.get("--expert-tensor-parallel-size", size("tensor-model")))
    return next(ranks for ranks in range(2, 2 + 2 * experts) if ranks * dense % experts == 0)
