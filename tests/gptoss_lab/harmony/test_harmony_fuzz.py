"""Any ids at all, half of them special: no exception but ours, and no character lost in lenient mode.

The oracle cuts the ids into messages with one regular expression over a string that has a letter for every id.
"""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptoss_lab.harmony import MessageEnd, ParseError, StreamParser, TextDelta, decode, encode, parse, render, spans

SPECIAL = [199998, 199999, 200002, 200003, 200005, 200006, 200007, 200008, 200012, 200013, 201087]
WORDS = [
    i
    for text in ("assistant", "user", "functions.f", "commentary", "final", "analysis", " to=python", " json")
    for i in encode(text)
]
WORDS += [220, 198, 43120, 240, 111, 95]  # whitespace and parts of characters
LETTERS = {200006: "S", 200008: "M", 200007: "E", 200002: "E", 200012: "E", 199999: "E"}
MESSAGE = re.compile(r"(?P<start>S?)(?P<header>[^SME]*)(?P<marker>M?)(?P<body>(?<=M)[^SE]*)?(?P<end>E?)")
ROLE = re.compile(r"\s*((system|developer|user|assistant|tool)(:\S+)?)(?=\s|$)")

IDS = st.lists(st.one_of(st.sampled_from(SPECIAL), st.sampled_from(WORDS), st.integers(0, 199_997)), max_size=60)


def expected_texts(ids):
    """Return the text of each message in `ids`, which follow <|start|>assistant, and its header if it has a body."""
    letters = "".join(LETTERS.get(i, "x") for i in ids)
    texts, headers, given_role, position = [], [], True, 0
    while position < len(letters) or given_role:
        match = MESSAGE.match(letters, position)
        start, header, body = match["start"], ids[slice(*match.span("header"))], match["body"]
        nothing = not (start and not given_role) and not header and not match["marker"]
        if given_role and start:  # the prompt's header is followed by another: nothing was written under it
            match = None
        elif match["marker"]:
            texts.append(decode(ids[slice(*match.span("body"))]) if body else "")
            headers.append(header)
        elif not given_role and nothing:
            pass  # a spare end
        elif start and not header and not match["end"] and match.end() < len(letters):
            pass  # <|start|> twice
        else:
            texts.append(without_role(header) if start else decode(header))
            headers.append(None)
        position, given_role = position if match is None else match.end(), False
    return texts, headers


def without_role(header):
    first_special = next((n for n, i in enumerate(header) if i >= 199998), len(header))
    role = ROLE.match(decode(header[:first_special]))
    return decode(header)[role.end() :] if role else decode(header)


def check_lenient(ids):
    parser = StreamParser(strict=False)
    events = [event for token_id in ids for event in parser.feed(token_id)] + parser.finish()
    texts, headers = expected_texts(ids)
    assert [m.content for m in parser.messages if m.ids is not None] == texts
    assert [event.message for event in events if isinstance(event, MessageEnd)] == parser.messages
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "".join(m.content for m in parser.messages)
    check_headers(parser.messages, headers)
    return parser.messages


def check_headers(messages, headers):
    """Every word of a header is a field of its message, or stands in the message of unread words before it."""
    unread, headers = "", iter(headers)
    for message in messages:
        if message.ids is None:
            unread = message.content
            continue
        header = next(headers)
        fields = {message.role, message.channel, f"to={message.recipient}", message.name}
        fields |= {f"{message.role}:{message.name}", (message.content_type or "").removeprefix("<|constrain|>")}
        for word in re.split(r"<\|[a-z_0-9]+\|>|\s+", decode(header)) if header else []:
            assert not word or word in fields or word in unread, (word, message, unread)
        unread = ""


@given(IDS)
@settings(max_examples=800, deadline=None, derandomize=True)
def test_lenient_keeps_every_character(ids):
    messages = check_lenient(ids)
    assert messages == parse(ids, strict=False)


@given(IDS)
@settings(max_examples=800, deadline=None, derandomize=True)
def test_strict_raises_only_its_own_error_and_loses_nothing(ids):
    try:
        messages, rest = parse(ids), ()
    except ParseError as error:
        assert error.raw_text == decode(error.ids) and "\n" not in str(error)
        messages, rest = error.messages, error.ids
    written = [i for message in messages for i in message.ids][2:] if messages else []
    written += rest
    spare = [i for i in ids if i in LETTERS and LETTERS[i] == "E"]
    assert [i for i in written if i not in spare] == [i for i in ids if i not in spare]
    assert list(rest) == ids[len(ids) - len(rest) :]
    assert all(message.problem is None for message in messages)


@given(IDS)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_lenient_has_a_problem_exactly_where_strict_raises(ids):
    try:
        messages = parse(ids)
    except ParseError:
        assert any(message.problem for message in parse(ids, strict=False))
    else:
        assert parse(ids, strict=False) == messages


@given(IDS, st.sampled_from(["assistant", None]))
@settings(max_examples=600, deadline=None, derandomize=True)
def test_spans_are_the_ids_and_their_text(ids, role):
    shown = spans(ids, role)
    assert [i for span in shown for i in span.ids] == ids
    bodies = [m for m in parse(ids, role, strict=False) if m.ids is not None]
    if role is not None and all(m.problem is None for m in bodies):
        assert "".join(span.text for span in shown if span.kind == "text") == "".join(m.content for m in bodies)


@given(IDS)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_what_was_read_can_be_rendered_and_forges_nothing(ids):
    messages = [m for m in parse(ids, strict=False) if m.role == "assistant"]
    rendered = render(messages, history="all", next_role=None)
    again = parse(rendered, role=None)
    assert [m.content for m in again] == [m.content for m in messages]


@pytest.mark.slow
def test_a_million_tokens():
    random_numbers = random.Random(20250805)
    read = 0
    while read < 1_000_000:
        length = random_numbers.choice([1, 3, 10, 100, 1000])
        ids = [
            random_numbers.choice(SPECIAL)
            if random_numbers.random() < 0.5
            else random_numbers.choice(WORDS)
            if random_numbers.random() < 0.5
            else random_numbers.randrange(199_998)
            for _ in range(length)
        ]
        check_lenient(ids)
        read += length
