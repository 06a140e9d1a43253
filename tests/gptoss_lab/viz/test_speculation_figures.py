"""Numbers behind the figures of speculation, against countings of their own, and what is drawn of them."""
import dataclasses
import itertools
import math
import random
from fractions import Fraction

import pytest
import torch

from gptoss_lab.checkpoint import synth
from gptoss_lab.config import preset
from gptoss_lab.cost.speculation import tokens_per_round
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.engine.decoders.verify import accept_sampled
from gptoss_lab.model import load_model
from gptoss_lab.results import read_rows, recorded_folder
from gptoss_lab.viz import (
    engine_acceptance,
    speculation_exact,
    speculation_recorded,
    speculation_ring,
    speculation_rounds,
    speculation_sharing,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = dataclasses.replace(preset("nano"), num_layers=2, hidden_size=32, intermediate_size=32, num_heads=2,
                                 num_kv_heads=1, head_dim=32, vocab_size=50, sliding_window=16, eos_token_ids=(3,),
                                 pad_token_id=0)
    path = tmp_path_factory.mktemp("speculation") / "model"
    synth(config, path)
    return load_model(path, dtype=torch.float32)


# -- rounds ------------------------------------------------------------------------------------------------------------
def test_rounds_are_kept_and_change_no_token(model):
    prompts = [[1, 2, 3], [7], [9, 4]]
    plain = [done.tokens for done in Engine(model).complete(
        prompts, SamplingParams(temperature=0, max_new_tokens=16))]
    for noise in (0.0, 0.3):
        rounds, tokens = speculation_rounds.run(model, engine_acceptance.spoiled(model, noise), prompts, 3, 16)
        assert tokens == plain
        assert len(rounds.each) == rounds.rounds and sum(p for p, _ in rounds.each) == rounds.proposed
        assert sum(a for _, a in rounds.each) == rounds.accepted
        assert (rounds.acceptance == 1) == (noise == 0)


@pytest.mark.parametrize(("stood", "tested"), [(1, 20), (40, 80), (75, 80), (0, 7)])
def test_wilson_ends_where_the_score_test_does(stood, tested):
    """At its ends the share lies 1.96 standard errors off, with the error taken at the end itself."""
    low, share, high = speculation_rounds.wilson(stood, tested)
    assert 0 <= low <= share == stood / tested <= high <= 1
    for end in {low, high} - {0.0, 1.0}:
        assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / tested), rel=1e-6)


def test_wilson_at_its_limits():
    low, share, high = speculation_rounds.wilson(10, 10)
    assert (share, high) == (1, 1) and low == pytest.approx(1 / (1 + speculation_rounds.Z95**2 / 10))
    for bad in ((0, 0), (3, 2), (-1, 4)):
        with pytest.raises(ValueError, match="at least one test"):
            speculation_rounds.wilson(*bad)


def independent(share, k, rounds, seed):
    """Rounds whose proposals stand independently."""
    drawn, found = random.Random(seed), speculation_rounds.Rounds()
    for _ in range(rounds):
        found.add(k, next((n for n in range(k) if drawn.random() >= share), k))
    return found


def test_independent_rounds_are_foretold():
    ones, fours = independent(0.7, 1, 4000, 1), independent(0.7, 4, 4000, 2)
    low, middle, high = speculation_rounds.foretold(ones, 4)
    assert low < tokens_per_round(0.7, 4) < high and low < middle < high
    assert speculation_rounds.meet((low, middle, high), speculation_rounds.yield_of(fours, 4))
    worse = independent(0.5, 4, 4000, 3)
    assert not speculation_rounds.meet((low, middle, high), speculation_rounds.yield_of(worse, 4))


def test_short_last_rounds_are_left_out():
    rounds = speculation_rounds.Rounds()
    for proposed, accepted in ((4, 4), (4, 2), (1, 1), (1, 0)):
        rounds.add(proposed, accepted)
    assert speculation_rounds.yield_of(rounds, 4)[1] == 4
    with pytest.raises(ValueError, match="0 rounds of 3 proposals"):
        speculation_rounds.yield_of(rounds, 3)


def test_the_figure_counts_what_meets():
    found = {"good": {1: independent(0.7, 1, 500, 1), 4: independent(0.7, 4, 500, 2)},
             "bad": {1: independent(0.9, 1, 500, 1), 4: independent(0.2, 4, 500, 2)}}
    fig = speculation_rounds.figure(found, "made up")
    assert fig.layout.title.text.startswith("At 1 of 2 lengths")
    assert [list(t.x) for t in fig.data if t.mode == "markers"] == [[4], [4]]
    assert fig.layout.title.subtitle.text.startswith("live")


# -- exactness ---------------------------------------------------------------------------------------------------------
def test_the_engines_rule_is_exact_and_the_tempting_ones_are_not():
    plain = speculation_exact.plain()
    assert sum(plain.values()) == 1 and len(plain) == 64
    assert plain[0, 1, 3] == Fraction(1, 8) * Fraction(1, 8) * Fraction(3, 8)       # after 0: 1; after 1: 0; after 1: 2
    outcomes = speculation_exact.outcomes()
    assert sum(outcomes.values()) == 1 and speculation_exact.completed(outcomes) == plain
    frames = speculation_exact.rules_table().frame
    assert frames["distance to the model"].tolist() == ["0", "1/8", "9/16"]
    assert frames["tokens of a round"].tolist()[0] == str(1 + Fraction(1, 2) + Fraction(1, 4))


@pytest.mark.parametrize(("model", "draft"), [((2, 2, 2, 2), (4, 2, 1, 1)), ((1, 1, 3, 3), (2, 2, 2, 2)),
                                              ((4, 4, 0, 0), (4, 4, 0, 0))])
def test_exact_for_other_eighths(model, draft):
    found = speculation_exact.outcomes(accept_sampled, model, draft)
    assert speculation_exact.completed(found, model=model) == speculation_exact.plain(model=model)


def test_the_figure_of_the_rule_adds_up_to_the_model():
    stood, replaced, proposed, alone = speculation_exact.figure().data
    assert [a + b for a, b in zip(stood.y, replaced.y, strict=True)] == list(alone.y) == [1 / 8, 1 / 8, 3 / 8, 3 / 8]
    assert list(proposed.y) == [1 / 2, 1 / 4, 1 / 8, 1 / 8]


# -- ring --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("draft", "length", "accepted"), list(itertools.product((1, 3, 5), (3, 8, 13, 40), (0, 1))))
def test_a_ring_with_room_loses_nothing(draft, length, accepted):
    moments = speculation_ring.round_trip(draft, draft, length, accepted)
    assert [m.sure for m in moments] == [length, length, length + 1 + accepted]
    assert moments[0].lost == [] == moments[2].lost
    assert set(moments[2].window) <= set(moments[2].rows)


def test_a_ring_without_room_loses_what_the_pool_refuses_to_cut():
    moments = speculation_ring.round_trip(5, 0, 13, 0)
    assert moments[0].lost == [] and moments[2].lost == [7, 8]
    assert "keep 0 positions more than the window" in speculation_ring.refusal(5, 13)
    assert speculation_ring.refusal(2, 3) == "it was cut"          # all of it still lies within the window
    with pytest.raises(ValueError, match="4 of 3 proposals"):
        speculation_ring.round_trip(3, 3, 13, 4)


def test_the_ring_is_drawn_row_by_row():
    fig = speculation_ring.figure()
    assert [a.text for a in fig.layout.annotations] == ["gone: 7, 8"]
    drawn = [bar for bar in fig.data if bar.text is not None]
    assert len(drawn) == 6 and list(drawn[2].text) == [str(p) for p in (14, 15, 16, 17, 18, *range(5, 14))]
    assert drawn[2].marker.color[0] == speculation_ring.TAKEN and drawn[1].marker.color[0] == speculation_ring.TRIAL


# -- shared experts ----------------------------------------------------------------------------------------------------
def test_neighbours_that_agree_are_told_from_preference():
    config = preset("nano")
    agreeing = torch.arange(12).div(3, rounding_mode="floor")[None, :, None] * 4 + torch.arange(4)     # threes agree
    one, three = speculation_sharing.shared(config, agreeing % 16, (1, 3))
    assert (one.neighbours, one.far_apart, one.even) == (4, 4, 4)
    assert three.neighbours == 4 and three.far_apart > 8
    preferring = torch.arange(4).expand(2, 12, 4)                                       # everyone the same
    (four,) = speculation_sharing.shared(config, preferring, (4,))
    assert four.neighbours == four.far_apart == 4 and four.share < 0.5
    for bad in (0, 13):
        with pytest.raises(ValueError, match=f"{bad} tokens of a text of 12"):
            speculation_sharing.shared(config, preferring, (bad,))


def test_routing_of_a_text_is_recorded(model):
    experts = speculation_sharing.routed(model, [1, 2, 3, 4, 5])
    assert experts.shape == (2, 5, 4) and all(len(set(row)) == 4 for row in experts.flatten(0, 1).tolist())
    found = speculation_sharing.shared(model.config, experts, (1, 2))
    fig = speculation_sharing.figure(found, "tiny")
    assert list(fig.data[2].y) == [one.neighbours for one in found] and found[0].neighbours == 4


# -- recorded ----------------------------------------------------------------------------------------------------------
def step(case, model, milliseconds):
    return {"suite": "speculation", "case": case, "metric": "ms_per_step", "value": milliseconds, "gpu": None,
            "conditions": {"model": model, "batch": 8, "tokens": 8192, "experts": "mxfp4"}}


def test_step_rows_say_what_they_predict():
    rows = [step("a step", "big", 4.0), step("a check of 5", "big", 6.0), step("a proposal", "small", 1.0)]
    frame = speculation_recorded.steps_table(rows, (1.0, 0.0)).frame
    assert frame["k"].tolist() == ["4"] and frame["speed-up at a = 1.0"].tolist() == ["2.00"]      # 5 x 4 / (4 x 1 + 6)
    assert frame["speed-up at a = 0.0"].tolist() == ["0.40"] and frame["origin"].tolist() == ["recorded"]
    assert speculation_recorded.steps_table(rows[:2]).frame.iloc[0, 0] == speculation_recorded.NOTHING


def test_without_rows_the_tables_say_so():
    for shown in (speculation_recorded.drafts_table([]), speculation_recorded.steps_table([])):
        assert shown.frame.iloc[0, 0] == "not recorded yet"


def test_a_proposal_is_a_recorded_step_of_the_small_model():
    rows = read_rows(recorded_folder())
    frame = speculation_recorded.proposals_table(rows, "gpt-oss-120b", "gpt-oss-20b", (1, 2, 128), 8192).frame
    assert frame["experts"].tolist() == ["fp8", "mxfp4", "mxfp4"] and frame["batch"].tolist() == ["1", "1", "128"]
    assert all(0 < float(share) < 1 for share in frame["draft / step"])
    nothing = speculation_recorded.proposals_table([], "gpt-oss-120b", "gpt-oss-20b", (1,), 8192)
    assert nothing.frame.iloc[0, 0] == speculation_recorded.NOTHING
