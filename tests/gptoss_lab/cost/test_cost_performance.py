"""The performance model: it recovers an engine whose times are known, states its error, and refuses where it cannot."""
import statistics

import pytest
from cost_truth import DECODE, EVERYWHERE, MODELS, PREFILL, kernel_rows, recorded_kernels, row, rows_of, true_seconds

from gptoss_lab.config import preset
from gptoss_lab.cost import FP8_EXPERTS, RELEASED, SERVED, CostError, Plan, all_plans, decode_bound, prefill_bound
from gptoss_lab.cost.figures import read_figures
from gptoss_lab.cost.fit import Equation
from gptoss_lab.cost.performance import PHASES, _told_apart, calibrate, first_able, kernels_alone, published_system
from gptoss_lab.cost.published import read_published
from gptoss_lab.results import read_rows, recorded_folder

BIG, SMALL = preset("gpt-oss-120b"), preset("gpt-oss-20b")
RECORDED = recorded_kernels()
KERNELS = kernels_alone(RECORDED)


@pytest.fixture(scope="module")
def noisy():
    """The imaginary engine and its kernels, measured on one, two, four and eight GPUs with 2 % of noise."""
    return calibrate([*rows_of("prefill"), *rows_of("decode", seed=1), *kernel_rows()])


@pytest.mark.parametrize("phase", PHASES)
def test_held_out_rows_of_a_known_engine_are_predicted_within_the_noise(noisy, phase):
    model = noisy.of(phase)
    per_model = 3 + 7 + 3 if phase == "prefill" else 8 + 2 * 3      # by length, by two GPUs, by batch
    assert len(model.checked) == 2 * per_model
    assert 0 < model.median_error < 0.03 and model.worst_error < 0.08
    assert model.error_sentence().startswith(f"{len(model.checked)} held-out {phase} rows: median error ")


def errors_over_all_plans(model, phase):
    """Relative errors at 16,384 tokens over both models, every plan of a node and four batches, ascending."""
    plans = [plan for world in (1, 2, 4, 8) for plan in all_plans(world)]
    cases = [(config, plan, batch) for config in (SMALL, BIG) for plan in plans for batch in (1, 3, 16, 64)]
    return sorted(abs(model.seconds(phase, config, 16384, batch, plan)
                      / true_seconds(phase, config.name, plan, batch, 16384) - 1) for config, plan, batch in cases)


@pytest.mark.parametrize("phase", PHASES)
def test_it_predicts_plans_and_batches_of_which_no_row_was_given(noisy, phase):
    """All 30 plans, DP too. Kernels timed alone tell the parts of a layer apart; without them the same passes leave
    open what belongs to what, and plans that cut a layer differently are predicted worse."""
    errors = errors_over_all_plans(noisy, phase)
    assert errors[len(errors) // 2] < 0.02 and errors[-1] < 0.06
    passes_alone = errors_over_all_plans(calibrate(rows_of(phase, seed=PHASES.index(phase))), phase)
    assert passes_alone[-1] > 2 * errors[-1]


@pytest.mark.parametrize(("phase", "names"), [
    ("prefill", ("projections_bf16", "experts_fp8", "expert_weights_fp8", "attention_full", "attention_window", "link",
                 "collectives")),
    ("decode", ("projections_bf16", "expert_weights_fp8", "attention_full", "attention_window", "attention_launches",
                "expert_launches", "link", "collectives")),
])
def test_the_factors_and_latencies_of_the_known_engine_are_found(noisy, phase, names):
    truth = {"prefill": PREFILL, "decode": DECODE}[phase]
    found = noisy.of(phase).fit.coefficients
    assert {name: found[name] for name in names} == pytest.approx({name: truth[name] for name in names}, rel=0.15)


@pytest.mark.parametrize(("phase", "truth"), [("prefill", PREFILL), ("decode", DECODE)])
def test_without_noise_the_times_are_exact_and_the_large_factors_found(phase, truth):
    model = calibrate(rows_of(phase, noise=0)).of(phase)
    assert model.worst_error < 0.01
    large = {"prefill": ("attention_full",), "decode": ("attention_full", "expert_weights_fp8")}[phase]
    for name in large:
        assert model.fit.coefficients[name] == pytest.approx(truth[name], rel=0.05)


def test_the_stated_error_is_large_where_the_engine_is_another_on_two_gpus():
    """The error is taken on rows the fit did not see, so it notices what the fit cannot know."""
    slow = calibrate(rows_of("decode", change=lambda s, plan: 1.5 * s if plan.world == 2 else s)).of("decode")
    assert slow.worst_error > 0.3 and slow.median_error > 0.2
    assert "EP2 DP1 TP2" in slow.error_sentence()


def test_held_out_rows_do_not_move_the_fit():
    rows = rows_of("decode")
    changed = [{**r, "value": 9 * r["value"]} if r["conditions"]["batch"] == 8 or r["conditions"]["tp"] == 2 else r
               for r in rows]
    assert calibrate(rows).of("decode").fit == calibrate(changed).of("decode").fit


def test_too_few_rows_are_refused_in_a_sentence():
    model = calibrate(rows_of("decode", plans=[Plan()])[:3] + [row("decode", 0.01, "gpt-oss-20b", Plan(), 8, 32768)])
    assert model.passes == {}
    assert model.missing["decode"] == (
        "2 decode rows of the fast engine have been measured yet besides 2 held out; a fit needs at least 4")
    with pytest.raises(CostError, match="this engine: no prefill rows of the fast engine have been measured yet"):
        model.of("prefill")
    with pytest.raises(CostError, match="phase is 'sampling'"):
        model.of("sampling")


def test_without_held_out_rows_the_error_is_said_to_be_unknown():
    rows = [r for r in rows_of("decode", plans=[Plan()]) if r["conditions"]["batch"] != 8]
    model = calibrate(rows).of("decode")
    assert (model.checked, model.median_error, model.worst_error) == ((), None, None)
    assert model.error_sentence() == "no held-out decode row has been measured yet, so the error is not known"


def test_sums_of_two_ranks_do_not_speak_of_one_shot_among_four():
    """Between two ranks both forms move the same bytes: one column takes the cost, and none is charged twice beyond."""
    def line(ranks, held=False):
        moved = {"link": 2 * (ranks - 1) / ranks, "link_one_shot": ranks - 1.0}
        return Equation(f"{ranks} ranks", 1.0, moved, held_out=held)

    assert not _told_apart("link_one_shot", [line(2)]) and not _told_apart("link_one_shot", [line(2), line(4, True)])
    assert _told_apart("link_one_shot", [line(2), line(4)])
    assert not _told_apart("collectives_by_extra_rank", [line(4)])
    recorded = calibrate(read_rows(recorded_folder())).of("prefill")
    assert "link" in recorded.groups and "link_one_shot" not in recorded.groups


def test_one_gpu_rows_alone_take_collectives_from_figures_and_say_so():
    model = calibrate(rows_of("decode", plans=[Plan()]))
    assert "all-reduces and gathers on figures of two GPUs without raw readings" in model.basis
    plan = Plan(4, 1, 4)
    ratio = model.seconds("decode", BIG, 8192, 16, plan) / true_seconds("decode", BIG.name, plan, 16, 8192)
    assert 0.8 < ratio < 1.2
    assert "measured, gathers on figures" in calibrate(rows_of("decode")).basis
    assert "figures" not in calibrate([*rows_of("decode"), *kernel_rows()]).basis


def test_a_format_nobody_measured_is_refused(noisy):
    with pytest.raises(CostError, match="touches experts_mxfp4, expert_weights_mxfp4"):
        noisy.seconds("decode", BIG, 8192, 1, precision=RELEASED)
    assert noisy.seconds("decode", BIG, 8192, 1, precision=FP8_EXPERTS) > 0


def test_the_reference_forward_is_not_the_engine():
    plain = [{**r, "backend": "reference cuda"} for r in [*rows_of("prefill"), *rows_of("decode")]]
    assert calibrate(plain).passes == {}


def test_the_parts_of_a_prediction_add_up(noisy):
    model = noisy.of("decode")
    parts = model.breakdown(BIG, 8192, 32, Plan(4, 1, 4))
    assert sum(parts.values()) == pytest.approx(model.seconds(BIG, 8192, 32, Plan(4, 1, 4)))
    assert min(parts.values()) >= 0


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("plan", ["EP1 DP1 TP1", "DP1 TP2", "EP2 DP2 TP1"])
def test_every_kind_of_recorded_pass_is_predicted(phase, plan):
    """Those of two GPUs without a fitted number of them: sums of own rows, gathers, the fullest rank's experts."""
    checked = [c.relative_error for c in calibrate(read_rows(recorded_folder())).of(phase).checked if plan in c.label]
    assert len(checked) >= 4 and statistics.median(checked) < 0.06


# -- the published system ----------------------------------------------------------------------------------------------
def test_the_published_rows_that_were_held_out_are_predicted_within_the_limits():
    model = published_system().of("prefill")
    assert len(model.checked) == 14 and sum(not line.held_out for line in model.equations) == 18
    assert model.median_error <= 0.10 and model.worst_error <= 0.25 and not model.own_rows
    assert {c.label.split(", ")[1] for c in model.checked if "EP2" not in c.label} == {"65536 tokens"}


def test_the_published_system_has_no_decode():
    with pytest.raises(CostError, match="its decode charts were not published as numbers"):
        published_system().of("decode")


def test_the_published_fit_is_of_the_published_rates():
    """265 TFLOP/s on products and 124 on attention, found earlier by b n + c n^2 on one GPU alone."""
    coefficients = published_system().of("prefill").fit.coefficients
    assert 1979 / coefficients["matrix products"] == pytest.approx(265, rel=0.05)
    assert 989 / coefficients["attention"] == pytest.approx(124, rel=0.06)


# -- kernels alone -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("config", "sums"), [(BIG, (0.108, 0.61, 1.84, 5.9)), (SMALL, (0.063, 0.41, 1.23, 3.9))])
def test_kernels_add_up_to_the_sums_that_were_noted(config, sums):
    """Those sums were made by hand from the same figures, with small kernels that have no figure here."""
    for tokens, noted in zip((8192, 32768, 65536, 128000), sums, strict=True):
        ours = KERNELS.seconds("prefill", config, tokens, precision=SERVED)
        assert 0.88 * noted < ours <= 1.01 * noted


@pytest.mark.parametrize("phase", PHASES)
def test_every_figure_is_explained(phase):
    """One factor and one latency per kind: within 25 % for every kernel, 6 % for half of them."""
    model = KERNELS.of(phase)
    errors = sorted(abs(model.fit.seconds(line.amounts) / line.seconds - 1) for line in model.equations)
    assert errors[-1] < 0.25 and errors[len(errors) // 2] < 0.06


def test_kernels_lie_between_the_bound_and_a_whole_engine():
    for figure in read_figures():
        if figure.quantity not in PHASES:
            continue
        config = preset(figure.model)
        work = (config, figure.tokens, figure.batch)
        bound = (prefill_bound if figure.quantity == "prefill" else decode_bound)(*work).seconds
        ours = KERNELS.seconds(figure.quantity, *work)
        assert bound < ours < figure.seconds
    for published in read_published():
        ours = KERNELS.seconds("prefill", preset(published.model), published.input_tokens, 1, published.plan)
        assert ours < published.latency_s


def test_kernels_alone_are_checked_against_an_engine_once_there_is_one():
    assert KERNELS.of("decode").checked == ()
    beside = kernels_alone([*RECORDED, *rows_of("decode")]).of("decode")
    assert beside.fit == KERNELS.of("decode").fit       # the engine's rows check it and do not move it
    checked = beside.checked
    packed = [{**r, "conditions": {**r["conditions"], "experts": "mxfp4"}} for r in rows_of("decode")]
    assert kernels_alone([*RECORDED, *packed]).of("decode").checked == ()       # no kernel of packed experts is known
    assert len(checked) == 28


def test_a_supposition_changes_what_it_names_and_loses_the_error(noisy):
    slow = noisy.supposing("decode", collectives_by_extra_rank=1e-6)
    for plan, waits in ((Plan(), 0), (Plan(2, 1, 2), 0), (Plan(8, 1, 8), 36 * 2 * 6)):
        more = slow.seconds("decode", BIG, 8192, 1, plan) - noisy.seconds("decode", BIG, 8192, 1, plan)
        known = noisy.of("decode").fit.coefficients.get("collectives_by_extra_rank", 0.0)
        assert more == pytest.approx(waits * (1e-6 - known), abs=1e-9)
    assert slow.of("decode").checked == () and "supposing" in slow.name
    with pytest.raises(CostError, match="no coefficient is called luck"):
        noisy.supposing("decode", luck=1.0)


def test_the_first_model_that_can_is_chosen():
    engine = calibrate(rows_of("prefill"))
    for phases, chosen in ((["prefill"], "this engine"), (["decode"], "kernels alone"), (PHASES, "kernels alone")):
        assert first_able([engine, KERNELS], phases, [SMALL, BIG]).name == chosen
    packed = calibrate([{**r, "conditions": {**r["conditions"], "experts": "mxfp4"}} for r in rows_of("decode")])
    assert first_able([packed, KERNELS], ["decode"], [BIG]).name == "kernels alone"
    assert first_able([packed, KERNELS], ["decode"], [BIG], RELEASED).name == "this engine"
    with pytest.raises(CostError, match="this engine: no decode rows .* the published system: its decode charts"):
        first_able([engine, published_system()], ["decode"], [BIG])


def test_all_four_curves_of_all_charts_exist():
    for name in MODELS:
        assert all(KERNELS.seconds("decode", preset(name), tokens, batch, plan) > 0
                   for tokens in (8192, 32768) for batch in (1, 128) for plan in EVERYWHERE)
