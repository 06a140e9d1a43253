"""The engine: a batch of prompts as token ids in, an iterator of new token ids out. It knows no text.

All prompts enter together. Every step moves the whole batch on through the decoder; a sequence that is finished leaves
the batch, and the rest go on without it. Where the caches lie in a pool that is too small for all, some wait
(scheduler.py). Everything about the input is checked before the first step.

Greedy or seeded, what a sequence yields is a function of its own prompt and parameters: its draws do not depend on the
batch (sampling.py), and its logits only as far as the model's arithmetic rounds differently for another batch shape.
What is lost: prompts that arrive later wait for the next batch; `Loop` (loop.py) lets them join.
"""
from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gptoss_lab.engine.decoders import Decoder
from gptoss_lab.engine.decoders.cached import Model
from gptoss_lab.engine.decoders.plain import PlainDecoder
from gptoss_lab.engine.errors import LogitsError, PromptError, SamplingError
from gptoss_lab.engine.memory import memory_of
from gptoss_lab.engine.request import Event, Failure, Request
from gptoss_lab.engine.sampling import SamplingParams
from gptoss_lab.engine.scheduler import Scheduler

Sampling = SamplingParams | Sequence[SamplingParams]
DEFAULT = SamplingParams()
"""The model's own distribution, at most 256 new tokens, the model's own stop ids."""


@dataclass(frozen=True)
class Completion:
    """All that one sequence yielded: new token ids, their log-probabilities (None unless asked for), why it ended."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish: str


class Engine:
    """Runs prompts on a loaded model.

    model: a `gptoss_lab.model.Transformer`, or whatever has its `config`, `new_cache` and call. decoder: how tokens are
    found; the plain one unless given.
    """

    def __init__(self, model: Model, decoder: Decoder | None = None) -> None:
        self.config = model.config
        self.decoder = PlainDecoder(model) if decoder is None else decoder
        self.memory = memory_of(self.decoder)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling = DEFAULT) -> Iterator[Event]:
        """Stream the new tokens of a batch.

        prompts: ragged, each of at least one token id and at most the model's length. sampling: one for all (then
        equal prompts with a seed yield equal tokens), or one for each. Yields an `Event` for every new token, step by
        step and within a step in the order of the prompts; a sequence's last event has `finish` set. A stop id is
        yielded too.

        Raises at once, before anything runs, PromptError or SamplingError; while running, LogitsError. Closing the
        iterator ends the work and frees the caches.
        """
        return self._run(self._requests(prompts, sampling))

    def complete(self, prompts: Sequence[Sequence[int]], sampling: Sampling = DEFAULT) -> list[Completion]:
        """`generate`, collected: one `Completion` for each prompt, in their order."""
        events: list[list[Event]] = [[] for _ in prompts]
        for event in self.generate(prompts, sampling):
            events[event.sequence].append(event)
        return [
            Completion(tuple(e.token for e in own), tuple(e.logprob for e in own), own[-1].finish) for own in events
        ]

    def _run(self, batch: list[Request]) -> Iterator[Event]:
        scheduler = Scheduler(self.decoder, max(1, len(batch)))
        for request in batch:
            scheduler.add(request)
        try:
            while not scheduler.idle:
                for event in scheduler.step():
                    if isinstance(event, Failure):
                        raise LogitsError(event.message, event.sequence)
                    yield event
        finally:
            scheduler.clear()

    def _requests(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Request]:
        checked = [self._check_prompt(index, prompt) for index, prompt in enumerate(prompts)]
        each = [sampling] * len(checked) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(checked):
            raise SamplingError(
                f"sampling has {len(each)} entries for {len(checked)} prompts; one for each is expected"
            )
        return [self._request(index, *pair) for index, pair in enumerate(zip(checked, each, strict=True))]

    def request(self, index: int, prompt: Sequence[int], params: SamplingParams = DEFAULT) -> Request:
        """A checked sequence that has not started, for whoever runs batches themselves (loop.py).

        index: how events and errors name it. prompt, params: as for `generate`. PromptError, SamplingError.
        """
        return self._request(index, self._check_prompt(index, prompt), params)

    def _request(self, index: int, tokens: list[int], params: SamplingParams) -> Request:
        stops = self.config.eos_token_ids if params.stop_ids is None else params.stop_ids
        for stop in stops:
            if not 0 <= stop < self.config.vocab_size:
                raise SamplingError(
                    f"sequence {index}: stop id {stop} is out of range; ids are 0..{self.config.vocab_size - 1}"
                )
        # The last new token is never fed back, so it needs no position of its own.
        room = self.config.max_position_embeddings - len(tokens) + 1
        request = Request(index, tokens, params.seeded(), frozenset(stops), room)
        self.memory.check(request)
        return request

    def _check_prompt(self, index: int, prompt: Sequence[int]) -> list[int]:
        if isinstance(prompt, (str, bytes)) or not hasattr(prompt, "__iter__"):
            raise PromptError(f"prompt {index} is {prompt!r:.60}; a list of token ids is expected")
        tokens = [self._check_token(index, position, token) for position, token in enumerate(prompt)]
        if not tokens:
            raise PromptError(f"prompt {index} is empty; at least one token id is expected")
        if len(tokens) > self.config.max_position_embeddings:
            raise PromptError(
                f"prompt {index} has {len(tokens)} tokens; the model's length is {self.config.max_position_embeddings}"
            )
        return tokens

    def _check_token(self, index: int, position: int, token: int) -> int:
        try:
            number = operator.index(token)
        except TypeError:
            raise PromptError(f"prompt {index}: {token!r:.60} at position {position} is not a token id") from None
        if not 0 <= number < self.config.vocab_size:
            raise PromptError(
                f"prompt {index}: token id {number} at position {position} is out of range; "
                f"ids are 0..{self.config.vocab_size - 1}"
            )
        return number
