"""Checkpoints for the tests, written with the safetensors library so that our writer and reader are not tested by
each other.
"""
import json
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from gptoss_lab.config import preset

TINY = Path(__file__).resolve().parents[2] / "fixtures" / "tiny"
INDEX = "model.safetensors.index.json"

# Every size differs, none is a multiple of 128, and the last block and the last strip are partial.
SMALL = replace(
    preset("nano"), name="small", num_layers=2, num_experts=4, hidden_size=160, intermediate_size=224, num_heads=6,
    num_kv_heads=2, head_dim=32, vocab_size=96,
)


def tensors_of(layout: str) -> dict[str, torch.Tensor]:
    """The tiny fixture's tensors."""
    return load_file(TINY / layout / "model.safetensors")


def write_single(folder: Path, tensors: dict[str, torch.Tensor], layout: str = "hf") -> Path:
    """A one-file checkpoint with the tiny config."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TINY / layout / "config.json", folder / "config.json")
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_sharded(folder: Path, tensors: dict[str, torch.Tensor], count: int = 3, layout: str = "hf") -> Path:
    """A checkpoint in `count` files with the index of the Hugging Face layout, or OpenAI's numbered files without
    one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(TINY / layout / "config.json", folder / "config.json")
    names = sorted(tensors)
    weight_map = {}
    for i in range(count):
        file = (f"model-{i:05d}-of-{count - 1:05d}.safetensors" if layout == "hf"
                else f"model--{i + 1:05d}-of-{count:05d}.safetensors")
        part = {name: tensors[name] for name in names[i::count]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if layout == "hf":
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes (so -0 differs from 0, and NaN equals itself)."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(
        a.reshape(-1).contiguous().view(torch.uint8), b.reshape(-1).contiguous().view(torch.uint8)
    )
