"""Which reasoning is kept between turns (P22), and equality of the rule "reference" with the reference."""

import openai_harmony as library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.harmony import (
    assistant,
    decode,
    encode,
    load_encoding,
    parse,
    prune,
    render,
    tool_call,
    tool_result,
    user,
)

CALL = tool_call("functions.f", "{}")
TWO_TURNS = [
    user("q1"),
    assistant("t1", "analysis"),
    assistant("a1"),
    user("q2"),
    assistant("t2", "analysis"),
    assistant("a2"),
    user("q3"),
]
OPEN_CALL = [user("q1"), assistant("t1", "analysis"), CALL, tool_result(CALL, "r1")]


def texts(messages, rule):
    return [message.content for message in prune(messages, rule)]


def test_p22_both_rules():
    assert texts(TWO_TURNS, "format") == ["q1", "a1", "q2", "a2", "q3"]
    assert texts(TWO_TURNS, "reference") == ["q1", "a1", "q2", "t2", "a2", "q3"]
    assert texts(TWO_TURNS, "all") == ["q1", "t1", "a1", "q2", "t2", "a2", "q3"]


def test_p22_as_rendered():
    assert "t1" not in decode(render(TWO_TURNS)) and "t2" not in decode(render(TWO_TURNS))
    reference = decode(render(TWO_TURNS, history="reference"))
    assert "t1" not in reference and "t2" in reference


@pytest.mark.parametrize("rule", ["format", "reference", "all"])
def test_p22_reasoning_stays_while_a_call_is_open(rule):
    assert texts(OPEN_CALL, rule) == ["q1", "t1", "{}", "r1"]


def test_reasoning_before_an_open_call_stays_and_that_of_the_turn_before_goes():
    messages = [*TWO_TURNS[:3], user("q2"), assistant("t2", "analysis"), CALL, tool_result(CALL, "r")]
    assert texts(messages, "format") == ["q1", "a1", "q2", "t2", "{}", "r"]


def test_once_answered_the_call_stays_and_its_reasoning_goes():
    messages = [*OPEN_CALL, assistant("t1b", "analysis"), assistant("a1"), user("q2")]
    assert texts(messages, "format") == ["q1", "{}", "r1", "a1", "q2"]


def test_remarks_on_commentary_stay():
    messages = [user("q1"), assistant("t1", "analysis"), assistant("remark", "commentary"), assistant("a1")]
    assert texts(messages, "format") == ["q1", "remark", "a1"]


def test_calls_on_analysis_go_with_their_results():
    call = tool_call("python", "1+1", channel="analysis", content_type="code")
    for result in (tool_result(call, "2"), tool_result("python", "2")):  # the second on commentary
        assert texts([user("q1"), call, result, assistant("a1"), user("q2")], "format") == ["q1", "a1", "q2"]
        assert texts([user("q1"), call, result], "format") == ["q1", "1+1", "2"]


def test_one_call_on_analysis_and_one_on_commentary_of_the_same_tool():
    hidden = tool_call("functions.f", "hidden", channel="analysis")
    messages = [hidden, tool_result("functions.f", "r1"), CALL, tool_result("functions.f", "r2"), assistant("a")]
    assert texts(messages, "format") == ["{}", "r2", "a"]


def test_parsed_messages_are_pruned_like_written_ones():
    answer = parse(
        encode(
            "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>",
            special=True,
        )
    )
    assert texts([user("q"), *answer, user("q2")], "format") == ["q", "a", "q2"]


def test_the_list_that_was_given_is_not_changed():
    messages = list(TWO_TURNS)
    prune(messages)
    assert messages == TWO_TURNS


KINDS = {
    "user": user("u"),
    "thought": assistant("t", "analysis"),
    "answer": assistant("a"),
    "remark": assistant("c", "commentary"),
    "call": CALL,
    "result": tool_result(CALL, "r"),
}


def as_library(message):
    author = library.Author(role=library.Role(message.role), name=message.name)
    return library.Message(
        author=author,
        content=[library.TextContent(text=message.content)],
        channel=message.channel,
        recipient=message.recipient,
        content_type=message.content_type,
    )


@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=10))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_rule_named_reference_is_the_references(kinds):
    messages = [KINDS[kind] for kind in kinds]
    conversation = library.Conversation.from_messages([as_library(message) for message in messages])
    expected = load_encoding().render_conversation_for_completion(conversation, library.Role.ASSISTANT)
    assert render(messages, history="reference") == expected
