"""What a chunk keeps by the ways to recompute, by hand."""

from parallel_sizes import sized

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload

SHAPE = GptShape(8, 1024, 4096, 16, 16, 1024, 64, tied=False)
BETWEEN = 2 * 512 * 1024
PLAIN = MicroBatch(512)
PARALLEL = sized(pp=2, microbatches=2)


def chunk(batch: MicroBatch):
    return gpt_workload(SHAPE, PARALLEL, batch).chunk(1, 0)  # four layers and the output layer


def without_angles(found) -> tuple[int, ...]:
    first, *others = found.activation_bytes[:4]
    return first - 4 * 512 * 64, *others


def test_bytes():
    whole = chunk(PLAIN).activation_bytes[0]
    # What is made anew of a layer is all that it saves but its input, which is kept; angles of 64 channels in 32 bits
    # are kept once.
    every = chunk(PLAIN._replace(recompute="full"))
    kept, angles = (BETWEEN,) * 4, 4 * 512 * 64
    assert without_angles(every) == kept and every.activation_bytes[0] == BETWEEN + angles
    assert every.recompute_bytes == whole - BETWEEN
    block = chunk(PLAIN._replace(recompute="full", recompute_method="block", recompute_num_layers=1))
    assert without_angles(block) == (BETWEEN, whole, whole, whole) and block.recompute_bytes == whole - BETWEEN
    together = chunk(PLAIN._replace(recompute="full", recompute_num_layers=2))
    assert without_angles(together) == (BETWEEN, 0, BETWEEN, 0) and together.recompute_bytes == 2 * whole - BETWEEN
    assert {each.activation_bytes[4] for each in (every, block, together)} == {chunk(PLAIN).activation_bytes[4]}


def test_times():
    """Of four layers one forward more, or three, or one."""
    sheet = hardware_sheet.load("h100-nvlink")

    def us(batch: MicroBatch) -> tuple[float, float]:
        rows = estimate(sheet, gpt_workload(SHAPE, PARALLEL, batch), batch).compute
        (row,) = [row for row in rows if row.pp_rank == 1 and row.layer_kind is None]
        return row.forward_us, row.backward_us

    forward, backward = us(PLAIN)
    full = us(PLAIN._replace(recompute="full"))[1] - backward
    assert full > 0 and us(PLAIN._replace(recompute="full"))[0] == forward
    for count in (1, 3):
        batch = PLAIN._replace(recompute="full", recompute_method="block", recompute_num_layers=count)
        assert abs(us(batch)[1] - backward - full * count / 4) < 1e-6 * backward


def test_dropout_keeps_masks_of_one_byte_an_element():
    """Behind the embedding, and in a layer behind attention and the MLP; a rank of sequence parallelism its part."""
    elements = 512 * 1024
    dropped = gpt_workload(SHAPE, PARALLEL, PLAIN._replace(hidden_dropout=True))
    plain = gpt_workload(SHAPE, PARALLEL, PLAIN)
    more = [a - b for a, b in zip(dropped.chunk(0, 0).activation_bytes, plain.chunk(0, 0).activation_bytes)]
    assert more == [elements, *[2 * elements] * 4]
    whole = chunk(PLAIN._replace(recompute="full", hidden_dropout=True))
    assert (
        without_angles(whole)[0] == BETWEEN
        and whole.recompute_bytes == chunk(PLAIN).activation_bytes[0] + 2 * elements - BETWEEN
    )
    part, none = (
        gpt_workload(
            SHAPE, sized(pp=2, microbatches=2, tp=2), PLAIN._replace(hidden_dropout=on, sequence_parallel=True)
        )
        for on in (True, False)
    )
    assert part.chunk(1, 0).activation_bytes[0] - none.chunk(1, 0).activation_bytes[0] == elements


def test_what_attention_keeps_of_queries_keys_and_values():
    """By 512 tokens of two bytes: query, key and value have 1024 columns each, with eight groups of heads 1024 and 512
    twice. Norms and fused attention keep copies; selective recompute keeps its input, of which the value is a part of
    the output of the matrix, which is not freed then."""

    def more_columns(recompute, **shape) -> float:
        changed = SHAPE._replace(**shape)
        plain, other = (
            gpt_workload(shape, PARALLEL, PLAIN._replace(recompute=how)).chunk(1, 0).activation_bytes[0]
            for shape, how in ((changed._replace(qk_norm=False), None), (changed, recompute))
        )
        return (other - plain) / (2 * 512)

    assert more_columns(None, qk_norm=True) == 1024 + 1024
    assert more_columns(None, qk_norm=True, query_groups=8) == 1024 + 512
    # Recompute leaves the sums of a fused kernel's rows to backward: 32 bits for each of 16 heads.
    sums = -2 * 16
    assert more_columns("selective") == 1024 + 1024 + sums
    assert more_columns("selective", positions=512) == sums
    assert more_columns("selective", positions=512, query_groups=8) == 1024 + sums
    assert more_columns("selective", qk_norm=True) == 2 * (1024 + 1024) + sums


def test_scores_that_are_made_anew_lie_beside_what_is_not_freed_by_then():
    """Backward is through the MLP, four times as wide, and the projection, and has freed what both saved: of
    1024 tokens of two bytes 1024 scores in each of 16 heads, less the inputs of three matrices, of a norm and of the
    activation, and the norm's moments."""
    made = chunk(MicroBatch(1024, recompute="selective", score_heads=16)).recompute_bytes
    assert made == 2 * 1024 * (1024 * 16) - (2 * 1024 * (3 * 1024 + 2 * 4096) + 4 * 1024)


def test_the_fused_loss_keeps_gradients_in_place_of_logits():
    """With parameters in 16 bits half of the softmax, which is in 32."""
    fused = chunk(PLAIN._replace(loss_fusion="te")).activation_bytes[4]
    assert chunk(PLAIN).activation_bytes[4] - fused == 512 * (2 * 1024 + 9)
