"""A run that was saved and loaded goes on to the last bit as if it had never stopped."""

import json

import pytest
from cases import MODELS
from draw_schedule import hosted
from variations import some

DROPOUT = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")  # drawn from the states that a checkpoint keeps


@pytest.mark.parametrize(
    ("name", "zero_stage", "more"),
    some(
        [
            ("bf16-offload", 3, DROPOUT),
            ("fp32", 3, DROPOUT),
            ("bf16-tied", 1, ()),
            ("fp16", 3, ()),
            ("bf16-tied", 3, ()),
        ],
        1,
    ),
)
def test_a_loaded_checkpoint_goes_on_like_the_run_that_saved_it(services, workloads, tmp_path, name, zero_stage, more):
    hosted(workloads["interleaved", name], zero_stage, tmp_path / "s.json")

    def train(iterations: int, *options) -> dict:
        case = dict(
            options=[*MODELS[name], *more, *options],
            schedule=tmp_path / "s.json",
            iterations=iterations,
            reference=False,
        )
        return services("interleaved").run(**case, environment={"MEGATRON_EXT_DEBUG": "1"})["scheduled"]

    whole = train(6)
    first = train(3, "--save", str(tmp_path / "c"), "--save-interval", "2")
    second = train(6, "--load", str(tmp_path / "c"))
    assert json.dumps(whole["loss"]) == json.dumps(first["loss"] + second["loss"])
    assert whole["parameter_sha256"] == second["parameter_sha256"]
