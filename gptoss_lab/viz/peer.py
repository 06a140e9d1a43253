"""The same weights in another implementation: transformers, with its own MXFP4 decoding, in fp32.

A forward pass that is only compared with itself proves nothing. Transformers is an optional package, and fp32 takes
eight times the bytes of MXFP4, so `obstacle` says in a line why the comparison cannot be made, where it cannot.
"""
from __future__ import annotations

import importlib.util

import torch

from gptoss_lab.checkpoint import Checkpoint, count_parameters

LARGEST = 2 * 10**9
"""Parameters up to which a second copy in fp32 is reasonable in a lesson."""


def obstacle(checkpoint: Checkpoint) -> str | None:
    """What stands in the way of the comparison, or None."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if checkpoint.layout != "hf":
        return f"transformers reads the layout hf, not {checkpoint.layout}"
    if (count := count_parameters(checkpoint.config)) > LARGEST:
        return f"{count:,} parameters take {4 * count / 1e9:.0f} GB in fp32; up to {LARGEST:,} are compared here"
    return None


@torch.inference_mode()
def transformers_logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every position from transformers on the CPU. ids: [T] int64 -> [T, V] fp32.

    RuntimeError with the obstacle if there is one.
    """
    if reason := obstacle(checkpoint):
        raise RuntimeError(f"no comparison with transformers: {reason}")
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    raw = checkpoint.config.to_hf_dict()
    raw.pop("quantization_config")
    with torch.device("meta"):
        model = GptOssForCausalLM(GptOssConfig(**raw, attn_implementation="eager", experts_implementation="eager"))
    state = {}
    for spec in checkpoint.specs:
        if spec.name.endswith("_blocks"):
            blocks, scales = checkpoint.tensor(spec.name), checkpoint.tensor(spec.name.replace("_blocks", "_scales"))
            state[spec.name.removesuffix("_blocks")] = convert_moe_packed_tensors(blocks, scales).float()
        elif not spec.name.endswith("_scales"):
            state[spec.name] = checkpoint.tensor(spec.name).float()
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)      # its buffers are not in any checkpoint
    return model.eval()(ids.cpu()[None], use_cache=False).logits[0]


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value of `theirs`."""
    ours, theirs = ours.double().cpu(), theirs.double().cpu()
    return float((ours - theirs).abs().max() / theirs.abs().max())
