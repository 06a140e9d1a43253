"""The compact checkpoint: the released tensors, with only the vocabulary rows that have values of their own.

One safetensors file with Hugging Face names, dtypes and forms as in the released layout (experts MXFP4, all else bf16),
except that `model.embed_tokens.weight` and `lm_head.weight` have K + 1 rows: those of the K tokens in `token_ids`
([K] int32, ascending), then one row for every other token. Its metadata, `compact`, is JSON with `form` and `config`.
`expand` writes the standard checkpoint of either layout, all 201,088 rows, through the checkpoint writer: a folder that
any reader of the released model opens. The compact nano model is 15 MB, the expanded one 194 MB.

What is lost: nothing. The shared row is repeated as it is, so the expanded model is the compact one to the last bit.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from gptoss_lab.checkpoint.dtypes import TORCH_DTYPES
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import TensorSpec, manifest, total_bytes
from gptoss_lab.checkpoint.names import hf_parts
from gptoss_lab.checkpoint.shards import SINGLE_NAME
from gptoss_lab.checkpoint.synth import new_folder
from gptoss_lab.checkpoint.writer import ShardWriter, write_json
from gptoss_lab.config import ConfigError, ModelConfig

FORM = "gptoss-lab compact 1"
IDS = "token_ids"
VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
_ROWS = 1 << 15         # rows of the embedding written at a time


def write_compact(
    file: str | Path, config: ModelConfig, token_ids: torch.Tensor, tensors: Mapping[str, torch.Tensor],
    limit: int | None = None,
) -> Path:
    """Write the compact form; the file has its name only when it is whole.

    token_ids: [K] int32, ascending. tensors: Hugging Face name -> tensor, as `manifest(config, "hf")` but for the
    rows. limit: bytes that the file may have. CheckpointError: a tensor missing, extra, of another shape or dtype; ids
    that are not ascending ids of the config; more bytes than the limit.
    """
    file = Path(file)
    _check(config, token_ids, {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}, str(file))
    data = {name: t.detach().cpu().contiguous() for name, t in tensors.items()} | {IDS: token_ids.cpu()}
    size = sum(t.nbytes for t in data.values())
    if limit is not None and size > limit:
        raise CheckpointError(f"{file}: {size:,} bytes; at most {limit:,} may be shipped")
    metadata = {"compact": json.dumps({"form": FORM, "config": config.to_hf_dict()})}      # one key: one order of bytes
    part = file.with_name(file.name + ".part")
    save_file(data, part, metadata=metadata)
    part.chmod(0o644)
    part.replace(file)
    return file


def read_compact(file: str | Path) -> tuple[ModelConfig, torch.Tensor, dict[str, torch.Tensor]]:
    """(config, token_ids [K] int32, Hugging Face name -> tensor) of a compact file, checked. CheckpointError."""
    try:
        with safe_open(str(file), framework="pt") as source:
            metadata = (source.metadata() or {}).get("compact", "{}")
            names = source.keys()
            tensors = {name: source.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from None
    config = _config(file, metadata)
    if IDS not in tensors:
        raise CheckpointError(f"{file} lacks {IDS}, which says whose rows it holds")
    ids = tensors.pop(IDS)
    _check(config, ids, {n: (tuple(t.shape), t.dtype) for n, t in tensors.items()}, str(file))
    return config, ids, tensors


def expand(file: str | Path, target: str | Path, layout: str = "hf") -> Path:
    """Write the standard checkpoint of a compact file as a new folder `target` and return it.

    layout: "hf" or "original". The folder appears when it is whole. CheckpointError: a compact file that is not right,
    a target that exists, no space.
    """
    if layout not in ("hf", "original"):
        raise CheckpointError(f"expand writes the layouts hf and original, not {layout!r}")
    config, ids, tensors = read_compact(file)
    specs, target = manifest(config, layout), Path(target)
    with new_folder(target, total_bytes(specs)) as partial:
        with ShardWriter(partial / SINGLE_NAME, specs, checksums=False) as writer:
            for spec in specs:
                for name in (spec.name,) if layout == "hf" else hf_parts(spec.name, config):
                    for piece in _pieces(name, tensors[name], ids, config.vocab_size):
                        writer.write(spec.name, piece)
            writer.close()
        _write_config(partial, config, specs, layout)
    return target


def _config(file: str | Path, metadata: str) -> ModelConfig:
    try:
        raw = json.loads(metadata)
    except ValueError as error:
        raise CheckpointError(f"{file}: its metadata is not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.get("form") != FORM:
        raise CheckpointError(f"{file} has no metadata of the form {FORM!r}; a compact checkpoint has")
    try:
        return ModelConfig.from_dict(raw["config"], name=raw["config"].get("name", ""))
    except (KeyError, ValueError, AttributeError, ConfigError) as error:
        raise CheckpointError(f"{file}: its config cannot be read: {error}") from None


def _pieces(name: str, tensor: torch.Tensor, ids: torch.Tensor, vocab_size: int):
    """The tensor, or its rows spread over the whole vocabulary, some thousand at a time."""
    if name not in VOCABULARY_TENSORS:
        yield tensor
        return
    row = torch.full((vocab_size,), len(ids), dtype=torch.int64)
    row[ids.long()] = torch.arange(len(ids))
    for start in range(0, vocab_size, _ROWS):
        yield tensor[row[start : start + _ROWS]]


def _write_config(folder: Path, config: ModelConfig, specs: tuple[TensorSpec, ...], layout: str) -> None:
    if layout == "hf":
        write_json(folder / "config.json", config.to_hf_dict())
        return
    kinds = {".blocks": "FP4", ".scales": "UE8"}
    write_json(folder / "config.json", config.to_original_dict())
    write_json(folder / "dtypes.json", {s.name: kinds.get(s.name[-7:], s.dtype) for s in specs})


def _check(
    config: ModelConfig, ids: torch.Tensor, found: Mapping[str, tuple[tuple[int, ...], torch.dtype]], where: str
) -> None:
    """CheckpointError unless ids and tensors are what the config says."""
    whole = ids.dtype == torch.int32 and ids.ndim == 1 and 0 < len(ids) < config.vocab_size
    if not whole or bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= config.vocab_size:
        raise CheckpointError(f"{where}: token_ids must be ascending int32 ids within 0..{config.vocab_size - 1}")
    expected = {
        spec.name: ((len(ids) + 1, *spec.shape[1:]) if spec.name in VOCABULARY_TENSORS else spec.shape,
                    TORCH_DTYPES[spec.dtype])
        for spec in manifest(config, "hf")
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise CheckpointError(f"{where}: {name} is {found.get(name)}; {expected.get(name)} is expected")
