"""The API against schemathesis: requests made from its own description, and broken ones, for a bounded time.

No answer is a server error, every status and body is one that the description has. The engine answers at once.
"""
import time

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from serve_live import serving
from serve_script import scripted

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
SECONDS = 25
"""For each operation, at most."""
POSITIVE, NEGATIVE = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
POSTS, GETS = ("/v1/chat/completions", "/v1/responses"), ("/v1/models", "/v1/models/{model}", "/health", "/metrics")
CASES = [*(("POST", path, mode) for path in POSTS for mode in (POSITIVE, NEGATIVE)),
         *(("GET", path, POSITIVE) for path in GETS)]


@pytest.fixture(scope="module")
def live():
    with serving(scripted(), max_body=200_000) as running:
        yield running


def kept_to_our_model(case):
    """Half of the bodies name the model that is there, so that they get further than its name."""
    if isinstance(case.body, dict) and "model" in case.body and len(str(case.body)) % 2:
        case.body["model"] = "nano"
    return case


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_request_breaks_the_server(live, method, path, mode):
    """positive: requests that fit the description; negative: those that do not."""
    operation = schemathesis.openapi.from_url(live.url + "/openapi.json")[path][method]
    until, answered = time.monotonic() + SECONDS, {}

    @settings(max_examples=50, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case):
        if time.monotonic() > until:
            return
        response = kept_to_our_model(case).call(timeout=20)
        answered[response.status_code] = answered.get(response.status_code, 0) + 1
        case.validate_response(response, checks=CHECKS)

    one()
    assert answered, "nothing was sent"
    if method == "POST":
        assert (400 if mode.is_negative else 200) in answered, answered
    assert live.server.engine.deaths == 0 and live.server.open == 0


def test_bytes_that_are_no_json_are_refused(live):
    deep = b"[" * 100_000
    for body in (b"", b"{", b"\xff\xfe", b"null", b"[]", b'"x"', deep, b'{"model": NaN}', b'{"a":1,"a":2}'):
        for path in ("/v1/chat/completions", "/v1/responses"):
            answer = requests.post(live.url + path, data=body, headers={"Content-Type": "application/json"}, timeout=20)
            assert answer.status_code == 400, (body[:20], answer.text)
            assert answer.json()["error"]["type"] == "invalid_request_error"
    lone = '{"model": "nano", "messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = requests.post(live.url + "/v1/chat/completions", data=lone, timeout=20,
                           headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400) and live.server.engine.deaths == 0
