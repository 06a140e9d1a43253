"""Harmony, the chat format of gpt-oss: conversations to token ids, and token ids back to messages.

It stands in front of an engine that knows only ids. No torch here, and never a network.

    ids.py          the special ids, where generation stops, the range of ids that the model has
    vocabulary.py   the vocabulary file, rebuilt and checked offline; encode, decode
    messages.py     Message, and a function for each kind: system, developer, user, assistant, tool_call, tool_result
    history.py      which reasoning of earlier turns is dropped before rendering
    render.py       messages -> ids
    header.py       the ids of a header -> role, channel, recipient, content type
    parse.py        ids -> messages, finished or streaming, strict or lenient
    show.py         ids -> spans for display as coloured tokens
    errors.py       every error of this package

A round trip:

    prompt = render([system("low", "2025-06-28"), user("What is 2 + 2?")])
    parser = StreamParser()
    for token_id in engine_output:
        for event in parser.feed(token_id):
            match event:
                case TextDelta(text, "final"): print(text, end="")
                case ToolCall(name, arguments): ...
    parser.finish()
    next_prompt = render([*conversation, *parser.messages, user("And 3 + 3?")])
"""

from gptoss_lab.harmony.errors import (
    BadHeaderError,
    HarmonyError,
    MissingHeaderError,
    ParseError,
    RenderError,
    TokenIdError,
    TruncatedHeaderError,
    UnexpectedTokenError,
    VocabularyError,
)
from gptoss_lab.harmony.history import prune
from gptoss_lab.harmony.ids import STOP_IDS, VOCABULARY_SIZE, check_id, engine_stop_ids
from gptoss_lab.harmony.messages import (
    Developer,
    Message,
    System,
    Tool,
    assistant,
    developer,
    system,
    tool_call,
    tool_result,
    user,
)
from gptoss_lab.harmony.parse import Event, MessageEnd, MessageStart, StreamParser, TextDelta, ToolCall, parse
from gptoss_lab.harmony.render import prompt_header, render, render_message
from gptoss_lab.harmony.show import Span, spans
from gptoss_lab.harmony.vocabulary import decode, encode, load_encoding, token_bytes, vocabulary_file

__all__ = [
    "STOP_IDS",
    "VOCABULARY_SIZE",
    "BadHeaderError",
    "Developer",
    "Event",
    "HarmonyError",
    "Message",
    "MessageEnd",
    "MessageStart",
    "MissingHeaderError",
    "ParseError",
    "RenderError",
    "Span",
    "StreamParser",
    "System",
    "TextDelta",
    "TokenIdError",
    "Tool",
    "ToolCall",
    "TruncatedHeaderError",
    "UnexpectedTokenError",
    "VocabularyError",
    "assistant",
    "check_id",
    "decode",
    "developer",
    "encode",
    "engine_stop_ids",
    "load_encoding",
    "parse",
    "prompt_header",
    "prune",
    "render",
    "render_message",
    "spans",
    "system",
    "token_bytes",
    "tool_call",
    "tool_result",
    "user",
    "vocabulary_file",
]
