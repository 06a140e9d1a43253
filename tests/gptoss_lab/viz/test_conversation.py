"""Coloured tokens: nothing lost, nothing injected, and the same marks in the text form."""
import html
import re

import pytest

from gptoss_lab.harmony import assistant, encode, render, system, tool_call, tool_result, user
from gptoss_lab.harmony.errors import TokenIdError
from gptoss_lab.viz import conversation

CHAT = [system("low", "2025-06-28"), user("Weather in Oslo? <b>𝒳</b>"),
        tool_call("functions.get_weather", {"city": "Oslo"}), tool_result("functions.get_weather", "4 °C"),
        assistant("Cold."), assistant("Think.", "analysis")]


def shown(messages=CHAT):
    return conversation.show(render(messages, history="all", next_role=None))


def test_every_token_is_there_once_and_in_order():
    ids = render(CHAT, history="all", next_role=None)
    assert [i for span in shown().spans for i in span.ids] == ids


def test_looks_follow_role_and_channel():
    looks = {conversation.look_of(span) for span in shown().spans if span.kind == "text"}
    assert looks == {"system", "user", "commentary", "tool", "final", "analysis"}
    assert all(conversation.look_of(s) in conversation.LOOK for s in shown().spans)


def test_html_holds_the_text_escaped_and_a_legend_of_what_occurs():
    page = shown()._repr_html_()
    plain = html.unescape(re.sub(r"<[^>]*>", "", page)).replace("\xa0", " ")
    assert "Weather in Oslo? <b>𝒳</b>" in plain and "<b>" not in page
    assert conversation.LOOK["final"][2] in page and conversation.LOOK["developer"][2] not in page


def test_the_text_form_has_one_message_per_line_and_all_of_the_text():
    lines = str(shown()).splitlines()
    assert len(lines) == len(CHAT) and all(line.startswith("<|start|>") for line in lines)
    assert "𝒳" in lines[1] and lines[4].replace("¦", "").endswith("<|message|>Cold.<|end|>")


def test_malformed_output_is_shown_and_an_id_beyond_the_vocabulary_refused():
    broken = encode("<|channel|>final<|message|>Hi<|constrain|>there", special=True)
    assert "stray" in {conversation.look_of(s) for s in conversation.show(broken, "assistant").spans}
    assert str(conversation.show([])) == ""
    with pytest.raises(TokenIdError):
        conversation.show([201088])
