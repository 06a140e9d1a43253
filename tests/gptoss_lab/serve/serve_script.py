"""An engine that says what it is told to. Its process imports this file: nothing here needs HTTP."""
import functools
import json
import os
import sys
import time

from gptoss_lab.config import preset
from gptoss_lab.engine import Engine, LogitsError, Loop
from gptoss_lab.engine.request import NewToken
from gptoss_lab.harmony import encode

CRASH, BAD_LOGITS = -1, -2
"""In a script: the engine's process ends here; the logits of this sequence are bad here."""


class Scripted:
    """A decoder that answers the last user text with what `script` has for it: ids, one a step.

    A text that the script lacks is answered by `fallback`. seconds: how long a step takes.
    """

    def __init__(self, script, fallback, seconds):
        self.script = {tuple(encode(text)): list(ids) for text, ids in script.items()}
        self.fallback, self.seconds = list(fallback), seconds

    def start(self, request):
        request.state = next((ids for text, ids in self.script.items() if _ends_with(request.tokens, text)),
                             self.fallback)

    def step(self, batch):
        time.sleep(self.seconds)
        return [[self._next(request)] for request in batch]

    def _next(self, request):
        written = len(request.tokens) - request.prompt_length
        token = request.state[written] if written < len(request.state) else 200002
        if token == CRASH:
            os._exit(7)
        if token == BAD_LOGITS:
            raise LogitsError("the logits are nan", request.index)
        wanted = request.params.logprobs or request.params.top_logprobs
        top = tuple((token + i, -0.25 - i) for i in range(request.params.top_logprobs))
        return NewToken(token, -0.25 if wanted else None, top)


def _ends_with(tokens, text):
    """Whether the last body of the prompt is `text`: from <|message|>, or a line break, to <|end|> or <im_end>."""
    end = max(i for i, token in enumerate(tokens) if token in (200007, 200014))
    begin = end - len(text)
    return tuple(tokens[begin:end]) == text and tokens[begin - 1] in (200008, 198)


def scripted_loop(script, fallback, seconds=0.0, max_batch=64):
    """Made in the engine's process."""
    engine = Engine(_Shape(), Scripted(script, fallback, seconds))
    return Loop(engine, max_batch)


class _Shape:
    """What the engine asks of a model when the decoder needs none."""

    config = preset("nano")


def ids(text):
    """The ids of a text in which special tokens are spelled."""
    return encode(text, special=True)


FINAL = ids("<|channel|>final<|message|>fine<|return|>")
BODY = ids("<|channel|>final<|message|>")


def scripted(script=None, fallback=FINAL, **options):
    """A `build` for `serving`."""
    return functools.partial(scripted_loop, script or {}, fallback, **options)


class Batches(Scripted):
    """Writes the numbers of the sequences in the batch to a file before every step."""

    def __init__(self, path, *arguments):
        super().__init__(*arguments)
        self.path = path

    def step(self, batch):
        with open(self.path + ".new", "w") as file:
            json.dump([r.index for r in batch], file)
        os.replace(self.path + ".new", self.path)
        return super().step(batch)


def watched_loop(path, script, seconds):
    return Loop(Engine(_Shape(), Batches(path, script, BODY, seconds)), 2)


def no_loop(message):
    """What cannot be made; its word says that the engine's process has loaded no HTTP."""
    raise ValueError(message + (", no HTTP" if not {"fastapi", "openai", "uvicorn"} & set(sys.modules) else ""))
