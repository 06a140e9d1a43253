"""Ids as labelled spans."""

import pytest

from gptoss_lab.harmony import Span, TokenIdError, assistant, decode, encode, render, spans, system, tool_call, user
from gptoss_lab.harmony.show import KINDS, glyphs


def labels(text, role="assistant"):
    return [(span.text, span.kind) for span in spans(encode(text, special=True), role)]


def test_a_generated_call():
    assert labels("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>") == [
        ("<|channel|>", "marker"),
        ("comment", "channel"),
        ("ary", "channel"),
        (" to", "recipient"),
        ("=", "recipient"),
        ("functions", "recipient"),
        (".f", "recipient"),
        (" ", "recipient"),
        ("<|constrain|>", "marker"),
        ("json", "content_type"),
        ("<|message|>", "marker"),
        ("{}", "text"),
        ("<|call|>", "marker"),
    ]


def test_every_span_knows_its_message():
    shown = spans(
        encode(
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>A<|return|>",
            special=True,
        )
    )
    assert [(span.role, span.channel) for span in shown] == [("assistant", "analysis")] * 5 + [
        ("assistant", "final")
    ] * 7
    assert shown[0] == Span("<|channel|>", "marker", (200005,), "assistant", "analysis", None)


def test_a_whole_conversation():
    ids = render(
        [system("low", "2025-06-28"), user("Hi <|end|>"), assistant("Hm", "analysis"), tool_call("functions.f", "{}")]
    )
    shown = spans(ids, role=None)
    assert "".join(span.text for span in shown) == decode(ids)
    assert {span.kind for span in shown} == set(KINDS) - {"stray"}
    assert [span.text for span in shown if span.kind == "role"] == [
        "system",
        "user",
        "assistant",
        "assistant",
        "assistant",
    ]
    assert "".join(span.text for span in shown if span.role == "user" and span.kind == "text") == "Hi <|end|>"


def test_tokens_of_one_character_share_a_span():
    shown = spans([200005, 17196, 200008, 43120, 240, 111, 200002])
    assert [(span.text, span.ids) for span in shown if span.kind == "text"] == [("𝒳", (43120, 240, 111))]


def test_what_has_no_place_is_stray():
    assert labels("<|channel|>final<|message|>a<|channel|>b<|end|><|return|>")[3:] == [
        ("a", "text"),
        ("<|channel|>", "stray"),
        ("b", "text"),
        ("<|end|>", "marker"),
        ("<|return|>", "stray"),
    ]
    assert labels("<|channel|>final<|channel|>other<|message|>a")[2:4] == [("<|channel|>", "stray"), ("other", "text")]
    assert labels("No.<|end|>") == [("No", "text"), (".", "text"), ("<|end|>", "marker")]
    assert labels("<|start|>assistant No.<|end|>", None) == [
        ("<|start|>", "marker"),
        ("assistant", "role"),
        (" No", "text"),
        (".", "text"),
        ("<|end|>", "marker"),
    ]
    assert labels("Sure <|channel|>final<|message|>a")[:2] == [("Sure", "text"), (" ", "text")]


def test_nothing_to_show():
    assert spans([]) == [] and spans([], None) == []


def test_glyphs_join_to_the_decoded_text():
    for ids in ([43120], [43120, 64], [43120, 240, 111], [64, 43120]):
        pieces = glyphs(ids)
        assert "".join(text for text, _ in pieces) == decode(ids)
        assert [i for _, part in pieces for i in part] == ids


def test_bad_ids():
    with pytest.raises(TokenIdError):
        spans([201088])
