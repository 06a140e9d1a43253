"""Ids to messages: P16, P17, P18, P23, header forms, strict and lenient, streaming."""

import openai_harmony as library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.harmony import (
    STOP_IDS,
    BadHeaderError,
    HarmonyError,
    Message,
    MessageEnd,
    MessageStart,
    MissingHeaderError,
    ParseError,
    StreamParser,
    TextDelta,
    TokenIdError,
    ToolCall,
    TruncatedHeaderError,
    UnexpectedTokenError,
    assistant,
    decode,
    encode,
    engine_stop_ids,
    load_encoding,
    parse,
    render,
    tool_call,
    tool_result,
    user,
)


def ids_of(text):
    return encode(text, special=True)


def read(text, **options):
    return parse(ids_of(text), **options)


def stream(ids, **options):
    """Return the events of each id, and those of the end."""
    parser = StreamParser(**options)
    return [parser.feed(token_id) for token_id in ids], parser.finish()


# The cases

OSLO = tool_call("functions.get_weather", '{"city":"Oslo"}')


@pytest.mark.parametrize(
    "text",
    [
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        ' to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        '<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
        ' to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>{"city":"Oslo"}<|call|>',
    ],
)
def test_p16_recipient_in_either_place(text):
    (message,) = read(text)
    assert (message.channel, message.recipient) == ("commentary", "functions.get_weather")
    assert (message.content_type, message.content) == ("<|constrain|>json", '{"city":"Oslo"}')
    assert message == OSLO and message.is_tool_call


def test_p16_rendering_puts_the_recipient_after_the_role():
    assert decode(render([OSLO], next_role=None)).startswith("<|start|>assistant to=functions.get_weather<|channel|>")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("spare", ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "<|end|><|return|>"])
def test_p17a_a_spare_token_does_not_spoil_the_answer(strict, spare):
    messages = read("<|channel|>final<|message|>Answer<|end|>" + spare, strict=strict)
    assert messages == [assistant("Answer")] and messages[0].problem is None


P17B = "I cannot do it.<|end|><|start|>assistant<|channel|>final<|message|>No<|return|>"


def test_p17b_missing_header_strict():
    with pytest.raises(MissingHeaderError) as error:
        read(P17B)
    assert error.value.raw_text == P17B and error.value.ids == tuple(ids_of(P17B)) and error.value.messages == ()


def test_p17b_missing_header_lenient():
    first, second = read(P17B, strict=False)
    assert (first.content, second.content) == ("I cannot do it.", "No")
    assert isinstance(first.problem, MissingHeaderError) and second.problem is None
    assert (first.channel, second.channel) == (None, "final")


@pytest.mark.parametrize("strict", [True, False])
def test_p17c_cut_in_the_body(strict):
    (message,) = read("<|channel|>final<|message|>Hel", strict=strict)
    assert (message.content, message.end, message.problem) == ("Hel", None, None)
    (message,) = read("<|channel|>final<|message|>", strict=strict)
    assert (message.content, message.channel, message.end) == ("", "final", None)


CUT_HEADERS = [
    "",
    "<|channel|>",
    "<|channel|>ana",
    "<|channel|>commentary to=functions.f <|constrain|>",
    " to=functions.f",
]


@pytest.mark.parametrize("text", CUT_HEADERS)
def test_p17d_cut_in_the_header_strict(text):
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for ending in ("", "<|endoftext|>"):
        with pytest.raises(TruncatedHeaderError) as error:
            read(text + ending)
        assert error.value.raw_text == text + ending
        with pytest.raises(TruncatedHeaderError) as error:
            read(before + text + ending)
        assert error.value.raw_text == "<|start|>assistant" + text + ending
        assert error.value.messages == (assistant("Hm.", "analysis"),)


@pytest.mark.parametrize("text", CUT_HEADERS)
def test_p17d_cut_in_the_header_lenient(text):
    (message,) = read(text, strict=False)
    assert message.content == text and isinstance(message.problem, TruncatedHeaderError)


def test_p18_a_character_over_several_tokens():
    events, last = stream([200005, 17196, 200008, 43120, 240, 111, 200002])
    deltas = [[e.text for e in events_of_id if isinstance(e, TextDelta)] for events_of_id in events]
    assert deltas == [[], [], [], [], [], ["𝒳"], []] and last == []
    assert parse([200005, 17196, 200008, 43120, 240, 111, 200002]) == [assistant("𝒳")]


def test_text_before_a_split_character_is_not_withheld():
    emoji = load_encoding().encode("🫠")
    assert len(emoji) > 1
    ids = [*ids_of("<|channel|>final<|message|>"), *encode("so"), *emoji, *encode(" it"), *emoji]
    events, _ = stream(ids)
    texts = [e.text for events_of_id in events for e in events_of_id if isinstance(e, TextDelta)]
    assert texts == ["so", "🫠", " it", "🫠"]


def test_bytes_that_are_no_character_do_not_withhold_the_text_after_them():
    events, _ = stream([*ids_of("<|channel|>final<|message|>"), 43120, *encode("ok"), 200007])
    texts = [e.text for events_of_id in events for e in events_of_id if isinstance(e, TextDelta)]
    assert texts == ["\ufffdok"]


TWO_CALLS = (
    '<|channel|>commentary to=functions.a <|constrain|>json<|message|>{"x":1}<|call|>'
    '<|start|>assistant<|channel|>commentary to=functions.b <|constrain|>json<|message|>{"y":2}<|call|>'
)


@pytest.mark.parametrize("end", ["<|call|>", "<|return|>", "<|end|>"])
def test_p23_two_calls(end):
    messages = read(TWO_CALLS.replace("<|call|>", end))
    assert messages == [tool_call("functions.a", '{"x":1}'), tool_call("functions.b", '{"y":2}')]
    events, _ = stream(ids_of(TWO_CALLS.replace("<|call|>", end)))
    calls = [event for events_of_id in events for event in events_of_id if isinstance(event, ToolCall)]
    assert [(call.name, call.arguments) for call in calls] == [("functions.a", '{"x":1}'), ("functions.b", '{"y":2}')]


def test_p23_a_call_that_was_cut_is_not_announced():
    events, last = stream(ids_of(TWO_CALLS)[:-2])
    assert sum(isinstance(event, ToolCall) for events_of_id in [*events, last] for event in events_of_id) == 1
    assert isinstance(last[-1], MessageEnd) and last[-1].message.is_tool_call and last[-1].message.end is None


def test_p23_stop_ids():
    assert STOP_IDS == {200002, 200012} == set(load_encoding().stop_tokens_for_assistant_actions())
    assert engine_stop_ids() == {200002, 200012, 199999}
    assert engine_stop_ids(stop_at_call=False) == {200002, 199999}


# Headers


@pytest.mark.parametrize(
    "header, fields",
    [
        ("", (None, None, None)),
        ("<|channel|>final", ("final", None, None)),
        ("<|channel|>analysis to=python code", ("analysis", "python", "code")),
        (" to=python<|channel|>analysis code", ("analysis", "python", "code")),
        ("<|channel|>commentary to=functions.f json", ("commentary", "functions.f", "json")),
        ("<|channel|>commentary  to=functions.f", ("commentary", "functions.f", None)),
        ("<|channel|>commentary to=functions.f <|constrain|> json", ("commentary", "functions.f", "<|constrain|>json")),
        ("<|channel|>commentary <|constrain|>json to=functions.f", ("commentary", "functions.f", "<|constrain|>json")),
        (" to=functions.f<|channel|>commentary to=functions.f", ("commentary", "functions.f", None)),
        ("<|channel|>commentary json", ("commentary", None, "json")),
        (" to=python code", (None, "python", "code")),
        ("<|channel|>commentary to=all", ("commentary", "all", None)),
    ],
)
def test_headers(header, fields):
    (message,) = read(header + "<|message|>x<|end|>")
    assert (message.channel, message.recipient, message.content_type) == fields
    assert (message.content, message.problem) == ("x", None)


@pytest.mark.parametrize(
    "author, role, name",
    [
        ("assistant", "assistant", None),
        ("user:bob", "user", "bob"),
        ("system", "system", None),
        ("functions.f to=assistant<|channel|>commentary", "tool", "functions.f"),
        ("python to=assistant", "tool", "python"),
    ],
)
def test_authors(author, role, name):
    (message,) = read(f"<|start|>{author}<|message|>x<|end|>", role=None)
    assert (message.role, message.name) == (role, name)


def test_a_recipient_that_is_no_tool_makes_no_call():
    (message,) = read("<|channel|>commentary to=all<|message|>x<|end|>")
    assert not message.is_tool_call


@pytest.mark.parametrize(
    "header, unread, fields",
    [
        ("<|channel|>commentary to=functions.a code x", " code x", ("commentary", "functions.a", None)),
        ("Let me look. <|channel|>commentary to=functions.a", "Let me look. ", ("commentary", "functions.a", None)),
        ("Sure", "Sure", (None, None, None)),
        (" to=functions.a<|channel|>commentary to=functions.b", " to=functions.b", ("commentary", "functions.a", None)),
        ("<|channel|>", "<|channel|>", (None, None, None)),
        ("<|channel|>final<|channel|>analysis", "<|channel|>analysis", ("final", None, None)),
        ("<|channel|>final<|constrain|>", "<|constrain|>", ("final", None, None)),
        ("<|channel|>final to=", " to=", ("final", None, None)),
        ("<|channel|>final<|reserved_200013|>x", "<|reserved_200013|>x", ("final", None, None)),
        ("<|channel|>final json<|constrain|>code", " json", ("final", None, "<|constrain|>code")),
        ("<|channel|>final <|constrain|>json code", " code", ("final", None, "<|constrain|>json")),
    ],
)
def test_headers_that_cannot_be_read_whole(header, unread, fields):
    text = header + '<|message|>{"x":1}<|end|>'
    with pytest.raises(BadHeaderError) as error:
        read(text)
    assert error.value.raw_text == text and "\n" not in str(error.value)
    words, message = read(text, strict=False)
    assert (words.content, words.role, words.channel, words.ids) == (unread, "assistant", None, None)
    assert (message.channel, message.recipient, message.content_type) == fields
    assert message.content == '{"x":1}' and isinstance(message.problem, BadHeaderError)


def test_roles_that_do_not_exist():
    for text in (
        "<|start|>robot<|message|>x<|end|>",
        "<|start|><|message|>x<|end|>",
        "<|start|>user:<|message|>x<|end|>",
    ):
        with pytest.raises(BadHeaderError):
            read(text, role=None)
        *_, message = read(text, role=None, strict=False)
        assert (message.role, message.content) == ("assistant", "x")


# Tokens where none belong


@pytest.mark.parametrize(
    "marker", ["<|channel|>", "<|message|>", "<|constrain|>", "<|startoftext|>", "<|reserved_200500|>"]
)
def test_markers_inside_a_body(marker):
    text = f"<|channel|>final<|message|>a{marker}b<|end|>"
    with pytest.raises(UnexpectedTokenError) as error:
        read(text)
    assert error.value.raw_text == text
    (message,) = read(text, strict=False)
    assert message.content == f"a{marker}b" and isinstance(message.problem, UnexpectedTokenError)


def test_a_message_that_was_never_ended():
    text = "<|channel|>analysis<|message|>t<|start|>assistant<|channel|>final<|message|>a<|return|>"
    with pytest.raises(UnexpectedTokenError) as error:
        read(text)
    assert error.value.raw_text == text
    thought, answer = read(text, strict=False)
    assert (thought, answer) == (assistant("t", "analysis"), assistant("a"))
    assert isinstance(thought.problem, UnexpectedTokenError) and answer.problem is None
    assert thought.ids == (200006, 173781, *ids_of("<|channel|>analysis<|message|>t")) and thought.end == 200006


def test_text_between_messages():
    text = "<|channel|>final<|message|>a<|end|>b<|start|>assistant<|channel|>final<|message|>c<|end|>"
    with pytest.raises(UnexpectedTokenError) as error:
        read(text)
    assert error.value.raw_text == "b<|start|>assistant<|channel|>final<|message|>c<|end|>"
    assert error.value.messages == (assistant("a"),)
    assert [m.content for m in read(text, strict=False)] == ["a", "b", "c"]


def test_a_message_without_start():
    text = "<|channel|>analysis<|message|>t<|end|><|channel|>final<|message|>a<|return|>"
    with pytest.raises(UnexpectedTokenError):
        read(text)
    assert read(text, strict=False) == [assistant("t", "analysis"), assistant("a")]


def test_text_after_a_role():
    with pytest.raises(MissingHeaderError):
        read("<|start|>assistant No way.<|end|>", role=None)
    (message,) = read("<|start|>assistant No way.<|end|>", role=None, strict=False)
    assert (message.role, message.content) == ("assistant", " No way.")


def test_a_prompt_header_written_twice():
    text = "<|start|>assistant<|channel|>final<|message|>a<|return|>"
    with pytest.raises(MissingHeaderError):
        read(text)
    (message,) = read(text, strict=False)
    assert message == assistant("a") and isinstance(message.problem, MissingHeaderError)


def test_end_of_text_ends_a_message():
    assert read("<|channel|>final<|message|>a<|endoftext|>") == [assistant("a")]


@pytest.mark.parametrize("token_id", [201088, -1, 10**12, 2.0, "1"])
@pytest.mark.parametrize("strict", [True, False])
def test_ids_that_do_not_exist(token_id, strict):
    with pytest.raises(TokenIdError):
        parse([200005, token_id], strict=strict)
    with pytest.raises(TokenIdError):
        StreamParser(strict=strict).feed(token_id)


def test_parse_errors_are_one_line_and_short():
    with pytest.raises(ParseError) as error:
        read("line\n" * 1000 + "<|end|>")
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    assert error.value.raw_text == "line\n" * 1000 + "<|end|>"


# Streaming


def test_events_of_an_answer_with_a_call():
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text += "<|channel|>commentary to=functions.f json<|message|>{}<|call|>"
    events, last = stream(ids_of(text))
    thought, call = read(text)
    assert [event for events_of_id in [*events, last] for event in events_of_id] == [
        MessageStart("assistant", None, "analysis", None, None),
        TextDelta("Hm", "analysis", None),
        TextDelta(".", "analysis", None),
        MessageEnd(thought),
        MessageStart("assistant", None, "commentary", "functions.f", "json"),
        TextDelta("{}", "commentary", "functions.f"),
        MessageEnd(call),
        ToolCall("functions.f", "{}", call),
    ]


def test_states_and_header():
    parser = StreamParser()
    assert parser.state == "header" and StreamParser(role=None).state == "between"
    for token_id in ids_of("<|channel|>final<|message|>"):
        parser.feed(token_id)
    assert parser.state == "body" and parser.header.channel == "final"
    parser.feed(200002)
    assert (parser.state, parser.header, parser.messages) == ("between", None, [assistant("")])
    parser.finish()
    assert parser.state == "done"


def test_a_parser_that_is_done_takes_no_more():
    parser = StreamParser(strict=False)
    parser.finish()
    with pytest.raises(HarmonyError, match="new one"):
        parser.feed(5)
    assert parser.finish() == [] and len(parser.messages) == 1
    failed = StreamParser()
    with pytest.raises(MissingHeaderError):
        failed.feed(200007)
    with pytest.raises(HarmonyError, match="new one"):
        failed.feed(5)


def test_messages_keep_their_tokens():
    generated = ids_of(TWO_CALLS)
    messages = parse(generated)
    assert [token_id for message in messages for token_id in message.ids] == [200006, 173781, *generated]


# Against the reference parser, for what is well formed

NAMES = st.sampled_from(["functions.f", "functions.get_weather", "python", "browser.search"])
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from(" \n{}<|end|>𝒳🫠é"), st.characters(exclude_categories=["Cs"])), max_size=30
)
MESSAGES = st.one_of(
    st.builds(user, TEXTS),
    st.builds(assistant, TEXTS, st.sampled_from(["analysis", "commentary", "final"])),
    st.builds(tool_call, NAMES, TEXTS, content_type=st.sampled_from([None, "json", "<|constrain|>json"])),
    st.builds(tool_result, NAMES, TEXTS),
)


def by_reference(ids):
    parser = library.StreamableParser(load_encoding(), role=None)
    for token_id in ids:
        parser.process(token_id)
    return [
        Message(m.author.role.value, m.content[0].text, m.channel, m.recipient, m.content_type, m.author.name)
        for m in parser.messages
    ]


@given(st.lists(MESSAGES, max_size=6))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_reads_what_is_rendered_as_the_reference_does(messages):
    ids = render(messages, history="all", next_role=None)
    parsed = parse(ids, role=None)
    assert parsed == messages == by_reference(ids)
    assert parse(ids, role=None, strict=False) == messages
    assert render(parsed, history="all", next_role=None) == ids
