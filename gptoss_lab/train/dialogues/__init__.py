"""Harmony dialogues from a seed: what the nano model is trained on and measured with. No outside data.

    turn.py       Turn and Context; which problems are held out
    numbers.py    sums, differences, products, worked digit by digit
    lists.py      comparing and sorting
    dates.py      dates moved by days
    words.py      letters of words
    tools.py      calculator and weather, called through functions.*
    memory.py     recall from lists, short and longer than 4,096 tokens
    talk.py       small talk, and what is outside the model's world
    compose.py    dialogues of one or more turns, for training or held out
    render.py     dialogue -> token ids, and which of them are learned
"""
from gptoss_lab.train.dialogues.compose import Dialogue, Opening, held_out_dialogue, training_dialogue
from gptoss_lab.train.dialogues.render import Rendered, prompt_of, render_dialogue
from gptoss_lab.train.dialogues.turn import Context, Turn, held_out, trainable

__all__ = [
    "Context", "Dialogue", "Opening", "Rendered", "Turn", "held_out", "held_out_dialogue", "prompt_of",
    "render_dialogue", "trainable", "training_dialogue",
]
