"""Many streams at once on the real model code with nano: each says what its prompt yields alone, greedily, in fp32."""
import asyncio
import functools
import random

import openai
import pytest
import torch
from serve_live import serving

from gptoss_lab.checkpoint import ensure_nano
from gptoss_lab.engine import Engine, SamplingParams
from gptoss_lab.harmony import decode, engine_stop_ids, parse, render, system, user
from gptoss_lab.model import load_model
from gptoss_lab.serve import load_loop

STREAMS, TOKENS = 64, 8
WORDS = ("river", "stone", "naïve", "seven", "雪", "lamp", "🙂", "quartz", "Zürich", "blue")


def questions():
    """Sums after 1 to 12 words: prompts of many lengths, each with an answer of its own."""
    draw, texts = random.Random(0), []
    for i in range(STREAMS):
        words = " ".join(draw.choices(WORDS, k=1 + i % 12))
        texts.append(f"{words} What is {draw.randint(100, 999)} + {draw.randint(100, 999)}?")
    return texts


def alone(model, text):
    """The text and the token count of a prompt that runs by itself, without server, loop or batch."""
    prompt = render([system("low", "2025-06-28"), user(text)])
    params = SamplingParams(temperature=0, max_new_tokens=TOKENS, stop_ids=tuple(engine_stop_ids()))
    tokens = Engine(model).complete([prompt], params)[0].tokens
    return "\n\n".join(m.content for m in parse(tokens, strict=False)), len(tokens), tokens


async def stream(client, text, delay):
    """One client: asks after `delay` seconds and puts its stream together."""
    await asyncio.sleep(delay)
    content, usage = "", None
    async for chunk in await client.chat.completions.create(
        model="nano", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=TOKENS, stream=True,
        stream_options={"include_usage": True}, reasoning_effort="low",
    ):
        usage = chunk.usage or usage
        if chunk.choices:
            content += (chunk.choices[0].delta.content or "") + (getattr(chunk.choices[0].delta, "reasoning", "") or "")
    return content, usage.completion_tokens


async def all_streams(url, texts):
    draw = random.Random(1)
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=300) as client:
        return await asyncio.gather(*(stream(client, text, draw.random()) for text in texts))


@pytest.mark.slow
def test_64_streams_say_what_their_prompts_yield_alone():
    torch.set_num_threads(1)
    path, texts = ensure_nano(), questions()
    with serving(functools.partial(load_loop, str(path), "cpu", "float32", STREAMS)) as live:
        got = asyncio.run(all_streams(live.url, texts))
    model = load_model(path, dtype=torch.float32)
    expected = [alone(model, text) for text in texts]
    assert got == [(text, count) for text, count, _ in expected]
    assert len({tokens for _, _, tokens in expected}) > STREAMS // 2, "the prompts must not all yield the same"
    assert all(decode(tokens) for _, _, tokens in expected)
