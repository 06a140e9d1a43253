"""/v1/responses with the official client: items whole and as they grow, calls and their outputs, what is remembered."""
import openai
import pytest
from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseReasoningItem
from serve_live import serving
from serve_script import BAD_LOGITS, ids, scripted

from gptoss_lab.harmony import decode

CALL = ids("<|channel|>analysis<|message|>look it up<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
           "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
           '{"city":"Oslo"}<|call|>')
HELLO = ids("<|channel|>analysis<|message|>a greeting<|end|><|start|>assistant<|channel|>final<|message|>"
            "Hello there<|return|>")
SCRIPT = {
    "hello": HELLO, "weather?": CALL,
    "rain": ids("<|channel|>final<|message|>It rains.<|return|>"),
    "and then?": ids("<|channel|>final<|message|>Sun.<|return|>"),
    "broken": [*ids("<|channel|>final<|message|>so far so"), BAD_LOGITS],
    "script": [*ids("<|channel|>final<|message|>"), 43120, 240, 111, 200002],
}
TOOL = {"type": "function", "name": "get_weather", "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


@pytest.fixture(scope="module")
def live():
    with serving(scripted(SCRIPT)) as running:
        yield running


@pytest.fixture
def prompts(live, monkeypatch):
    """The prompts that go to the engine, as ids."""
    seen, submit = [], live.server.engine.submit
    monkeypatch.setattr(live.server.engine, "submit",
                        lambda prompt, params: (seen.append(prompt), submit(prompt, params))[1])
    return seen


def ask(live, text, **options):
    return live.client.responses.create(model="nano", input=text, **options)


def shown(response):
    """What the items say, without their ids."""
    items = []
    for item in response.output:
        if isinstance(item, ResponseReasoningItem):
            items.append(("reasoning", item.content[0].text))
        elif isinstance(item, ResponseOutputMessage):
            items.append((item.phase, item.content[0].text))
        else:
            assert isinstance(item, ResponseFunctionToolCall)
            items.append((item.name, item.arguments))
    return items


def test_reasoning_and_answer_are_items_of_their_own(live, prompts):
    response = ask(live, "hello", instructions="Be brief.", reasoning={"effort": "high"}, metadata={"a": "b"})
    assert shown(response) == [("reasoning", "a greeting"), ("final_answer", "Hello there")]
    assert response.output_text == "Hello there" and response.status == "completed" and response.error is None
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief."
    usage = response.usage
    assert usage.input_tokens == len(prompts[0]) and usage.output_tokens == len(HELLO)
    assert usage.output_tokens_details.reasoning_tokens == HELLO.index(200007) + 1
    assert "Reasoning: high" in decode(prompts[0]) and "Be brief." in decode(prompts[0])


@pytest.mark.parametrize("text", ["hello", "weather?", "script"])
def test_the_stream_is_the_same_items_as_they_grow(live, text):
    """Deltas, done events and the final response agree, in order and with numbers that count up."""
    with live.client.responses.stream(model="nano", input=text) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert shown(final) == shown(ask(live, text))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert [e.type for e in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed" and events[-1].response.status == "completed"
    for index, (_, said) in enumerate(shown(final)):
        own = [e for e in events if getattr(e, "output_index", None) == index]
        assert own[0].type == "response.output_item.added" and own[0].item.status == "in_progress"
        assert own[-1].type == "response.output_item.done" and own[-1].item.id == final.output[index].id
        assert "".join(e.delta for e in own if e.type.endswith(".delta")) == said
        assert [getattr(e, "text", None) or getattr(e, "arguments", None) for e in own
                if e.type in ("response.output_text.done", "response.reasoning_text.done",
                              "response.function_call_arguments.done")] == [said]


def test_a_call_and_its_output_continue_the_conversation_with_the_models_own_tokens(live, prompts):
    first = ask(live, "weather?", tools=[TOOL])
    assert shown(first) == [("reasoning", "look it up"), ("commentary", "I look."),
                            ("get_weather", '{"city":"Oslo"}')]
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "rain"}
    second = ask(live, [output], previous_response_id=first.id, tools=[TOOL])
    assert second.output_text == "It rains." and second.previous_response_id == first.id
    assert prompts[1][: len(prompts[0]) + len(CALL)] == prompts[0] + CALL
    third = ask(live, "and then?", previous_response_id=second.id)
    assert third.output_text == "Sun."
    text = decode(prompts[2])
    assert "It rains." in text and "look it up" not in text  # the turn has ended in a final answer


def test_items_that_come_back_from_the_client_are_understood(live, prompts):
    first = ask(live, "weather?", tools=[TOOL], store=False)
    items = [{"role": "user", "content": "weather?"},
             *(item.model_dump(exclude_none=True) for item in first.output),
             {"type": "function_call_output", "call_id": first.output[-1].call_id,
              "output": [{"type": "input_text", "text": "rain"}]}]
    second = ask(live, items, tools=[TOOL])
    assert second.output_text == "It rains."
    text = decode(prompts[1])
    assert ("<|channel|>analysis<|message|>look it up<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            '<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>'
            '{"city":"Oslo"}<|call|>'
            "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>rain") in text


def test_an_answer_that_is_cut_is_incomplete(live):
    cut = ask(live, "hello", max_output_tokens=len(HELLO) - 2)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[-1].status == "incomplete" and cut.output_text == "Hello"
    events = list(ask(live, "hello", max_output_tokens=len(HELLO) - 2, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "Hello"


def test_a_failure_inside_a_stream_is_its_last_event(live):
    events = list(ask(live, "broken", stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].response.error.message == "the logits are nan"
    assert events[-1].response.output[0].content[0].text == "so far so"
    with pytest.raises(openai.InternalServerError, match="the logits are nan"):
        ask(live, "broken")


def test_logprobs_where_they_are_asked_for(live):
    response = ask(live, "hello", include=["message.output_text.logprobs"], top_logprobs=2)
    part = response.output[-1].content[0]
    assert [(t.token, t.logprob, len(t.top_logprobs)) for t in part.logprobs] == [
        ("Hello", -0.25, 2), (" there", -0.25, 2)]
    events = list(ask(live, "hello", include=["message.output_text.logprobs"], stream=True))
    deltas = [e for e in events if e.type == "response.output_text.delta"]
    assert [t.token for e in deltas for t in e.logprobs] == ["Hello", " there"]
    assert ask(live, "hello").output[-1].content[0].logprobs == []


@pytest.mark.parametrize(("change", "status", "text"), [
    ({"previous_response_id": "resp_0"}, 404, "response 'resp_0' is not known"),
    ({"input": []}, 400, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input.0"),
    ({"input": [{"role": "user"}]}, 400, "input.0.message.content: Field required"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, 400, "no earlier function_call"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools.0.type"),
    ({"background": True}, 400, "background"),
    ({"text": {"format": {"type": "json_object"}}}, 400, "text.format.type"),
    ({"top_logprobs": 1}, 400, "top_logprobs is only for include"),
    ({"model": "x"}, 404, "model 'x' does not exist"),
    ({"conversation": "x"}, 400, "Extra inputs"),
])
def test_bad_requests_are_refused(live, change, status, text):
    with pytest.raises(openai.APIStatusError) as caught:
        live.client.post("/responses", body={"model": "nano", "input": "hello", **change}, cast_to=object)
    assert caught.value.status_code == status and text in caught.value.body["message"]


def test_what_was_not_stored_cannot_be_continued_and_a_call_of_another_conversation_not_answered(live):
    unstored = ask(live, "weather?", store=False)
    with pytest.raises(openai.NotFoundError, match="is not known"):
        ask(live, "and then?", previous_response_id=unstored.id)
    other, mine = ask(live, "weather?"), ask(live, "hello")
    output = {"type": "function_call_output", "call_id": other.output[-1].call_id, "output": "rain"}
    with pytest.raises(openai.BadRequestError, match="no earlier function_call has this call_id"):
        ask(live, [output], previous_response_id=mine.id)
