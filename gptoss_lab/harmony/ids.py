"""The token ids that carry Harmony's structure, and the range that the model knows.

What: names for the special ids, the ids at which generation stops, and the range check that every id passes before it
is decoded or embedded. How: plain constants, so nothing has to be loaded to know when to stop.
Why the range check: the model's embedding has rows 0..201087, but the vocabulary of openai-harmony 0.0.8 also defines
id 201088 as "<|reserved_201088|>", one past the last row. An id taken from such text would read outside the table.
What is lost: nothing; no id above 201087 has a meaning for the model.
"""

from __future__ import annotations

import operator

from gptoss_lab.harmony.errors import TokenIdError

FIRST_SPECIAL = 199998
"""First special id; every id from here to the end of the vocabulary is special, every id below is ordinary text."""
VOCABULARY_SIZE = 201088
"""Number of ids, which is the number of rows of the embedding: ids are 0..201087."""

END_OF_TEXT = 199999
"""<|endoftext|>: padding, and the end of a raw text completion. Never part of a message."""
RETURN = 200002
"""<|return|>: the model has finished its answer."""
CONSTRAIN = 200003
"""<|constrain|>: the next word of the header is the format that the body keeps to, such as json."""
CHANNEL = 200005
"""<|channel|>: the next word of the header is the channel."""
START = 200006
"""<|start|>: a header begins."""
END = 200007
"""<|end|>: the message ends, and another one follows."""
MESSAGE = 200008
"""<|message|>: the header ends and the body begins."""
CALL = 200012
"""<|call|>: the message ends, and it calls a tool."""

STOP_IDS = frozenset({RETURN, CALL})
"""Where the format stops generation. <|end|> does not: after it the model goes on with its next message."""
TERMINATORS = frozenset({END, RETURN, CALL, END_OF_TEXT})
"""The ids that end a message for the parser."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who can write a message, in order of authority."""
CHANNELS = ("analysis", "commentary", "final")
"""Chain of thought; tool calls and remarks around them; the answer."""


def engine_stop_ids(*, stop_at_call: bool = True) -> frozenset[int]:
    """Return the ids at which an engine stops: `STOP_IDS` and <|endoftext|>, which would otherwise become text.

    `stop_at_call=False` lets the model write on after a tool call, to collect several calls in one generation.
    """
    return (STOP_IDS if stop_at_call else STOP_IDS - {CALL}) | {END_OF_TEXT}


def check_id(token_id: int) -> int:
    """Return `token_id` as an int, or raise `TokenIdError` when it is not one of 0..201087."""
    try:
        index = operator.index(token_id)
    except TypeError:
        raise TokenIdError(f"token id {token_id!r} is not an integer; ids are 0..{VOCABULARY_SIZE - 1}") from None
    if not 0 <= index < VOCABULARY_SIZE:
        raise TokenIdError(f"token id {index} is outside the model's vocabulary; ids are 0..{VOCABULARY_SIZE - 1}")
    return index
