"""`fit` on a laptop: what it prints, one-line refusals, and what would fit where nothing does."""

import json
import sys

import pytest

from megatron_ext.cli.main import main

MODEL = """--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --bf16""".split()
BATCH = "--micro-batch-size 1 --global-batch-size 32".split()
PADDED = "--num-experts 8 --moe-pad-expert-input-to-capacity".split()


@pytest.fixture
def without_torch():
    """The package imported anew, where neither torch nor Megatron can be imported."""
    ours = {name: sys.modules[name] for name in list(sys.modules) if name.partition(".")[0] == "megatron_ext"}
    hidden = {
        name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("torch", "megatron")
    }
    for name in ours:
        del sys.modules[name]
    sys.modules["torch"] = sys.modules["megatron"] = None  # type: ignore[assignment]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("megatron_ext", "torch", "megatron")]:
        del sys.modules[name]
    sys.modules.update(ours | hidden)


def test_verbs_that_need_torch_say_so(without_torch, capsys, tmp_path):
    from megatron_ext.cli.main import main as command

    out = ["--out", str(tmp_path / "out.json")]
    for words in (["doctor"], ["describe", "--num-layers", "2"], ["measure", "--data-parallel-size", "2"]):
        assert command([*words[:1], *out, *words[1:]]) == 2
        (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megatron-ext: ")]
        assert "there is no package torch " in said


def test_the_command_on_a_laptop(without_torch, capsys, tmp_path):
    from megatron_ext.cli.main import main as command

    picture, out = tmp_path / "fit.png", tmp_path / "out"
    asked = ["fit", "--hardware", "l40s", "--fix", "recompute,zero-stage", "--picture", str(picture), "--out", str(out)]
    words = ["--json", "--", *MODEL, *BATCH, "--fp8-format", "hybrid"]
    assert command([*asked, *words]) == 0
    said, text = capsys.readouterr()
    assert text.startswith("fit: not counted: fp8 copies of weights") and "times are those of 16 bits" in text
    found = json.loads(said)
    (winner, *fewer) = found["frontier"]
    assert found["estimated"] and winner["options"]["--zero-stage"] == "1"
    assert winner["iteration_time_low_us"] <= winner["iteration_time_us"] <= winner["iteration_time_high_us"]
    assert winner["tokens_per_s"] == pytest.approx(32 * 2048 / winner["iteration_time_us"] * 1e6)
    assert winner["distance_to_bound"] >= 0 and winner["iteration_time_us"] >= found["lower_bound_us"]
    held = [winner["device_bytes"], *(each["device_bytes"] for each in fewer)]
    times = [winner["iteration_time_us"], *(each["iteration_time_us"] for each in fewer)]
    assert held == sorted(held, reverse=True) and times == sorted(times)
    # What `advise` answered: whether the plan of the given settings helps.
    given = found["given"]
    assert given["gain_low"] <= given["gain"] <= given["gain_high"]
    assert given["answer"] in ("helps", "does not help", "cannot tell") and f"; {given['answer']}: gain" in text
    assert "ESTIMATED from a data sheet" in text and found["launch"]["add"] in text
    fastest, host, add, last = text.splitlines()[-4:]
    assert fastest.startswith("fastest: ") and host.endswith(" GiB per node") and add.startswith("add: ")
    assert last == f"verdict: {found['verdict']}" and found["verdict"].startswith(found["answer"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    by_schedule = "by a plan" in fastest.partition(";")[0]
    assert add.endswith(f" --user-defined-schedule {out / 'schedule.json'}") is by_schedule
    # The files that it wrote are what the last command plans.
    files = [str(out / f"{name}.json") for name in ("cost_table", "workload", "schedule")]
    command(["simulate", "--cost-table", files[0], "--workload", files[1], "--schedule", files[2], "--json"])
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["iteration_time_us"] == pytest.approx(winner["iteration_time_us"], rel=0.01)


def test_a_directory_that_cannot_be_made_is_refused_in_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    out = str(tmp_path / "file" / "out")
    assert main(["fit", "--hardware", "l40s", "--out", out, "--", *MODEL, *BATCH]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out = '" in line and "expected a directory: Not a directory" in line


def test_advise_judges_the_settings_as_given(capsys):
    words = ["--hardware", "l40s", "--json", "--", *MODEL, *BATCH]
    said = []
    for verb in (["advise"], ["fit", "--fix", "all"]):
        assert main([*verb, *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and len(json.loads(said[0])["frontier"]) == 1


def test_other_settings_that_are_as_fast_without_a_plan_are_in_the_verdict(capsys):
    """The plan steps all groups on the device, which stock Megatron does without the option."""
    wide = "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --optimizer-cpu-offload".split()
    assert main(["advise", "--hardware", "h200-nvlink", "--", *MODEL, *BATCH, *wide]) == 0
    *_, add, take_out, said = capsys.readouterr().out.splitlines()
    assert said.startswith("verdict: helps.") and "without a plan other settings are as fast: " in said
    assert "--optimizer-cpu-offload" in take_out and "schedule" not in add


def test_estimated_times_have_their_legend_also_where_the_fastest_is_planned(capsys):
    small = (
        "--num-layers 4 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --bf16 --optimizer-cpu-offload"
    )
    small += " --micro-batch-size 2 --global-batch-size 8 --zero-stage 3 --limit-device-bytes 6000000000"
    assert (
        main(["advise", "--hardware", "h200-one-gpu", "--limit-host-bytes", "108000000000", "--", *small.split()]) == 0
    )
    rows = capsys.readouterr().out.partition("settings\n")[2].splitlines()
    assert rows[0].startswith("*") and "~" not in rows[0] and " ~" in rows[1]
    assert any(row.startswith("~: estimated by quick plans") for row in rows)


def test_a_fused_loss_is_counted_and_stays_in_the_commands(capsys):
    """An option that was ignored does not: `describe` would refuse it."""
    times = []
    for words in (["--of-a-fork", "3"], ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]):
        assert main(["advise", "--hardware", "l40s", "--json", "--", *MODEL, *BATCH, *words]) == 0
        said, text = capsys.readouterr()
        times.append(json.loads(said)["frontier"][0]["iteration_time_us"])
        assert "advise: not given, taken to be: --" in text and "fit: not" not in text
        assert ("ignored: --of-a-fork" in text) == (len(words) == 2)
        (array,) = [line for line in text.splitlines() if "ARGS=(" in line]  # once, for both commands
        assert "of-a-fork" not in array and "32 3" not in array
        assert ("--cross-entropy-fusion-impl te" in array) == (len(words) > 2) and text.count("${ARGS[@]}") == 2
    # Without it 2 microseconds more a token: 42 bytes a logit of 32,000 at 864 GB/s, of which 80 % are reached.
    saved = (54 - 12) * 32000 * 32 * 2048 / (864e3 * 0.8) / 8
    assert times[0] - times[1] == pytest.approx(saved, rel=0.02)


def refused(capsys, *arguments: str) -> str:
    assert main(["fit", *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--hardware", "h1000"], "hardware = 'h1000': is neither a file nor a known machine; known: a100-nvlink"),
        ([], "--hardware: or --cost-table is needed"),
        (["--hardware", "l40s"], "--num-layers: is needed, after --"),
        (["--hardware", "l40s", "--", *MODEL], "--global-batch-size: is needed, after --"),
        (
            ["--hardware", "h100-nvlink", "--nodes", "2", "--", *MODEL, *BATCH],
            "one node, 8 x H100 SXM, NVLink has no network",
        ),
        (["--hardware", "l40s", "--picture", "/proc/nowhere/a.png"], "/proc/nowhere/a.png: cannot be written"),
        (
            ["--hardware", "l40s", "--", *MODEL, *BATCH, "--hiden-size", "8"],
            "'--hiden-size': is not an option that fit knows; did",
        ),
        (
            ["--hardware", "l40s", "--", *MODEL, *BATCH, "--tensor-model-parallel-size", "3"],
            "--tensor-model-parallel-size = 3",
        ),
        (
            ["--hardware", "l40s", "--", *MODEL, *BATCH, "--data-parallel-size", "4"],
            "nodes = 1: gives 8 GPUs; the parallel sizes need 4",
        ),
        (
            ["--hardware", "l40s", "--gpus", "6", "--", *MODEL, *BATCH, "--tensor-model-parallel-size", "4"],
            "--gpus = 6: gives 6 GPUs; the parallel sizes need",
        ),
        (
            ["--hardware", "l40s", "--", *MODEL[:-3], *MODEL[-2:], *BATCH, "--num-experts", "8"],
            "--num-experts = 8: it is not known what experts with biases (without --disable-bias-linear) save; use `",
        ),
        (
            ["--hardware", "l40s", "--", *MODEL, *BATCH, "--num-experts", "8", "--no-bias-swiglu-fusion"],
            "--no-bias-swiglu-fusion: it is not known what experts whose activation is not fused save; use",
        ),
        (
            ["--hardware", "l40s", "--", *MODEL, *BATCH, *PADDED, "--moe-expert-capacity-factor", "1.5"],
            "--moe-expert-capacity-factor = 1.5: it is not known what experts that are padded save; use `describ",
        ),
        (["--hardware", "l40s", "--nodes", "0"], "--nodes"),
        (["--hardware", "h100-rdma", "--nodes", "4", "--gpus", "8", "--", *MODEL, *BATCH], "give it or --nodes"),
        (
            ["--hardware", "l40s", "--fix", "zero", "--", *MODEL],
            "--fix = 'zero': is not a setting; known: all, zero-stage",
        ),
        (
            ["--hardware", "l40s", "--fix", "all", "--search-layout", "--", *MODEL, *BATCH],
            "--search-layout: all parallel sizes are fixed by --fix",
        ),
        (
            ["--hardware", "l40s", "--", *MODEL, "--global-batch-size", "12"],
            "--global-batch-size = 12: is not a multiple of micro-batch size 1 times data-parallel size 8",
        ),
        (
            ["--hardware", "l40s", "--fix", "micro-batch-size", "--", *MODEL, *BATCH, "--micro-batch-size", "3"],
            "--global-batch-size = 32: is not a multiple of micro-batch size 3 times data-parallel size 8",
        ),
        (
            ["--hardware", "l40s", "--", *MODEL, *BATCH, "--delayed-parameter-update", "5"],
            "--delayed-parameter-update = '5': needs an optimizer that steps on the host",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line(capsys, arguments, message):
    assert message in refused(capsys, *arguments)


def test_a_sheet_without_a_host_is_refused(capsys, tmp_path):
    from megatron_ext.cost.hardware_sheet import FOLDER

    raw = json.loads((FOLDER / "l40s.json").read_text())
    del raw["host"]
    (tmp_path / "sheet.json").write_text(json.dumps(raw))
    assert "host" in refused(capsys, "--hardware", str(tmp_path / "sheet.json"), "--", *MODEL, *BATCH)


def test_a_batch_that_the_given_sizes_do_not_divide_is_searched_for_others(capsys):
    words = ["--", *MODEL, "--micro-batch-size", "3", "--global-batch-size", "32"]
    assert (
        main(["fit", "--hardware", "l40s", "--fix", "recompute,zero-stage,optimizer-cpu-offload", "--json", *words])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    size = found["frontier"][0]["options"]["--micro-batch-size"]
    assert 32 % (8 * int(size)) == 0
    # The script's own size goes.
    assert f"--micro-batch-size {size}" in found["launch"]["add"] and "not a multiple" in found["given"]["refused"]


def test_a_batch_that_only_other_layouts_divide_is_searched_for_them(capsys):
    words = [*MODEL, "--micro-batch-size", "1", "--global-batch-size", "7"]
    fixed = "recompute,zero-stage,optimizer-cpu-offload"
    assert main(["fit", "--hardware", "l40s", "--search-layout", "--fix", fixed, "--json", "--", *words]) == 0
    add = json.loads(capsys.readouterr().out)["launch"]["add"]
    assert "--tensor-model-parallel-size" in add and "--pipeline-model-parallel-size" in add


def test_where_nothing_fits_it_says_what_would(capsys):
    words = [*MODEL, "--num-layers", "24", "--hidden-size", "4096", *BATCH]
    said = refused(capsys, "--hardware", "rtx4090", "--fix", "zero-stage,optimizer-cpu-offload", "--", *words)
    assert "nothing fits" in said and "more on each device" in said and "a GPU with more memory (l40s" in said
    words = [*MODEL, "--num-layers", "96", "--hidden-size", "4096", *BATCH, "--zero-stage", "3"]
    said = refused(capsys, "--hardware", "rtx4090", "--fix", "zero-stage,optimizer-cpu-offload", "--", *words)
    assert said.count("GiB) (") == 0
    said = refused(capsys, "--hardware", "l40s", "--", *MODEL, *BATCH, "--limit-device-bytes", "1000")
    assert "--limit-device-bytes = 1000: nothing fits" in said and "what would fit: --limit-device-bytes " in said


def test_sizes_that_are_not_given_are_said(capsys):
    assert main(["advise", "--hardware", "l40s", "--", "--num-layers", "2", "--global-batch-size", "8"]) == 0
    sizes = "--hidden-size 256, --num-attention-heads 4, --seq-length 128, --micro-batch-size 1, --vocab-size 259"
    assert f"advise: not given, taken to be: {sizes}, --transformer-impl" in capsys.readouterr().err


def test_dropout_is_megatrons_default_where_it_is_not_given(capsys):
    def asked(*more: str) -> tuple[int, str]:
        assert main(["fit", "--hardware", "l40s", "--fix", "all", "--json", "--", *MODEL, *BATCH, *more]) == 0
        said = capsys.readouterr()
        return json.loads(said.out)["frontier"][0]["device_bytes"], said.err

    (default, said), (given, nothing), (without, _) = (
        asked(),
        asked("--hidden-dropout=0.1", "--attention-dropout=0.1"),
        asked("--hidden-dropout", "0"),
    )
    assert default == given > without
    local = ("--transformer-impl", "local")  # whose scores are not fused
    assert asked(*local)[0] == asked(*local, "--attention-dropout=0.1")[0] > asked(*local, "--attention-dropout=0")[0]
    said_so = "fit: not given, taken to be: --transformer-impl transformer_engine"
    assert f"{said_so}, --hidden-dropout 0.1, --attention-dropout 0.1\n" in said and f"{said_so}\n" in nothing
