"""Plans: their names, what each rank holds, the same numbers as the cost model, and a reason for what cannot be."""
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel_cases import small_nano

from gptoss_lab.config import preset
from gptoss_lab.cost import plan as cost
from gptoss_lab.cost.memory import weight_bytes_per_gpu
from gptoss_lab.cost.precision import FP8_EXPERTS
from gptoss_lab.parallel import Plan, PlanError, place_of, refused_plans, share_of, shares, valid_plans
from gptoss_lab.parallel.cuts import aligned_ranges, even_ranges
from gptoss_lab.parallel.plan import check, obstacle
from gptoss_lab.parallel.traffic import read_bytes, read_bytes_by_role

BIG, SMALL, NANO = preset("gpt-oss-120b"), preset("gpt-oss-20b"), preset("nano")
WORLDS = (1, 2, 4, 8)


@pytest.mark.parametrize(("ways", "lengths"), [
    (1, [2880]), (2, [1408, 1472]), (4, [768, 768, 768, 576]), (8, [384] * 7 + [192]),
])
def test_slices_of_2880(ways, lengths):
    assert [len(r) for r in aligned_ranges(2880, ways)] == lengths


def test_slices_of_a_short_axis_may_be_empty():
    assert [len(r) for r in aligned_ranges(288, 8)] == [128, 128, 32, 0, 0, 0, 0, 0]


@given(st.integers(1, 6000), st.integers(1, 9))
def test_slices_tile_and_start_at_multiples(length, ways):
    ranges = aligned_ranges(length, ways)
    assert [i for r in ranges for i in (r.start, r.stop)][1:-1:2] == [r.start for r in ranges][1:]
    assert ranges[0].start == 0 and ranges[-1].stop == length and sum(map(len, ranges)) == length
    assert all(r.start % 128 == 0 or not len(r) for r in ranges)
    assert max(map(len, ranges)) == cost.largest_slice(length, ways)
    pieces = even_ranges(length, ways)
    assert sum(map(len, pieces)) == length and max(map(len, pieces)) - min(map(len, pieces)) <= 1


@pytest.mark.parametrize("config", [BIG, SMALL, NANO], ids=lambda c: c.name)
@pytest.mark.parametrize("world", WORLDS)
def test_same_plans_and_shares_as_the_cost_model(config, world):
    plans = valid_plans(config, world)
    assert [str(p) for p in plans] == [str(p) for p in cost.all_plans(world)]
    for plan in plans:
        held, expected = shares(config, plan), cost.shares(config, cost.Plan(plan.ep, plan.dp, plan.tp))
        assert max(len(s.heads) for s in held) == expected.heads
        assert max(len(s.kv_heads) for s in held) == expected.kv_heads
        assert max(len(s.experts) for s in held) == expected.experts
        assert max(len(s.expert_rows) for s in held) == expected.expert_rows
        assert max(len(s.vocabulary) for s in held) == expected.vocab_rows


@pytest.mark.parametrize("world", WORLDS)
def test_bytes_as_the_cost_model(world):
    """Its fullest GPU is the fullest rank here, biases that another rank adds included (they are held as zeros)."""
    for plan in valid_plans(BIG, world):
        held = []
        for share in shares(BIG, plan):
            zeros = 0 if share.output_bias else BIG.num_layers * 2 * BIG.hidden_size
            zeros += 0 if share.down_bias else BIG.num_layers * 2 * BIG.hidden_size * len(share.experts)
            held.append(read_bytes(BIG, share, "fp8") + zeros)
        assert max(held) == weight_bytes_per_gpu(BIG, FP8_EXPERTS, cost.Plan(plan.ep, plan.dp, plan.tp)), str(plan)


def test_one_rank_reads_the_checkpoint():
    """The sum of the tensors that spec and manifest give: FP8 experts with scales, the rest as released."""
    assert read_bytes(BIG, share_of(BIG, Plan(), 0), "hf") == 65_248_815_744
    assert read_bytes(SMALL, share_of(SMALL, Plan(), 0), "hf") == 13_761_264_768
    assert sum(read_bytes_by_role(BIG, share_of(BIG, Plan(), 0), "hf").values()) == 65_248_815_744


def test_who_holds_what():
    """EP4 DP1 TP4 of the 120B: a quarter of heads, experts and vocabulary each, experts whole."""
    for rank, share in enumerate(shares(BIG, Plan(4, 1, 4))):
        assert share.heads == range(16 * rank, 16 * rank + 16) and share.kv_heads == range(2 * rank, 2 * rank + 2)
        assert share.experts == range(32 * rank, 32 * rank + 32) and share.expert_rows == range(2880)
        assert share.vocabulary == range(50272 * rank, 50272 * rank + 50272)


def test_sixteen_ranks_replicate_key_heads():
    """TP16 on 8 key/value heads: two ranks hold the same head, and every query head lies with the one it reads."""
    for share in shares(BIG, Plan(1, 1, 16)):
        assert len(share.kv_heads) == 1
        assert {h // BIG.queries_per_kv for h in share.heads} == set(share.kv_heads)


@pytest.mark.parametrize("world", WORLDS)
def test_everything_is_held_and_biases_once(world):
    config = small_nano()
    for plan in (*valid_plans(config, world), *valid_plans(config, world, sequence_split=True)):
        held = shares(config, plan)
        for group in range(plan.dp):
            own = held[group * plan.tp : (group + 1) * plan.tp]
            copies = plan.tp // plan.head_ways
            assert sorted(h for s in own for h in s.heads) == sorted(copies * list(range(config.num_heads)))
            assert sorted(v for s in own for v in s.vocabulary) == list(range(config.vocab_size))
            assert sum(s.output_bias for s in own) == copies
        cells = [(e, i) for s in held for e in s.experts for i in s.expert_rows]
        assert len(cells) == len(set(cells)) == config.num_experts * config.intermediate_size
        biased = [e for s in held if s.down_bias for e in s.experts]
        assert sorted(biased) == list(range(config.num_experts))


def test_expert_ranges_are_never_empty_or_swapped():
    """P10: 32 experts over two ranks are [0, 16) and [16, 32)."""
    assert [s.experts for s in shares(SMALL, Plan(2, 1, 2))] == [range(0, 16), range(16, 32)]


def test_data_parallel_size_is_not_folded_into_tensor_parallel():
    """P10: with DP2 each replica of the attention is whole, and with whole experts so is each expert's 2880."""
    for share in shares(SMALL, Plan(2, 2, 1)):
        assert len(share.heads) == 64 and len(share.vocabulary) == SMALL.vocab_size
        assert share.expert_rows == range(2880)


def test_uneven_experts():
    config = small_nano(num_experts=5, experts_per_token=3)
    assert [len(s.experts) for s in shares(config, Plan(4, 1, 4))] == [2, 1, 1, 1]


def test_names_go_both_ways():
    for text in ("EP4 DP1 TP4", "EP1 DP2 TP2", "EP8 DP1 TP8 SP"):
        assert str(Plan.parse(text)) == text
    assert Plan.parse("ep2dp1tp2sp") == Plan(2, 1, 2, True)


@pytest.mark.parametrize("text", ["", "EP4", "EP4 DP1 TP4 XX", "TP4 EP4 DP1", "EP-1 DP1 TP1", "EPx DP1 TP1"])
def test_no_such_name(text):
    with pytest.raises(PlanError, match="a name such as EP4 DP1 TP4"):
        Plan.parse(text)


@pytest.mark.parametrize(("values", "message"), [
    ((3, 1, 4), "ep 3 does not divide the 4 ranks of dp 1 x tp 4"),
    ((0, 1, 1), "ep is 0"), ((1, 1.0, 1), "dp is 1.0"), ((1, 1, True), "tp is True"), ((1, 1, -2), "tp is -2"),
    ((1, 2, 1, True), "SP splits tokens over the tp ranks"),
])
def test_plans_that_cannot_exist(values, message):
    with pytest.raises(PlanError, match=message):
        Plan(*values)


@pytest.mark.parametrize(("plan", "message"), [
    (Plan(1, 1, 3), "tp 3 does not divide the 8 query heads"),
    (Plan(1, 1, 16), "tp 16 does not divide the 8 query heads"),
    (Plan(32, 32, 1), "ep 32 exceeds the 16 experts"),
])
def test_plans_that_cannot_cut_this_model(plan, message):
    with pytest.raises(PlanError, match=message):
        check(NANO, plan)
    with pytest.raises(PlanError, match=message):
        share_of(NANO, plan, 0)


def test_heads_that_no_rank_could_read():
    config = small_nano(num_heads=6, num_kv_heads=2)
    assert "neither divides the other" in obstacle(config, Plan(1, 1, 3))
    assert obstacle(config, Plan(1, 1, 3, sequence_split=True)) is None       # all heads are everywhere then


@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_is_valid_or_refused(world):
    names = {f"EP{ep} DP{dp} TP{world // dp}" for ep in range(1, world + 1) for dp in range(1, world + 1)
             if world % dp == 0}
    refused = refused_plans(BIG, world)
    assert names == {str(p) for p in valid_plans(BIG, world)} | set(refused)
    assert all(len(reason.splitlines()) == 1 for reason in refused.values())
    assert len(valid_plans(BIG, world)) == {1: 1, 2: 4, 4: 9, 8: 16}[world]


def test_places():
    assert [place_of(Plan(2, 2, 2), r) for r in range(4)] == [
        place_of(Plan(2, 2, 2), 0).__class__(dp, tp, ep, part)
        for dp, tp, ep, part in ((0, 0, 0, 0), (0, 1, 0, 1), (1, 0, 1, 0), (1, 1, 1, 1))]
    with pytest.raises(PlanError, match="rank 4 is not one of the 4 ranks"):
        place_of(Plan(2, 2, 2), 4)
