"""The fast forward over simulated ranks, for every kind of plan: the logits of the plain model that nobody cut.

Window 7, pages of 4 as in test_fast_forward. The sums over ranks are taken the plain way, and once more with a stand-in
for the kernel: the same memory for parts and sums, the same turns, each result by the kernel's reference.
"""
import threading

import pytest
import torch
from random_models import config, distance, random_source, tokens

from gptoss_kernels.comm import all_reduce_norm
from gptoss_lab.checkpoint.stored import Dense
from gptoss_lab.model.fast import FastTransformer, lay_out
from gptoss_lab.model.load import build_model
from gptoss_lab.model.paged import PagePool
from gptoss_lab.parallel import Plan, PlanCollectives, RankError, residual, simulate
from gptoss_lab.parallel import sequence as sequence_module
from gptoss_lab.parallel.rules import region
from gptoss_lab.parallel.simulated import SimulatedGroup
from gptoss_lab.parallel.traffic import exchanges

EXACT = 1e-5
CONFIG = config(num_heads=8, num_kv_heads=4, num_experts=8, intermediate_size=320, max_position_embeddings=4096)
TP = [Plan(1, 1, 1), Plan(1, 1, 2), Plan(2, 1, 2), Plan(4, 1, 4), Plan(2, 1, 4), Plan(8, 1, 8)]
SP = [Plan(1, 1, 2, True), Plan(2, 1, 2, True), Plan(3, 1, 3, True), Plan(4, 1, 4, True)]
DP = [Plan(2, 2, 1), Plan(1, 2, 1), Plan(4, 2, 2), Plan(2, 2, 2), Plan(4, 4, 1)]


class Cut:
    """A source that a share is cut from, whole embedding: what ShardedSource is to a checkpoint, over `Memory`."""

    def __init__(self, source, share):
        self.source, self.config, self.share = source, source.config, share

    def tensor(self, name, device=None):
        whole = self.source.tensors[name]
        if name == "model.embed_tokens.weight":
            return whole
        part = whole[tuple(slice(r.start, r.stop) for r in region(name, whole.shape, self.config, self.share))]
        if name.endswith("o_proj.bias") and not self.share.output_bias:
            return torch.zeros_like(whole)
        if name.endswith("down_proj_bias") and not self.share.down_bias:
            return whole.new_zeros(len(self.share.experts), whole.shape[1])
        return part.contiguous()

    def linear(self, name, device=None):
        return Dense(self.tensor(f"{name}.weight"))

    def experts(self, layer, projection, *, device=None):
        name = f"model.layers.{layer}.mlp.experts.{projection}"
        whole = self.source.experts(layer, projection).dequantise(torch.float32)         # [E, out, in]
        rows, inner = self.share.expert_rows, [slice(None), slice(None)]
        inner[0 if projection == "gate_up_proj" else 1] = (
            slice(2 * rows.start, 2 * rows.stop) if projection == "gate_up_proj" else slice(rows.start, rows.stop))
        assert name.startswith("model.layers")
        return Dense(whole[(slice(self.share.experts.start, self.share.experts.stop), *inner)].contiguous())


@pytest.fixture(scope="module")
def source():
    return random_source(CONFIG)


@pytest.fixture(scope="module")
def plain(source):
    return build_model(source, dtype=torch.float32)


def fast(ranks, source, plan, *, full_logits=True, kv_form="same", projections="dense", draft=0, rings=9, **options):
    """This rank's model; weights know which experts they are."""
    from dataclasses import replace

    collectives = PlanCollectives(CONFIG, ranks.plan_groups(plan), full_logits=full_logits)
    share = collectives.share
    weights = lay_out(Cut(source, share), "cpu", torch.float32, experts="dense", projections=projections)
    weights = replace(weights, layers=tuple(
        replace(layer, moe=replace(layer.moe, first_expert=share.experts.start)) for layer in weights.layers))
    pool = PagePool(CONFIG, pages=120, rings=rings, page_size=4, draft=draft, dtype=torch.float32, device="cpu",
                    kv_heads=len(share.kv_heads), kv_form=kv_form)
    return FastTransformer(weights, pool, ranks=collectives, **options)


PROMPTS = [tokens(CONFIG, n, seed) for seed, n in enumerate((41, 2, 17, 60, 9))]
CHUNKS = (9, 10, 33)


def mine(plan, rank):
    return list(range(rank // plan.tp, len(PROMPTS), plan.dp))


def steps(model, own, decodes=3):
    """Prompts in chunks (some come to an end before others), then decode: the last row of every sequence and step."""
    caches, found = {n: model.new_cache() for n in own}, {n: [] for n in own}
    edges = (0, *CHUNKS, 1000)
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        live = [n for n in own if len(PROMPTS[n][a:b])]
        ids = torch.cat([torch.empty(0, dtype=torch.int64), *(PROMPTS[n][a:b] for n in live)])
        logits = model(ids, [len(PROMPTS[n][a:b]) for n in live], [caches[n] for n in live])
        for n, row in zip(live, logits, strict=True):
            found[n].append(row)
    for token in range(decodes):
        logits = model(torch.full((len(own),), token), [1] * len(own), [caches[n] for n in own])
        for n, row in zip(own, logits, strict=True):
            found[n].append(row)
    return {n: torch.stack(rows) for n, rows in found.items()}


def expected(plain, decodes=3):
    found = {}
    for n, prompt in enumerate(PROMPTS):
        whole = plain(torch.cat([prompt, torch.arange(decodes)]), logits="all")
        ends = [min(edge, len(prompt)) for edge in (*CHUNKS, 1000)]
        ends = sorted(set(ends)) + [len(prompt) + 1 + k for k in range(decodes)]
        found[n] = whole[[end - 1 for end in ends]]
    return found


def work(ranks, source, plan, **options):
    model = fast(ranks, source, plan, **options)
    found = steps(model, mine(plan, ranks.rank))
    return found, model


ONE_BY_ONE = [*TP[1:3], SP[1], DP[0]]                       # of each kind: steps that are not captured


@pytest.mark.parametrize(("plan", "graphs"), [*((plan, True) for plan in (*TP, *SP, *DP)),
                                              *((plan, False) for plan in ONE_BY_ONE)], ids=str)
def test_logits_of_one_rank(source, plain, plan, graphs):
    """Chunks and decode of prompts of many lengths; every rank has the rows of its data-parallel group's sequences."""
    exact = expected(plain)
    results = simulate(plan.world, lambda ranks: work(ranks, source, plan, graphs=graphs))
    for rank, (found, model) in enumerate(results):
        assert sorted(found) == mine(plan, rank)
        for n, rows in found.items():
            assert distance(rows, exact[n]) <= EXACT
        assert model.pool.kv_heads == len(model.share.kv_heads) and model._forward.heads == len(model.share.heads)
        assert model.weights.unembedding.shape[0] == len(model.share.vocabulary)


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(2, 1, 2, True), Plan(2, 2, 1), Plan(4, 1, 4, True)], ids=str)
def test_all_rows_and_prompts_without_caches(source, plain, plan):
    def own(ranks):
        model = fast(ranks, source, plan)
        return model(torch.cat(PROMPTS[:2]), [41, 2], logits="all"), model(PROMPTS[3])

    exact = torch.cat([plain(PROMPTS[0], logits="all"), plain(PROMPTS[1], logits="all")])
    for rows, last in simulate(plan.world, own):
        assert distance(rows, exact) <= EXACT and distance(last, plain(PROMPTS[3])) <= EXACT


def scaled(model):
    """Give this rank's heads of an e4m3 pool their scales, all different and none a power of two."""
    heads = slice(model.share.kv_heads.start, model.share.kv_heads.stop)
    for scales, factor in ((model.pool.key_scales, 0.011), (model.pool.value_scales, 0.007)):
        scales.copy_((factor * (1 + torch.arange(16).view(4, 4) / 10))[:, heads])


@pytest.mark.parametrize("plan", [Plan(2, 1, 2, True), Plan(2, 1, 2), Plan(2, 2, 1)], ids=str)
def test_e4m3_pages(source, plain, plan):
    """Ranks keep and see the same rounded keys as one rank: a split prompt moves them rounded, and finds their codes.

    A key at the edge of two codes may fall on the other one, as sums over ranks have another order: that moves the
    logits by some 1e-5, and rounding all keys, which must show, by more than 1e-3.
    """
    def own(ranks, plan=plan):
        model = fast(ranks, source, plan, kv_form="fp8", graphs=False)
        scaled(model)
        return steps(model, mine(plan, ranks.rank)), model.pool

    exact, unrounded = simulate(1, lambda ranks: own(ranks, Plan()))[0], expected(plain)
    for found, pool in simulate(plan.world, own):
        for n, rows in found.items():
            assert distance(rows, exact[0][n]) <= 3e-4
            assert distance(rows, unrounded[n]) > 1e-3
        if plan.sequence_split:
            for n in (1, 3):                             # full layers; a ring's oldest row is kept by one rank alone
                ours, theirs = (of.keys[n][1:].view(torch.uint8) for of in (pool, exact[1]))
                assert theirs.any() and (ours != theirs).float().mean() < 1e-3


def test_every_e4m3_code_survives_its_journey():
    """A row arrives as code * scale, in bf16 at worst, and is kept as that code."""
    from gptoss_lab.model.fast.split import _read, _write

    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[~torch.isin(codes, torch.tensor([127, 255], dtype=torch.uint8))].view(-1, 1, 2)     # not the NaNs
    pages, scale = codes.view(torch.float8_e4m3fn)[None], torch.tensor([0.0137])
    for dtype in (torch.float32, torch.bfloat16):
        kept, at = torch.zeros_like(pages.view(torch.uint8)).view(pages.dtype), torch.arange(127)
        _write(kept, at, _read(pages, at, scale, dtype), scale)
        assert torch.equal(kept.float(), pages.float())


def test_rows_that_did_not_travel_are_never_read(source, plain, monkeypatch):
    monkeypatch.setattr(sequence_module, "UNSENT", float("nan"))
    plan, exact = Plan(2, 1, 2, True), expected(plain)
    for found, _ in simulate(2, lambda ranks: work(ranks, source, plan)):
        for n, rows in found.items():
            assert distance(rows, exact[n]) <= EXACT


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(2, 1, 4), Plan(2, 2, 1), Plan(4, 2, 2), Plan(2, 1, 2, True),
                                  Plan(4, 1, 4, True)], ids=str)
def test_what_a_prompt_moves(source, plan):
    """The bytes that a rank receives for one prompt of each group are those that the plan says, and no others."""
    length = 64

    def own(ranks):
        model = fast(ranks, source, plan)
        groups = {name: getattr(model.ranks.groups, name) for name in ("tensor", "data", "world")}
        model(tokens(CONFIG, length), [length], [model.new_cache()], logits="none")
        return {name: dict(group.traffic.received) for name, group in groups.items()}

    of_axis = {"tp": "tensor", "dp": "data", "world": "world"}
    for received in simulate(plan.world, own):
        for what in ("rows of the step", "kind of step"):
            received["data"].pop(what, None)
        halo = 0.0
        for e in exchanges(CONFIG, plan, value_bytes=4, fast=True):
            received[of_axis[e.axis]][e.name] -= e.times * e.token_bytes * length
            halo += e.times * e.sequence_bytes
        left = {(axis, name): bytes for axis, names in received.items() for name, bytes in names.items() if bytes}
        if not plan.sequence_split:
            assert not left
        else:
            assert set(left) == {("tensor", "keys and values")} and 0 < left["tensor", "keys and values"] <= halo


def test_an_idle_group_works_for_the_others(source, plain):
    """Two groups, and the second has no sequence: it takes every step, in decode with the others' size."""
    plan = Plan(2, 2, 1)

    def own(ranks):
        model = fast(ranks, source, plan)
        if ranks.rank:
            empty = torch.empty(0, dtype=torch.int64)
            shapes = [model(empty, [], [], logits="none")]
            shapes += [model(empty, [], []).shape for _ in range(3)]
            return [*shapes, model(empty, [], [], logits="none")]
        cache = model.new_cache()
        model(PROMPTS[0][:20], [20], [cache], logits="none")
        rows = [model(PROMPTS[0][20:40], [20], [cache])]
        return torch.cat(rows + [model(PROMPTS[0][40:41], [1], [cache])] + [
            model(torch.tensor([k]), [1], [cache]) for k in range(2)])

    found, shapes = simulate(2, own)
    whole = plain(torch.cat([PROMPTS[0], torch.arange(2)]), logits="all")
    assert distance(found, whole[[39, 40, 41, 42]]) <= EXACT
    assert shapes == [None] + [(0, CONFIG.vocab_size)] * 3 + [None]


def test_groups_of_different_sizes_run_the_larger_step(source):
    """One group decodes three sequences while the other has one: both replay the step of four rows."""
    plan = Plan(2, 2, 1)

    def own(ranks):
        model = fast(ranks, source, plan, sizes=(1, 2, 4))
        count = 1 if ranks.rank else 3
        caches = [model.new_cache() for _ in range(count)]
        model(torch.arange(5 * count), [5] * count, caches)
        model(torch.arange(count), [1] * count, caches)
        return sorted(model._decode.captured)

    assert simulate(2, own) == [[4], [4]]


@pytest.mark.parametrize("plan", [Plan(1, 1, 2), Plan(2, 2, 2)], ids=str)
def test_shards_of_the_logits(source, plain, plan):
    """Without gathering a rank has its own columns."""
    def own(ranks):
        model = fast(ranks, source, plan, full_logits=False)
        return model(PROMPTS[0], [41], [model.new_cache()]), model.share.vocabulary

    exact = plain(PROMPTS[0])
    for logits, rows in simulate(plan.world, own):
        assert distance(logits, exact[:, rows.start : rows.stop]) <= EXACT


class StandIn:
    """What FusedAllReduce does, between threads: parts in two buffers in turn, two-shot sums in one."""

    made = []

    def __init__(self, group, rows, hidden, dtype):
        self.group, self.rows, self.forms, self.norms = group, rows, [], 0
        self.parts = [torch.full((rows, hidden), torch.nan, dtype=dtype) for _ in range(2)]
        self.sum = torch.full((rows, hidden), torch.nan, dtype=dtype)
        self.turn, self.written = 0, 0
        with threading.Lock():
            self.made.append(self)

    def part(self, rows):
        return self.parts[self.turn][:rows]

    def __call__(self, residual, weight, eps, form, part):
        rows = len(residual)
        if part.data_ptr() == self.part(rows).data_ptr():
            self.written += 1
        self.part(rows).copy_(part)
        parts = self.group.all_gather(self.part(rows)[None].clone(), [1] * self.group.size, "stand-in").unbind()
        total, normed = all_reduce_norm(parts, residual, torch.ones(residual.shape[1]) if weight is None else weight,
                                        eps)
        if form == "two_shot":
            self.sum.fill_(torch.nan)
            self.sum[:rows] = total
            total = self.sum[:rows]
        self.forms.append((form, rows))
        self.norms += weight is not None
        self.turn = 1 - self.turn
        return total, None if weight is None else normed


@pytest.fixture
def stand_in(monkeypatch):
    """Simulated ranks sum by `StandIn`."""
    import gptoss_kernels.comm

    monkeypatch.setattr(residual, "fused_obstacle", lambda group, *_: "one rank" if group.size == 1 else None)
    monkeypatch.setattr(SimulatedGroup, "process_group", property(lambda self: self), raising=False)
    monkeypatch.setattr(gptoss_kernels.comm, "FusedAllReduce", StandIn)
    monkeypatch.setattr(StandIn, "made", [])


@pytest.mark.parametrize("plan", [Plan(2, 1, 2), Plan(2, 1, 2, True)], ids=str)
def test_decode_of_many_rows(source, plain, plan, stand_in):
    """Above 32 rows the projections are other kernels, and a sum may norm for the next of them."""
    def own(ranks):
        model = fast(ranks, source, plan, rings=41)
        caches = [model.new_cache() for _ in range(40)]
        model(ids, [3] * 40, caches)
        return model(ids[:40], [1] * 40, caches)

    ids = tokens(CONFIG, 120)
    exact = torch.cat([plain(torch.cat([ids[3 * n : 3 * n + 3], ids[n : n + 1]])) for n in range(40)])
    for rows in simulate(2, own):
        assert distance(rows, exact) <= EXACT
    assert all(made.forms for made in StandIn.made)


@pytest.mark.parametrize(("plan", "projections"), [
    (Plan(2, 1, 2), "dense"), (Plan(1, 1, 4), "dense"), (Plan(2, 1, 2, True), "dense"), (Plan(4, 2, 2), "dense"),
    (Plan(2, 1, 2), "fp8")], ids=str)
@pytest.mark.parametrize("graphs", [True, False])
def test_sums_in_one_kernel(source, plain, plan, projections, graphs, stand_in, monkeypatch):
    """With the stand-in the logits are the same, and each step takes the form and the norm that it should."""
    # Half of the heads are half of a block of 128, so e4m3 projections differ from one rank's: compare with the same.
    options = {"projections": projections, "rank_rows": 128, "graphs": graphs}
    results = simulate(plan.world, lambda ranks: work(ranks, source, plan, **options))
    with monkeypatch.context() as without:
        without.setattr(residual, "fused_obstacle", lambda *_: "not here")
        others = simulate(plan.world, lambda ranks: work(ranks, source, plan, **options))
    exact = expected(plain)
    for (found, model), (other, _) in zip(results, others, strict=True):
        for n, rows in found.items():
            assert distance(rows, other[n]) <= EXACT
            assert projections == "fp8" or distance(rows, exact[n]) <= EXACT
        assert model._forward.sum._fused in StandIn.made
    layers = CONFIG.num_layers
    for made in StandIn.made:
        assert made.turn == 0, "an even number of calls in every step"
        many = [form for form, rows in made.forms if rows > 32]
        if plan == Plan(2, 1, 2):
            assert many and set(many) == {"one_shot"} and ("one_shot", 8 if graphs else 5) in made.forms
            written = "of experts always, of attention for a prompt: the part is written where peers read it"
            assert made.written == len(made.forms) // 2 + len(many) // 2, written
        if plan == Plan(2, 1, 2) and projections == "dense":
            assert made.norms == len(many) // 2 * (layers - 1) // layers, "the next layer's norm, but after the last"
        if plan == Plan(1, 1, 4):
            assert set(many) == {"two_shot"}
        if projections == "fp8" or plan.sequence_split:
            assert not made.norms
        if plan.sequence_split:                                           # its decode steps sum, experts alone
            assert not many and made.written == len(made.forms)


def test_more_rows_than_the_buffers_hold_go_the_plain_way(monkeypatch):
    from gptoss_lab.parallel.groups import Group

    monkeypatch.setattr(residual, "fused_obstacle", lambda *_: None)
    import gptoss_kernels.comm

    monkeypatch.setattr(gptoss_kernels.comm, "FusedAllReduce", StandIn)
    monkeypatch.setattr(Group, "process_group", None, raising=False)
    found = residual.ResidualSum(Group(), 100, 8, torch.float32, "cpu")
    assert [found.form(n) for n in (1, 8, 9, 100, 101)] == ["one_shot", "one_shot", "two_shot", "two_shot", "plain"]
    assert found.room(100).shape == (100, 8) and found.room(101) is None and found.room(0) is None
    assert "up to the 100 rows of its buffers" in found.reason
    odd = residual.ResidualSum(Group(), 100, 8, torch.float32, "cpu", calls=3)
    assert odd.form(1) == "plain" and "a step makes 3 sums" in odd.reason


def test_reasons_for_the_plain_way():
    def own(ranks):
        group = ranks.plan_groups(Plan(1, 1, 2)).tensor
        return (residual.ResidualSum(group, 8, 8, torch.float32, "cpu").reason,
                residual.fused_obstacle(group, torch.bfloat16, torch.device("cuda")))

    for reason, between_threads in simulate(2, own):
        assert reason == "the group's all-reduce: the kernel runs on GPUs of one node, and this is cpu"
        assert between_threads == "the group's all-reduce: simulated ranks share no memory with peers"


def test_what_the_fast_forward_refuses(source):
    with pytest.raises(RankError, match="EP4 DP2 TP2 SP: the fast forward splits a prompt over the ranks of one"):
        simulate(4, lambda ranks: fast(ranks, source, Plan(4, 2, 2, True)))

    def drafts(ranks):
        model = fast(ranks, source, Plan(2, 1, 2, True), draft=2)
        model(PROMPTS[0], [41], [model.new_cache()])

    with pytest.raises(RankError, match="rings keep 2 drafted positions; a split prompt moves the window alone"):
        simulate(2, drafts)


@pytest.fixture
def own_rows(monkeypatch):
    """Steps of 36 rows and more go through own_rows.py, by reduce-scatter and all-gather; returns what it took."""
    from gptoss_lab.model.fast import own_rows, ranks

    taken = []
    monkeypatch.setattr(own_rows, "LEAST_ROWS", 36)
    monkeypatch.setattr(ranks, "obstacle", lambda forward, sums: "whole heads" if forward.whole_heads else None)
    takes = own_rows.OwnRowsForward.takes

    def noted(self, rows):
        taken.append((rows, takes(self, rows)))
        return taken[-1][1]

    monkeypatch.setattr(own_rows.OwnRowsForward, "takes", noted)
    return taken


def unrounded(monkeypatch):
    """Rows are handed out as they are, every scale one, and what nobody wrote is NaN."""
    from gptoss_kernels.quant import Quantised
    from gptoss_lab.parallel import own_rows

    def empty(rows, columns, device):
        made = Quantised(torch.full((rows, columns), torch.nan), torch.full((rows, -(-columns // 128)), torch.nan))
        assert made.values.view(torch.uint8).shape == (rows, 4 * columns)
        return made

    monkeypatch.setattr(own_rows, "empty_quantised", empty)
    monkeypatch.setattr(own_rows, "quantise_groups", lambda x: (x.float(), torch.ones(len(x), -(-x.shape[1] // 128))))


OWN = [Plan(2, 1, 2), Plan(1, 1, 2), Plan(2, 1, 4)]


@pytest.mark.parametrize("plan", OWN, ids=str)
def test_own_rows_are_those_of_whole_sums(source, plan, own_rows, monkeypatch):
    """With the rounding to e4m3 left out, the logits of steps whose rows are cut between the ranks are those of steps
    that every rank takes whole: chunks of several sequences, long and short ones, and decode between them."""
    def own(ranks):
        model = fast(ranks, source, plan, projections="fp8", rank_rows=96, graphs=False)
        seen = []
        cache = model.new_cache()
        whole = model(PROMPTS[3], [60], [cache], logits="all", observe=lambda *what: seen.append(what))
        assert [(what, n) for what, n, _ in seen] == [("moe_input", n) for n in range(CONFIG.num_layers)]
        assert model(PROMPTS[0], [41], [model.new_cache()], logits="none") is None
        return steps(model, mine(plan, ranks.rank)), whole, torch.stack([x.sum(0) for _, _, x in seen]), model

    unrounded(monkeypatch)
    cut = simulate(plan.world, own)
    assert {(60, True), (41, True), (53, True), (35, False)} < set(own_rows)
    monkeypatch.undo()
    whole = simulate(plan.world, own)
    assert whole[0][3]._forward.own_rows is None
    for (found, every, _, _), (want, all_rows, seen, _) in zip(cut, whole, strict=True):
        for n, logits in found.items():
            assert distance(logits, want[n]) <= EXACT
        assert distance(every, all_rows) <= EXACT
        assert distance(sum(each[2] for each in cut), seen) <= EXACT, "observed rows are cut between the ranks"


def test_own_rows_in_e4m3(source, own_rows, monkeypatch):
    """Rounded, they differ from whole sums by what e4m3 costs, and every rank has the same logits."""
    plan = Plan(2, 1, 2)

    def own(ranks):
        model = fast(ranks, source, plan, projections="fp8", rank_rows=96)
        return model(PROMPTS[3], [60], [model.new_cache()], logits="all")

    cut = simulate(2, own)
    monkeypatch.undo()
    whole = simulate(2, own)[0]
    assert torch.equal(*cut)
    error = (cut[0] - whole).norm(dim=1) / whole.norm(dim=1)
    assert 1e-3 < error.median() <= 0.05


@pytest.mark.parametrize("plan", OWN, ids=str)
def test_what_own_rows_move(source, plan, own_rows):
    """Bytes that a rank receives for a prompt of 64 tokens: of each part its rows, of the others' rows one byte a value
    and the scales, and their choice of experts."""
    length, world, hidden = 64, plan.world, CONFIG.hidden_size

    def own(ranks):
        model = fast(ranks, source, plan, projections="fp8")
        model(tokens(CONFIG, length), [length], [model.new_cache()])
        return dict(model.ranks.groups.tensor.traffic.received)

    mine, layers = length // world, CONFIG.num_layers
    others, parts = length - mine, (world - 1) * mine * hidden * 4
    row = hidden + 4 * -(-hidden // 128)
    for received in simulate(world, own):
        assert received["attention"] == layers * (parts + others * row)
        assert received["combine"] == layers * parts + (layers - 1) * others * row
        assert received["dispatch"] == layers * others * CONFIG.experts_per_token * (8 + 4)
        assert received["rows of the head"] in (0, hidden * 4)


def test_which_steps_cut_their_rows(source):
    """The reasons against, and none of these models takes such a step."""
    from types import SimpleNamespace

    from gptoss_lab.model.fast.own_rows import obstacle

    def forward(whole_heads=False, projections="fp8", experts="fp8", backend="cuda"):
        weights = SimpleNamespace(projections=projections, experts=experts)
        operations = SimpleNamespace(moe_layer=SimpleNamespace(backend=backend))
        return SimpleNamespace(whole_heads=whole_heads, weights=weights, operations=operations)

    sums = SimpleNamespace(form=lambda rows: "one_shot", reason="small buffers")
    assert obstacle(forward(), sums) is None
    assert "has all heads" in obstacle(forward(whole_heads=True), sums)
    assert "projections are 'dense'" in obstacle(forward(projections="dense"), sums)
    assert "'mxfp4' by 'cuda'" in obstacle(forward(experts="mxfp4"), sums)
    assert "'fp8' by 'triton'" in obstacle(forward(backend="triton"), sums)
    sums.form = lambda rows: "plain"
    assert obstacle(forward(), sums) == "no kernel sums 1024 rows: small buffers"
    for plan in (Plan(2, 1, 2), Plan(2, 2, 1), Plan(2, 1, 2, True)):
        assert simulate(2, lambda ranks, plan=plan: fast(ranks, source, plan)._forward.own_rows) == [None, None]
