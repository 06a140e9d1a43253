"""How good the model is: exact match on held-out problems by task, well-formed Harmony, perplexity.

Every problem is one that no training dialogue has (dialogues/turn.py). The model answers greedily. Where it calls a
tool as it should, it is given the tool's result and goes on; the final text must be exactly right. Intervals are
Wilson's at 95 %.
"""
from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gptoss_lab.harmony import Message, ParseError, parse, prompt_header, render_message
from gptoss_lab.harmony.ids import CALL, RETURN
from gptoss_lab.train.dialogues import Dialogue, held_out_dialogue, prompt_of

ROUNDS = 3
"""Generations of one turn: two calls at most, then the answer."""
Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts as token ids -> what the model writes after each, its stop included."""


@dataclass
class Attempt:
    """One problem on its way. ids: the prompt of the next generation. done: right, wrong, or None while it goes on."""

    dialogue: Dialogue
    ids: list[int]
    done: bool | None = None
    broken: str | None = None
    written: list[list[int]] = field(default_factory=list)

    def take(self, ids: list[int]) -> None:
        """Read one generation: a call is answered with the tool's result, a final text is compared."""
        self.written.append(ids)
        try:
            messages = parse(ids)
        except ParseError as error:
            self.done, self.broken = False, error.reason
            return
        if ids[-1] not in (RETURN, CALL) or any(m.end is None for m in messages):
            self.done, self.broken = False, "the generation has no end"
            return
        last = messages[-1]
        expected = self._expected_calls()
        round_number = len(self.written) - 1
        if last.is_tool_call and round_number < len(expected) and _same_call(last, expected[round_number][0]):
            self.ids = [*self.ids, *ids, *render_message(expected[round_number][1]), *prompt_header()]
        else:
            self.done = last.channel == "final" and round_number == len(expected) and (
                last.content == self.dialogue.turns[-1].answer)

    def _expected_calls(self) -> list[tuple[Message, Message]]:
        steps = self.dialogue.turns[-1].steps
        return [(a, b) for a, b in zip(steps[:-1], steps[1:], strict=True) if a.is_tool_call]


def held_out_set(count: int, seed: int = 0, *, far: bool = False) -> list[Dialogue]:
    """The first `count` evaluation dialogues of a seed. far: recall beyond 4,096 tokens."""
    rng = random.Random(f"held out/{seed}/{far}")
    return [held_out_dialogue(rng, far=far) for _ in range(count)]


def attempt(dialogues: Sequence[Dialogue], generate: Generate) -> list[Attempt]:
    """Let a model answer all of them."""
    attempts = [Attempt(d, prompt_of(d)) for d in dialogues]
    for _ in range(ROUNDS):
        going = [a for a in attempts if a.done is None]
        if not going:
            break
        for one, ids in zip(going, generate([a.ids for a in going]), strict=True):
            one.take(ids)
    for one in attempts:
        one.done = bool(one.done)
    return attempts


def summary(attempts: Sequence[Attempt]) -> dict[str, object]:
    """Exact match in all, by task and by reasoning effort, each with its interval, and the share of well-formed ones.

    "in_range": arithmetic worked without a tool; "calculator": with the tool's result given.
    """
    groups: dict[str, list[Attempt]] = {"all": list(attempts)}
    for one in attempts:
        task, effort = one.dialogue.task, one.dialogue.opening.effort
        names = [f"task {task}", f"effort {effort}"]
        if task in ("add", "subtract", "multiply", "follow_up"):
            names.append("in_range")
        for name in names:
            groups.setdefault(name, []).append(one)
    whole = [g for one in attempts for g in [one.broken is None]]
    return {
        "exact_match": {name: share(sum(bool(a.done) for a in group), len(group))
                        for name, group in sorted(groups.items())},
        "well_formed": share(sum(whole), len(whole)),
        "broken": sorted({one.broken for one in attempts if one.broken})[:10],
    }


def share(right: int, count: int) -> dict[str, float | int]:
    """right / count with Wilson's 95 % interval."""
    if not count:
        return {"right": 0, "count": 0, "share": math.nan, "low": 0.0, "high": 1.0}
    z = 1.959963984540054
    p, n = right / count, count
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return {"right": right, "count": n, "share": p, "low": max(0.0, middle - half), "high": min(1.0, middle + half)}


def _same_call(mine: Message, right: Message) -> bool:
    """The same tool with the same arguments, compared as JSON."""
    try:
        return mine.recipient == right.recipient and json.loads(mine.content) == json.loads(right.content)
    except ValueError:
        return False
