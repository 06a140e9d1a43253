"""Chat formats by name: a conversation to ids, and ids to events, whatever the model was trained on.

    from gptoss_lab.harmony.formats import choose_format

    chat = choose_format("harmony")                 # or "chatml", or the name of a plug-in
    prompt = chat.render([system("low"), user("What is 2 + 2?")])
    reader = chat.reader()
    for token_id in engine_output:                  # an engine that stops at chat.stop_ids()
        for event in reader.feed(token_id): ...     # MessageStart, TextDelta, MessageEnd, ToolCall

    protocol.py         what a format is: ChatFormat, Reader
    harmony_format.py   gpt-oss's own
    chatml.py           a second, small one: roles on a line, thinking and calls between markers
    registry.py         choose_format, format_names; plug-ins by entry point

A server that is written against the protocol needs no change for a new format: conversations are lists of `Message` and
answers are events, the same ones for all.
"""
from gptoss_lab.harmony.formats.chatml import ChatML
from gptoss_lab.harmony.formats.harmony_format import Harmony
from gptoss_lab.harmony.formats.protocol import ChatFormat, Reader
from gptoss_lab.harmony.formats.registry import FormatError, choose_format, format_names

__all__ = ["ChatFormat", "ChatML", "FormatError", "Harmony", "Reader", "choose_format", "format_names"]
