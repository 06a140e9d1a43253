"""Every plan of 1, 2, 4 and 8 simulated ranks gives the logits of one rank, and no rank does more than its share."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parallel_cases import TINY, TOLERANCE, chosen_experts, distance, load, one_rank, run, small_nano, tokens, work

from gptoss_lab.checkpoint import ensure_nano, synth
from gptoss_lab.checkpoint.compact import read_compact
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.checkpoint.nano import trained_nano
from gptoss_lab.config import ModelConfig
from gptoss_lab.model import load_model
from gptoss_lab.parallel import Plan, share_of, simulate, valid_plans
from gptoss_lab.parallel.traffic import exchanges

CONFIG = small_nano()
SEQUENCES = [tokens(CONFIG, n, seed=n) for n in (37, 5, 1)]      # longer than the window of 16, and two short ones
PLANS = [p for world in (1, 2, 4, 8) for split in (False, True) for p in valid_plans(CONFIG, world, split)]
DIFFERENT_TOKENS = [p for p in PLANS if p.dp > 1 or p.sequence_split]


@pytest.fixture(scope="module")
def expected(small):
    return one_rank(small, SEQUENCES)


@pytest.fixture(scope="module")
def chosen(small):
    return chosen_experts(small, SEQUENCES)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_logits_of_every_plan(small, expected, chosen, plan):
    """fp32 logits of a ragged prefill and two decode steps, in all ranks; experts touched and weights held as planned.

    A test that every rank could pass by computing everything would be none: so each rank's weights must have exactly
    the shapes of its share, and the experts that its layers called are exactly those of its share that were chosen.
    """
    results = simulate(plan.world, work, small, plan, SEQUENCES)
    for rank, found in enumerate(results):
        share = share_of(CONFIG, plan, rank)
        if found["own"]:
            assert distance(found["logits"], expected[:, found["own"]]) <= TOLERANCE
        assert found["touched"] == [layer & set(share.experts) for layer in chosen]
        check_shapes(found["held"], share)
    assert [set().union(*(r["touched"][n] for r in results)) for n in range(CONFIG.num_layers)] == chosen
    # Each choice of each token was computed once per slice of an expert: no more work in all than on one rank.
    steps = sum(len(s) for s in SEQUENCES) + 2 * len(SEQUENCES)
    slices = sum(len(s) > 0 for s in {share_of(CONFIG, plan, r).expert_rows for r in range(plan.world)})
    assert sum(sum(r["rows"]) for r in results) == steps * CONFIG.num_layers * CONFIG.experts_per_token * slices


def check_shapes(held, share):
    """Every parameter of a rank has the shape of its share."""
    heads, kv, d, h = len(share.heads), len(share.kv_heads), CONFIG.head_dim, CONFIG.hidden_size
    e, i = len(share.experts), len(share.expert_rows)
    expected = {
        "embedding.weight": (len(share.vocabulary), h), "unembedding.weight": (len(share.vocabulary), h),
        "layers.1.attention.qkv.weight": ((heads + 2 * kv) * d, h), "layers.1.attention.out.weight": (h, heads * d),
        "layers.1.attention.sinks": (heads,), "layers.1.moe.gate_up.values": (e, 2 * i, h),
        "layers.1.moe.gate_up.bias": (e, 2 * i), "layers.1.moe.down.values": (e, h, i),
        "layers.1.moe.down.bias": (e, h), "layers.1.moe.router.weight": (CONFIG.num_experts, h),
    }
    assert {name: tuple(held[name]) for name in expected} == expected


@pytest.mark.parametrize("plan", DIFFERENT_TOKENS, ids=str)
def test_logits_with_routed_dispatch(small, expected, chosen, plan):
    results = simulate(plan.world, all_to_all, small, plan)
    for rank, found in enumerate(results):
        if found["own"]:
            assert distance(found["logits"], expected[:, found["own"]]) <= TOLERANCE
        assert found["touched"] == [layer & set(share_of(CONFIG, plan, rank).experts) for layer in chosen]


def all_to_all(ranks, path, plan):
    return work(ranks, path, plan, SEQUENCES, dispatch="all_to_all")


@pytest.mark.parametrize("plan", [Plan(1, 1, 4), Plan(2, 2, 2), Plan(4, 1, 4), Plan(2, 1, 4, True)], ids=str)
def test_nano_itself(plan):
    """The checkpoint of the notebooks, its whole vocabulary of 201,088. Most ids share one row there, so that a row
    read at a wrong place would not show: the sequences are of those with rows of their own."""
    path = ensure_nano()
    config = ModelConfig.load(path)
    _, own, _ = read_compact(trained_nano())
    drawn = replace(config, vocab_size=len(own))
    sequences = [own.long()[tokens(drawn, count, seed=count)] for count in (140, 3)]      # past the window of 128
    expected = one_rank(path, sequences)
    for found in simulate(plan.world, work, path, plan, sequences):
        assert distance(found["logits"], expected[:, found["own"]]) <= TOLERANCE


@pytest.mark.parametrize("plan", [Plan(1, 1, 2), Plan(2, 1, 2), Plan(2, 2, 2), Plan(8, 2, 4), Plan(8, 1, 8)], ids=str)
@pytest.mark.parametrize("layout", ["hf", "original"])
def test_tiny_fixture(plan, layout):
    """24 query heads on 4, hidden 128, experts of 96: other ratios, and both layouts of the released form."""
    sequences = [tokens(ModelConfig.load(TINY / "hf"), n, seed=n) for n in (29, 8)]
    expected = one_rank(TINY / layout, sequences)
    for found in simulate(plan.world, work, TINY / layout, plan, sequences):
        if found["own"]:
            assert distance(found["logits"], expected[:, found["own"]]) <= TOLERANCE


@pytest.fixture(scope="module")
def fp8_folder(tmp_path_factory):
    """Experts of 320, FP8, with the attention in FP8 too, so that heads are cut inside blocks."""
    root = tmp_path_factory.mktemp("fp8")
    synth(small_nano(intermediate_size=320, num_layers=2), root / "hf")
    convert(root / "hf", root / "fp8", to="fp8", attention_fp8=True)
    return root / "fp8"


@pytest.mark.parametrize("storage", ["stored", "dense"])
@pytest.mark.parametrize("plan", [Plan(1, 1, 2), Plan(2, 1, 4), Plan(1, 1, 8)], ids=str)
def test_fp8_experts_cut_at_blocks(fp8_folder, plan, storage):
    expected = one_rank(fp8_folder, SEQUENCES, expert_storage=storage)
    for found in simulate(plan.world, stored, fp8_folder, plan, storage):
        assert distance(found["logits"], expected) <= TOLERANCE


def stored(ranks, path, plan, storage):
    return work(ranks, path, plan, SEQUENCES, expert_storage=storage)


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(1, 1, 4, True), Plan(2, 2, 2, True)], ids=str)
def test_prompts_read_in_chunks(small, expected, plan):
    """Chunks of 11 and 9 and the rest: the caches of every rank are complete after each."""
    for found in simulate(plan.world, in_chunks, small, plan):
        if found[0]:
            assert distance(found[1][-3:], expected[:, found[0]]) <= TOLERANCE


def in_chunks(ranks, path, plan):
    own = [n for n in (0,) if n % plan.dp == ranks.rank // plan.tp]
    model = load(path, ranks, plan)
    if own:
        return own, run(model, [SEQUENCES[0]], chunks=(11, 20))
    with torch.inference_mode():
        for _ in range(5):
            model(torch.empty(0, dtype=torch.int64), [], [])
    return own, None


@pytest.mark.parametrize("plan", [p for p in PLANS if p.world in (2, 4)], ids=str)
def test_bytes_that_travel(small, plan):
    """What the groups counted in one prefill is what the plan says, per token; the halo stays under its bound."""
    length = 64 * plan.dp
    sequences = [tokens(CONFIG, length, seed=n) for n in range(plan.dp)]
    results = simulate(plan.world, prefill_traffic, small, plan, sequences)
    received: dict[str, float] = {}
    for traffic in results:
        for name, size in traffic.items():
            received[name] = received.get(name, 0) + size / plan.world
    for name in received.keys() | {e.name for e in exchanges(CONFIG, plan)}:
        if name in ("rows of the step", "last rows"):
            continue
        planned = sum(e.step_bytes for e in exchanges(CONFIG, plan, value_bytes=4) if e.name == name) * length
        halo = sum(e.times * e.sequence_bytes for e in exchanges(CONFIG, plan, value_bytes=4) if e.name == name)
        if halo:
            assert planned < received[name] <= planned + halo
        else:
            assert received[name] == pytest.approx(planned, rel=1e-9), name


def prefill_traffic(ranks, path, plan, sequences):
    model = load(path, ranks, plan, full_logits=False)
    groups = model.ranks.groups
    with torch.inference_mode():
        model(sequences[groups.place.dp], caches=[model.new_cache()])
    found: dict[str, float] = {}
    for group in {id(g): g for g in (groups.tensor, groups.data, groups.world)}.values():
        for name, size in group.traffic.received.items():
            found[name] = found.get(name, 0) + size
    return found


def test_no_exchange_inside_one_rank(small):
    found = simulate(1, work, small, Plan(), SEQUENCES)[0]
    assert all(not calls for calls, _ in found["traffic"].values())


def test_tp_only_dispatch_moves_nothing(small):
    """The scheme of the post: with inputs on all ranks there is no dispatch, and combine is one all-reduce a layer."""
    for found in simulate(4, work, small, Plan(4, 1, 4), SEQUENCES):
        calls = found["traffic"]["tensor"][0]
        assert "dispatch" not in calls and calls["combine"] == 3 * CONFIG.num_layers


def test_routed_dispatch_moves_fewer_bytes(small):
    """All-to-all sends a token only where one of its experts is: with 16 experts over 8 ranks and top 4 not to all."""
    plan = Plan(8, 8, 1)
    sequences = [tokens(CONFIG, 20, seed=n) for n in range(8)]
    gathered = simulate(8, work, small, plan, sequences)
    routed = simulate(8, routed_work, small, plan, sequences)
    size = [sum(r["traffic"]["data"][1]["dispatch"] for r in results) for results in (gathered, routed)]
    assert size[1] < 0.75 * size[0]


def routed_work(ranks, path, plan, sequences):
    return work(ranks, path, plan, sequences, dispatch="all_to_all")


def test_a_sink_of_one_head_reaches_one_rank(small):
    """Changing sink 5 changes the logits exactly as on one rank, under TP8 where rank 5 alone holds it."""
    def change(model, share):
        if 5 in share.heads:
            model.layers[0].attention.sinks[5 - share.heads.start] += 3

    def changed(ranks):
        model = load(small, ranks, Plan(1, 1, 8))
        change(model, model.share)
        return run(model, SEQUENCES)

    alone = load_model(small, dtype=torch.float32)
    before = run(alone, SEQUENCES)
    change(alone, alone.share)
    after = run(alone, SEQUENCES)
    assert distance(after, before) > 1e-3
    for found in simulate(8, changed):
        assert distance(found, after) <= TOLERANCE


def test_a_share_without_collectives_is_refused(small):
    with pytest.raises(ValueError, match="needs the collectives of its plan"):
        load_model(small, share=share_of(CONFIG, Plan(1, 1, 2), 0))


def test_an_empty_step_needs_other_ranks(small):
    with pytest.raises(ValueError, match="each must be at least 1"):
        load_model(small)(torch.empty(0, dtype=torch.int64), [])


def test_unknown_dispatch(small):
    with pytest.raises(Exception, match="dispatch is 'ring'"):
        simulate(2, lambda ranks: load(small, ranks, Plan(1, 2, 1), dispatch="ring"))


