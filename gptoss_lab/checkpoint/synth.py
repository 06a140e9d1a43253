"""Write a random checkpoint that looks like a released one: any config, either layout, the same weights for the same
seed.

No released weights are needed to learn or to measure: what matters for speed, memory and exactness is the form. Dense
weights are normal with standard deviations that keep activations near 1 through any number of layers, norms lie near
1, sinks around 1, the router sees logits of deviation 1, so experts are used about evenly. Experts are MXFP4 from the
start: codes as if normal weights had been quantised, scale bytes in a band of four exponents, every group with a code
of 4 or 6 as the quantiser leaves it. `layers` gives the real shapes in a few layers; layer n is the same however many
there are.

What is lost: the weights mean nothing, so the model talks nonsense; a trained nano checkpoint is another matter.
"""
from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.header import read_header
from gptoss_lab.checkpoint.lookup import lookup
from gptoss_lab.checkpoint.manifest import GROUP, TensorSpec, manifest, total_bytes
from gptoss_lab.checkpoint.names import hf_parts
from gptoss_lab.checkpoint.random import normal, normal_quantiles, random_bytes, stream_key
from gptoss_lab.checkpoint.reader import PARTIAL_SUFFIX
from gptoss_lab.checkpoint.shards import INDEX_NAME, SINGLE_NAME
from gptoss_lab.checkpoint.workers import Workers
from gptoss_lab.checkpoint.writer import ShardWriter, guarded, sync_folder, write_json
from gptoss_lab.config import ModelConfig

Progress = Callable[[int, int, str], None]

BAND = (0.3, 0.4, 0.2, 0.1)         # share of groups 0, 1, 2, 3 exponents below the largest
_CODE_RMS = 2.0                     # root mean square of the codes' values, before scales
_SHARD_BYTES = {"hf": 5_000_000_000, "original": 14_000_000_000}
_PIECE = 1 << 21                    # elements made at a time; bytes for MXFP4


def synth(
    config: ModelConfig, path: str | Path, layout: str = "hf", seed: int = 0, layers: int | None = None, *,
    spread: int = 3, device: torch.device | str = "cpu", progress: Progress | None = None,
    shard_bytes: int | None = None,
) -> Path:
    """Write a checkpoint folder at `path` and return it. Bounded memory; the folder appears when it is whole.

    layout: "hf" or "original". layers: how many, None for the config's. spread: the largest difference of exponents
    inside a 128x128 block: up to 3 narrows the band, more lowers one group in the first block of every expert by so
    much (over 14, FP8 must round). device: where the numbers are made; it does not change them. progress(bytes done,
    bytes in all, tensor). shard_bytes: limit per file. CheckpointError: `path` exists, no space, a value out of
    range.
    """
    if layout not in _SHARD_BYTES:
        raise CheckpointError(f"synth writes the layouts {' and '.join(_SHARD_BYTES)}, not {layout!r}")
    if not 0 <= spread <= 100:
        raise CheckpointError(f"spread is {spread}; 0..100 exponents are possible")
    config = config if layers is None else config.with_layers(layers)
    specs, target = manifest(config, layout), Path(path)
    total, done = total_bytes(specs), 0
    with new_folder(target, total) as partial:
        for name, group in name_shards(split_shards(specs, shard_bytes or _SHARD_BYTES[layout]), layout).items():
            pieces = [piece for spec in group for piece in _pieces(spec, config, layout)]
            make = functools.partial(make_piece, config=config, seed=seed, spread=spread, device=device)
            with Workers(device) as workers, ShardWriter(partial / name, group, checksums=False) as writer:
                for piece, data in zip(pieces, workers.in_order(make, pieces), strict=True):
                    writer.write(piece.tensor, data)
                    done += data.nbytes
                    if progress is not None:
                        progress(done, total, piece.tensor)
                writer.close()
        _write_metadata(partial, config, specs, layout)
    return target


# -- folder ------------------------------------------------------------------------------------------------------------
@contextmanager
def new_folder(target: Path, size: int) -> Iterator[Path]:
    """A fresh folder beside `target`, whose name no reader opens; it becomes `target` when all went well, else it is
    removed. CheckpointError: `target` exists, no room for `size` bytes.
    """
    check_target(target, size)
    partial = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    shutil.rmtree(partial, ignore_errors=True)
    guarded(partial, lambda: partial.mkdir(parents=True))
    try:
        yield partial
        publish(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def check_target(target: Path, size: int) -> None:
    """CheckpointError if `target` exists or its disk has fewer than `size` bytes free."""
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists; name a target that does not")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < size:
        raise CheckpointError(f"no space for {target}: {size:,} bytes are needed, {free:,} are free")


def publish(partial: Path, target: Path) -> None:
    """Give the finished folder its name."""
    if target.exists():
        raise CheckpointError(f"{target} appeared while it was being written; it is left as it is")
    guarded(partial, lambda: sync_folder(partial))
    guarded(target, lambda: os.rename(partial, target))
    guarded(target, lambda: sync_folder(target.absolute().parent))


def split_shards(specs: Iterable[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Consecutive tensors into files of at most `limit` bytes (more only for a single larger tensor)."""
    files: list[list[TensorSpec]] = [[]]
    for spec in specs:
        if files[-1] and total_bytes(files[-1]) + spec.nbytes > limit:
            files.append([])
        files[-1].append(spec)
    return files


def name_shards(files: list[list[TensorSpec]], layout: str) -> dict[str, list[TensorSpec]]:
    """File names as released: HF counts from 0 and names the last index, OpenAI counts from 1 and names the count."""
    if len(files) == 1:
        return {SINGLE_NAME: files[0]}
    if layout == "original":
        return {f"model--{i:05d}-of-{len(files):05d}.safetensors": f for i, f in enumerate(files, start=1)}
    return {f"model-{i:05d}-of-{len(files) - 1:05d}.safetensors": f for i, f in enumerate(files)}


def write_index(folder: Path, files: dict[str, list[TensorSpec]]) -> None:
    """model.safetensors.index.json: total_size and tensor -> file."""
    weight_map = {spec.name: name for name, group in files.items() for spec in group}
    size = sum(total_bytes(group) for group in files.values())
    write_json(folder / INDEX_NAME, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_metadata(folder: Path, config: ModelConfig, specs: tuple[TensorSpec, ...], layout: str) -> None:
    if layout == "original":
        kinds = {".blocks": "FP4", ".scales": "UE8"}
        write_json(folder / "config.json", config.to_original_dict())
        write_json(folder / "dtypes.json", {s.name: kinds.get(s.name[-7:], s.dtype) for s in specs})
        return
    files = {file.name: file for file in folder.glob("*.safetensors")}
    if len(files) > 1:
        by_name = {spec.name: spec for spec in specs}
        write_index(folder, {n: [by_name[t] for t in read_header(f)] for n, f in sorted(files.items())})
    write_json(folder / "config.json", config.to_hf_dict())


# -- weights -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Piece:
    """Elements start..stop-1 of the Hugging Face tensor `source`, which go to the tensor `tensor` on disk."""

    tensor: str
    source: str
    start: int
    stop: int


def _pieces(spec: TensorSpec, config: ModelConfig, layout: str) -> Iterator[Piece]:
    """A tensor in order, in pieces; a fused tensor is its Hugging Face parts one after the other."""
    for name in (spec.name,) if layout == "hf" else hf_parts(spec.name, config):
        count = math.prod(_hf_shapes(config)[name])
        for start in range(0, count, _PIECE):
            yield Piece(spec.name, name, start, min(count, start + _PIECE))


def make_piece(
    piece: Piece, config: ModelConfig, seed: int, spread: int, device: torch.device | str
) -> torch.Tensor:
    """The elements of one piece, flat: the same on every device, and whatever the pieces are."""
    name, start, stop = piece.source, piece.start, piece.stop
    key = stream_key(seed, name)
    if name.endswith("_blocks"):
        return _blocks(key, start, stop, device)
    if name.endswith("_scales"):
        return _scales(key, start, stop, _hf_shapes(config)[name], _top_scale(name, config), spread, device)
    return normal(key, start, stop - start, *_distribution(name, config), device)


@functools.lru_cache(maxsize=8)
def _hf_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {spec.name: spec.shape for spec in manifest(config, "hf")}


def _distribution(name: str, config: ModelConfig) -> tuple[float, float]:
    """(mean, standard deviation) of a bf16 tensor: inputs of deviation 1 give outputs of about 1, residual branches
    0.3.
    """
    fan_in = 1 / math.sqrt(config.hidden_size)
    if "norm" in name:
        return 1.0, 0.1
    if name.endswith("sinks"):
        return 1.0, 0.5
    if name.endswith("bias"):
        return 0.0, 0.05
    if "o_proj" in name:
        return 0.0, 0.3 / math.sqrt(config.q_size)
    if "embed_tokens" in name:
        return 0.0, 1.0
    return 0.0, 3 * fan_in if "lm_head" in name else fan_in


def _top_scale(name: str, config: ModelConfig) -> int:
    """The largest scale byte of an expert projection: weights of deviation 1 / sqrt(in), half of that for down."""
    gain, size = (1.0, config.hidden_size) if "gate_up" in name else (0.5, config.intermediate_size)
    band = math.sqrt(sum(share / 4**i for i, share in enumerate(BAND)))
    return 127 + round(math.log2(gain / (_CODE_RMS * band * math.sqrt(size))))


def _blocks(key: int, start: int, stop: int, device: torch.device | str) -> torch.Tensor:
    """Bytes start..stop-1 of the blocks (whole groups): two codes per byte, every group with a code of 4 or 6."""
    bits = random_bytes(key, 2 * start, 2 * (stop - start), device).view(torch.int16)
    data = torch.empty(stop - start, dtype=torch.uint8, device=device)
    table = _code_table(torch.device(device))
    lookup(table, torch.zeros(1, dtype=torch.uint8, device=device), bits[None], data[None])
    half = GROUP // 2
    groups, group_words = data.view(-1, half), data.view(torch.int64).view(-1, half // 8)
    large = (group_words & group_words << 1) & 0x4444444444444444           # both upper bits of a magnitude: 4 or 6
    poor = (large == 0).all(dim=1).nonzero()[:, 0]
    groups[poor, (poor + start // half) % half] |= 0x06
    return data


def _scales(
    key: int, start: int, stop: int, shape: tuple[int, ...], top: int, spread: int, device: torch.device | str
) -> torch.Tensor:
    """Scale bytes start..stop-1 of [E, rows, G]: `top` less 0..3, and the one low group per expert when spread > 3."""
    table = torch.tensor(_band_table(spread), dtype=torch.uint8, device=device)
    data = top - table[random_bytes(key, start, stop - start, device).int()]
    if spread > len(BAND) - 1:
        _, rows, groups = shape
        at = torch.arange(start, stop, device=device) % (rows * groups)
        data[at == 0] = top
        data[at == groups] = top - spread                                   # row 1, group 0
    return data


def _band_table(spread: int) -> list[int]:
    """[256] -> exponents below the top, in the shares of BAND, at most `spread`."""
    bounds = [round(256 * sum(BAND[: i + 1])) for i in range(len(BAND))]
    return [min(spread, next(i for i, bound in enumerate(bounds) if byte < bound)) for byte in range(256)]


@functools.cache
def _code_table(device: torch.device) -> torch.Tensor:
    """[65536] uint8: 16 random bits -> two codes, each from 8 of the bits, as nearest codes of normal values."""
    values = _CODE_RMS * normal_quantiles(256)
    code = torch.bucketize(values.abs(), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64))
    code = (code + 8 * (values < 0)).to(torch.int64)
    word = torch.arange(65536)
    return (code[word & 255] | code[word >> 8] << 4).to(torch.uint8).to(device)
