"""Rejection sampling proven on a vocabulary of four: every way a round can go, run through the engine's own function.

`accept_sampled` takes its random numbers as arguments and is constant between a few borders, so on a grid that holds
all borders it can be enumerated: every proposal, every draw. The probabilities here are eighths, and so are the
borders; with 8 cells for each draw the outcome is exact, in fractions, not a frequency.

The chain: what follows token x is drawn from the same eighths, turned by x. So both places of a round, and the token
after them, depend on what came before, as in a language model.
"""
from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from fractions import Fraction

import plotly.graph_objects as go
import torch

from gptoss_lab.engine.decoders.verify import accept_sampled
from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

EIGHTHS = 8
MODEL, DRAFT = (1, 1, 3, 3), (4, 2, 1, 1)
"""In eighths, after token 0: what the model draws from, and what the draft does."""
Rule = Callable[[torch.Tensor, Sequence[int], Sequence[torch.Tensor], Sequence[Sequence[float]]], list[int]]
Distribution = dict[tuple[int, ...], Fraction]


def after(base: Sequence[int], token: int) -> list[Fraction]:
    """The distribution of the token that follows `token`."""
    n = len(base)
    return [Fraction(base[(x - token) % n], EIGHTHS) for x in range(n)]


def outcomes(rule: Rule = accept_sampled, model: Sequence[int] = MODEL, draft: Sequence[int] = DRAFT) -> Distribution:
    """Exact probability of each list of tokens that a round of two proposals after token 0 can yield."""
    tokens, cell, found = range(len(model)), Fraction(1, EIGHTHS), {}
    middles = [(n + 0.5) / EIGHTHS for n in range(EIGHTHS)]
    for first, second in itertools.product(tokens, tokens):
        chance = after(draft, 0)[first] * after(draft, first)[second] * cell**3
        rows = _rows(model, (0, first, second))
        drawn_from = list(_rows(draft, (0, first)))
        if not chance:
            continue
        for a, b, c in itertools.product(middles, repeat=3):      # accept the first, the second; draw what is left
            draws = [(0.0, a, c), (0.0, b, c), (c, 0.0, 0.0)]
            key = tuple(rule(rows, [first, second], drawn_from, draws))
            found[key] = found.get(key, Fraction(0)) + chance
    return found


def completed(found: Distribution, length: int = 3, model: Sequence[int] = MODEL) -> Distribution:
    """The same with the model's own draws behind it, up to `length` tokens."""
    whole: Distribution = {}
    for tokens, chance in found.items():
        for rest in itertools.product(range(len(model)), repeat=length - len(tokens)):
            path = (*tokens, *rest)
            own = chance * _path(path, model, len(tokens))
            whole[path] = whole.get(path, Fraction(0)) + own
    return {path: chance for path, chance in whole.items() if chance}


def plain(length: int = 3, model: Sequence[int] = MODEL) -> Distribution:
    """What the model alone draws after token 0."""
    paths = itertools.product(range(len(model)), repeat=length)
    return {path: chance for path in paths if (chance := _path(path, model, 0))}


def distance(one: Distribution, other: Distribution) -> Fraction:
    """Half of the summed differences: the largest difference in the probability of any event."""
    return sum((abs(one.get(k, Fraction(0)) - other.get(k, Fraction(0))) for k in one.keys() | other.keys()),
               Fraction(0)) / 2


def drawn_from_the_model(
    target: torch.Tensor, proposed: Sequence[int], drawn_from: Sequence[torch.Tensor], draws: Sequence[Sequence[float]]
) -> list[int]:
    """A tempting error: what falls is replaced by a draw from the model's own distribution."""
    stood = accept_sampled(target, proposed, drawn_from, draws)
    if len(stood) > len(proposed):
        return stood
    return [*stood[:-1], int((target[len(stood) - 1].cumsum(0) <= draws[len(stood) - 1][2]).sum())]


def never_replaced(
    target: torch.Tensor, proposed: Sequence[int], drawn_from: Sequence[torch.Tensor], draws: Sequence[Sequence[float]]
) -> list[int]:
    """Another: whatever was proposed stands."""
    return [*proposed, int((target[-1].cumsum(0) <= draws[-1][0]).sum())]


RULES: dict[str, Rule] = {"the engine's": accept_sampled, "replaced from p in place of max(p - q, 0)":
                          drawn_from_the_model, "all proposals stand": never_replaced}


def rules_table() -> Table:
    """Each rule: tokens of a round, and how far the next three tokens are from the model's own, in exact fractions."""
    lines = []
    for name, rule in RULES.items():
        found = outcomes(rule)
        mean = sum(len(tokens) * chance for tokens, chance in found.items())
        lines.append([name, str(mean), str(distance(completed(found), plain())), str(sum(found.values()))])
    return table(lines, ["rule", "tokens of a round", "distance to the model", "probability in all"])


def figure() -> go.Figure:
    """The first token of a round: accepted, replaced, and what the model wants, in exact eighths."""
    p, q = after(MODEL, 0), after(DRAFT, 0)
    stands = [min(a, b) for a, b in zip(p, q, strict=True)]
    came = [sum((c for t, c in outcomes().items() if t[0] == x), Fraction(0)) for x in range(len(p))]
    names, fig = [f"token {x}" for x in range(len(p))], go.Figure()
    fig.add_bar(x=names, y=list(map(float, stands)), name="proposed, and stood", marker_color=style.BLUE, offsetgroup=1)
    fig.add_bar(x=names, y=[float(a - b) for a, b in zip(came, stands, strict=True)], base=list(map(float, stands)),
                name="came in place of one that fell", marker_color=style.OCHRE, offsetgroup=1)
    fig.add_bar(x=names, y=list(map(float, q)), name="the draft proposes", marker_color=style.GREY, offsetgroup=0)
    fig.add_scatter(x=names, y=list(map(float, p)), mode="markers", name="the model alone",
                    marker={"symbol": "line-ew", "size": 60, "line": {"width": 2, "color": style.RED}})
    fig.update_yaxes(title_text="probability of the first token", rangemode="tozero")
    title = f"Token 0: the draft proposes it with {q[0]}, the model wants {p[0]}, and {came[0]} comes out"
    return style.finish(fig, title, "live", "every draw of the engine's rule enumerated, a vocabulary of four",
                        legend={"y": -0.15})


def _rows(base: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens), vocab] float64: what follows each."""
    return torch.tensor([[float(x) for x in after(base, token)] for token in tokens], dtype=torch.float64)


def _path(path: Sequence[int], model: Sequence[int], start: int) -> Fraction:
    """Probability of path[start:] once path[:start] is there, after token 0."""
    chance = Fraction(1)
    for before, token in list(zip((0, *path), path, strict=False))[start:]:
        chance *= after(model, before)[token]
    return chance
