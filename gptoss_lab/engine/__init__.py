"""Token ids in, token ids out: a batch of ragged prompts becomes a stream of new tokens. No text, no chat format.

    from gptoss_lab.engine import Engine, SamplingParams

    engine = Engine(model)                                             # of gptoss_lab.model.load_model
    for event in engine.generate([[1, 2, 3], [4]], SamplingParams(temperature=0, max_new_tokens=20)):
        print(event.sequence, event.token, event.finish)               # finish: None, "stop", "length" or "context"

    engine.py           Engine.generate and .complete; checks the input, runs the batch
    loop.py             Loop: prompts come and are cancelled at any time (continuous batching)
    scheduler.py        which sequences take part in a step: admission, preemption, first come first served
    opening.py          from a checkpoint to a model, plain or fast, with the pages that fit
    memory.py           what the scheduler asks about memory, and where caches come from
    timeline.py         a record of what the scheduler did
    request.py          one sequence on its way: its tokens so far and when it ends
    sampling.py         SamplingParams, and from logits to a token as pure functions
    decoders/           ways of finding the next tokens behind one interface: plain, speculative, MTP
    errors.py           PromptError, SamplingError, LogitsError
"""
from gptoss_lab.engine.engine import Completion, Engine
from gptoss_lab.engine.errors import EngineError, LogitsError, PromptError, SamplingError
from gptoss_lab.engine.loop import Loop
from gptoss_lab.engine.request import Event, Failure
from gptoss_lab.engine.sampling import SamplingParams
from gptoss_lab.engine.timeline import Timeline

__all__ = [
    "Completion", "Engine", "EngineError", "Event", "Failure", "LogitsError", "Loop", "PromptError", "SamplingError",
    "SamplingParams", "Timeline",
]
