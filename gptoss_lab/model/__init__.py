"""gpt-oss as torch modules: token ids and key/value caches in, logits out, on one device, any checkpoint form.

    from gptoss_lab.model import load_model

    model = load_model(path, device="cpu", dtype=torch.bfloat16)       # HF, original, bf16 or FP8 checkpoint
    caches = [model.new_cache(), model.new_cache()]                    # one per sequence, each its own length
    logits = model(ids, lengths=[3, 1], caches=caches)                 # ids [4]: 3 new tokens, then 1; logits [2, V]

The new tokens of all sequences lie one after the other in one flat batch; a sequence's new tokens continue where its
cache ends. So prefill (many tokens, empty cache), chunked prefill (many, not empty) and decode (one each) are one call.

    Transformer             embedding, layers, norm, unembedding
      Block                 x + attention(norm(x)), x + moe(norm(x))
        RMSNorm             norm.py
        Attention           attention.py, with Rope (rope.py) and SequenceCache (cache.py)
        MoE                 moe.py: Router, then ExpertProjection gate_up and down

Which function computes an operation is chosen once, at load (operations.py); how ranks add up their parts is handed in
(collectives.py); what a notebook wants to look at is reported through `observe` (observe.py).
"""
from gptoss_lab.model.cache import SequenceCache
from gptoss_lab.model.collectives import Collectives, OneRank
from gptoss_lab.model.load import build_model, load_model
from gptoss_lab.model.observe import Recorder
from gptoss_lab.model.operations import Operations, choose_operations
from gptoss_lab.model.transformer import Transformer

__all__ = [
    "Collectives", "OneRank", "Operations", "Recorder", "SequenceCache", "Transformer", "build_model",
    "choose_operations", "load_model",
]
