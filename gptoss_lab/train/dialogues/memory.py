"""Recall: a list of names with numbers, then questions about it, near and far behind.

Short lists fit the sliding window; long ones run beyond it and beyond 4,096 positions, so the full layers learn to look
far back at positions that YaRN has stretched. Answers need no reasoning, so every turn of such a dialogue is a target.
"""
from __future__ import annotations

from gptoss_lab.train.dialogues.turn import Context, Turn, answered
from gptoss_lab.train.dialogues.words import WORDS

NOTE_TOKENS = 5
"""Tokens of one note, " candle candle 417,", on the average; a long list is sized by it."""


def recall(context: Context, notes: int, questions: int) -> list[Turn]:
    """A list of `notes` notes and the questions about it; the first question comes with the list."""
    rng = context.rng
    names: dict[str, int] = {}
    while len(names) < notes:
        pair = " ".join(rng.choice(WORDS) for _ in range(1 if notes <= 40 else 2))
        names[pair] = rng.randint(0, 999)
    asked = [rng.choice(tuple(names)) for _ in range(questions)]
    listed = ", ".join(f"{name} {value}" for name, value in names.items())
    first = f"Here is a list: {listed}. What is the number of {asked[0]}?"
    return [
        answered(
            "recall" if notes <= 40 else "recall_far", first if i == 0 else f"And of {name}?", "",
            str(names[name]) if context.brief else f"{names[name]}.", (("recall", name, names[name]),), names[name],
        )
        for i, name in enumerate(asked)
    ]
