"""The fit: the optimum of its problem, independent of what is held out, silent about what it was not shown."""
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.cost import CostError
from gptoss_lab.cost.fit import Equation, fit, non_negative
from gptoss_lab.cost.holdout import held_out


def best_by_trying(a, b):
    """Smallest residual over all sets of columns whose plain least squares is not negative."""
    best = float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for chosen in combinations(range(a.shape[1]), size):
            x = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
            if (x >= 0).all():
                best = min(best, float(((a[:, chosen] @ x - b) ** 2).sum()))
    return best


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_no_choice_of_columns_fits_better(seed, columns):
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(8, columns)), rng.normal(size=8)
    x = non_negative(a, b)
    assert (x >= 0).all()
    assert float(((a @ x - b) ** 2).sum()) <= best_by_trying(a, b) * (1 + 1e-9) + 1e-12
    gain = a.T @ (b - a @ x)
    assert (gain <= 1e-8).all() and np.abs(gain[x > 0]).max(initial=0) < 1e-8     # the optimality conditions


def lines(**truth):
    rng = np.random.default_rng(3)
    made = []
    for n in range(12):
        amounts = {name: float(v) for name, v in zip(truth, rng.uniform(0.1, 3, len(truth)), strict=True)}
        made.append(Equation(f"line {n}", sum(truth[k] * amounts[k] for k in truth), amounts))
    return made


def test_it_finds_what_the_lines_were_made_of():
    found = fit(lines(a=2.0, b=0.5, c=30.0), ["a", "b", "c"], {"a": 1.0})
    assert found.coefficients == pytest.approx({"a": 2.0, "b": 0.5, "c": 30.0}, rel=1e-4)
    assert found.lines == {"a": 12, "b": 12, "c": 12}


def test_a_limit_holds_even_where_the_lines_ask_for_less():
    found = fit(lines(a=0.5, b=1.0), ["a", "b"], {"a": 1.0})
    assert found.coefficients["a"] == 1.0 and 0 <= found.coefficients["b"] < 1.0


def test_held_out_lines_change_nothing():
    made = lines(a=2.0, b=0.5)
    wrong = Equation("wrong", 4.0, {"a": 1.0}, weight=100.0, held_out=True)
    assert fit([*made, wrong], ["a", "b"]).coefficients == fit(made, ["a", "b"]).coefficients
    seen = Equation("wrong", 4.0, {"a": 1.0}, weight=100.0)
    assert fit([*made, seen], ["a", "b"]).coefficients["a"] == pytest.approx(4.0, abs=0.01)


def test_weight_decides_between_lines_that_disagree():
    heavy, light = Equation("x", 1.0, {"a": 1.0}, 1.0), Equation("y", 2.0, {"a": 1.0}, 0.1)
    assert fit([heavy, light], ["a"]).coefficients["a"] == pytest.approx(1.0, abs=0.01)


def test_what_no_line_touches_is_not_predicted():
    found = fit(lines(a=2.0), ["a", "b"])
    assert found.seconds({"a": 1.0, "b": 0.0}) == pytest.approx(2.0, rel=1e-5)
    with pytest.raises(CostError, match="touches b"):
        found.seconds({"a": 1.0, "b": 1.0})


def test_nothing_to_fit_is_an_error():
    with pytest.raises(CostError, match="no measurement"):
        fit([Equation("x", 1.0, {"a": 1.0}, held_out=True)], ["a"])
    with pytest.raises(CostError, match="seconds of x"):
        Equation("x", 0.0, {})


@pytest.mark.parametrize(("tokens", "batch", "gpus", "kept"), [
    (65536, 1, 1, True), (8192, 8, 1, True), (8192, 1, 2, True), (8192, 1, 1, False), (65535, 7, 4, False),
    (None, None, 8, False),
])
def test_the_rule_of_what_is_held_out(tokens, batch, gpus, kept):
    assert held_out(tokens, batch, gpus) is kept
