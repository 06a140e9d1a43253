"""Open a checkpoint of any layout and reach every weight by its Hugging Face name.

`open_checkpoint` reads the config and the headers, and compares what is there with what the config says must be
there: names, shapes, dtypes, files. Only then is a tensor reachable, so an incomplete download cannot load. Tensors
come memory-mapped (a view, read when touched, writable without changing the file) or read into memory of their own,
on any device, in pieces. The mapping costs nothing until used and lets a sharding rule cut before it reads; a file
that is shortened while mapped ends the process, as with every mapping.
"""
from __future__ import annotations

import json
import mmap
import sys
from pathlib import Path
from typing import Any

import torch

from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.checkpoint.dtypes import TORCH_DTYPES
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.header import StoredTensor
from gptoss_lab.checkpoint.manifest import BLOCK, PROJECTIONS, TensorSpec, expert_shape, manifest
from gptoss_lab.checkpoint.names import original_source
from gptoss_lab.checkpoint.shards import find_tensors
from gptoss_lab.checkpoint.stored import Dense, Fp8, Mxfp4, Stored
from gptoss_lab.config import ConfigError, ModelConfig

PARTIAL_SUFFIX = ".partial"
_PIECE = 64 << 20           # bytes read at a time on the way to a device


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder (or its single .safetensors file, with config.json beside it).

    Reads headers only. CheckpointError, one line that names the file or tensor: anything missing, truncated, extra,
    doubled, unknown, of the wrong shape or dtype, or an unfinished conversion.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    if any(part.name.endswith(PARTIAL_SUFFIX) for part in (folder.resolve(), folder.resolve().parent)):
        raise CheckpointError(f"{path} is an unfinished conversion; run the same conversion again to finish it")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; a checkpoint folder or a .safetensors file is expected")
    try:
        config = ModelConfig.load(folder)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return Checkpoint(path, config, find_tensors(path), _quantisation(folder / "config.json"))


class Checkpoint:
    """One opened checkpoint. Made by `open_checkpoint`.

    path: as given. config: its ModelConfig. layout: "hf", "original", "fp8" or "bf16". experts_order: "out_in" or
    "in_out" (only "bf16" can be "in_out"). attention_fp8: whether the q, k, v and o weights are FP8. specs: every
    tensor on disk.
    """

    def __init__(
        self, path: Path, config: ModelConfig, tensors: dict[str, StoredTensor], quantisation: dict[str, Any]
    ) -> None:
        self.path = path
        self.config = config
        self.layout, self.experts_order, self.attention_fp8 = _detect(path, tensors)
        self.specs = manifest(
            config, self.layout, attention_fp8=self.attention_fp8, experts_order=self.experts_order
        )
        self._tensors = tensors
        self._maps: dict[Path, torch.Tensor] = {}
        _check_tensors(path, self.specs, tensors)
        _check_quantisation(path, self.layout, quantisation)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors, sorted."""
        return tuple(sorted({stored.file for stored in self._tensors.values()}))

    def tensor(self, name: str, device: torch.device | str | None = None) -> torch.Tensor:
        """A whole tensor in its stored dtype, by Hugging Face name (in the original layout q_proj is rows of its QKV).

        device None: a memory-mapped view on the CPU. Otherwise memory of its own there, read in pieces.
        """
        stored = self.stored(name)
        if device is None:
            return self._view(stored)
        return _read(stored, device)

    def rows(self, name: str, start: int, stop: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Rows start..stop-1 of the first axis, read from the file into memory of their own on `device`.

        For an expert tensor a row is one expert; for a linear weight one output row. Reads exactly those bytes.
        """
        return _read(_cut(self.stored(name), name, start, stop), device)

    def experts(
        self, layer: int, projection: str, expert_slice: slice | None = None, device: torch.device | str | None = None
    ) -> Stored:
        """The experts' matrices of one layer as stored: Mxfp4, Fp8 or Dense, logical shape [experts, out, in].

        projection: "gate_up_proj" (rows 0::2 gate, 1::2 up) or "down_proj". expert_slice: which experts, step 1; None
        for all. device: as for `tensor`. CheckpointError also for a scale byte 255, which it finds by reading all the
        scales.
        """
        prefix = self._expert_prefix(layer, projection)
        start, stop = _experts_range(expert_slice, self.config.num_experts)

        def part(name: str) -> torch.Tensor:
            return self.tensor(name)[start:stop] if device is None else self.rows(name, start, stop, device)

        if self.layout in ("hf", "original"):
            blocks, scales = part(f"{prefix}_blocks"), part(f"{prefix}_scales")
            mxfp4.check(blocks, scales, prefix if start == 0 else f"{prefix}, experts from {start}")
            return Mxfp4(blocks, scales)
        if self.layout == "fp8":
            return Fp8(part(f"{prefix}.weight"), part(f"{prefix}.weight_scale_inv"))
        return Dense(part(prefix if self.experts_order == "in_out" else f"{prefix}.weight"), self.experts_order)

    def expert_bias(self, layer: int, projection: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Biases of one layer's experts, [experts, out] bf16; for gate_up_proj interleaved like the rows."""
        return self.tensor(f"{self._expert_prefix(layer, projection)}_bias", device)

    def linear(self, name: str, device: torch.device | str | None = None) -> Dense | Fp8:
        """A linear weight outside the experts, `name` without ".weight" ("model.layers.0.self_attn.q_proj")."""
        weight = self.tensor(f"{name}.weight", device)
        if weight.dtype == torch.float8_e4m3fn:
            return Fp8(weight, self.tensor(f"{name}.weight_scale_inv", device))
        return Dense(weight)

    def stored(self, name: str) -> StoredTensor:
        """Where the tensor of this Hugging Face name lies: file, dtype, shape and byte range."""
        if self.layout != "original":
            if name not in self._tensors:
                raise CheckpointError(f"{self.path} ({self.layout} layout) has no tensor {name}")
            return self._tensors[name]
        source = original_source(name, self.config)
        if source.name not in self._tensors:
            raise CheckpointError(f"{self.path} has no tensor {source.name} (for {name})")
        stored = self._tensors[source.name]
        return stored if source.stop is None else _cut(stored, name, source.start, source.stop)

    def _expert_prefix(self, layer: int, projection: str) -> str:
        expert_shape(self.config, projection)
        if not 0 <= layer < self.config.num_layers:
            raise CheckpointError(f"no layer {layer}; {self.path} has layers 0..{self.config.num_layers - 1}")
        return f"model.layers.{layer}.mlp.experts.{projection}"

    def _view(self, stored: StoredTensor) -> torch.Tensor:
        if stored.start == stored.stop:
            return torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype])
        if stored.file not in self._maps:
            self._maps[stored.file] = _map(stored.file)
        data = self._maps[stored.file][stored.start : stored.stop]
        dtype = TORCH_DTYPES[stored.dtype]
        if stored.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(stored.shape)


def _map(file: Path) -> torch.Tensor:
    """All bytes of a file as a private (copy on write) mapping, [size] uint8."""
    with open(file, "rb") as stream:
        if sys.platform == "linux":
            # A private mapping may be written to; without NORESERVE the kernel could ask for memory for all of it.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
            mapped = mmap.mmap(stream.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        else:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _read(stored: StoredTensor, device: torch.device | str) -> torch.Tensor:
    """Read a tensor's bytes into memory of their own on `device`, through a bounded buffer when that is not the CPU."""
    device = torch.device(device)
    data = torch.empty(stored.stop - stored.start, dtype=torch.uint8, device=device)
    try:
        with open(stored.file, "rb", buffering=0) as stream:
            stream.seek(stored.start)
            if device.type == "cpu":
                _fill(stream, data, stored)
            else:
                buffer = torch.empty(min(_PIECE, len(data)), dtype=torch.uint8, pin_memory=device.type == "cuda")
                for start in range(0, len(data), _PIECE):
                    piece = buffer[: min(_PIECE, len(data) - start)]
                    _fill(stream, piece, stored)
                    data[start : start + len(piece)].copy_(piece)
    except OSError as error:
        raise CheckpointError(f"{stored.file} cannot be read: {error.strerror}") from None
    return data.view(TORCH_DTYPES[stored.dtype]).view(stored.shape)


def _fill(stream: Any, data: torch.Tensor, stored: StoredTensor) -> None:
    view = memoryview(data.numpy())
    while len(view):
        count = stream.readinto(view)
        if not count:
            raise CheckpointError(f"{stored.file} ended {len(view)} bytes early; it was changed after it was opened")
        view = view[count:]


def _cut(stored: StoredTensor, name: str, start: int, stop: int) -> StoredTensor:
    rows = stored.shape[0] if stored.shape else 0
    if not 0 <= start <= stop <= rows:
        raise CheckpointError(f"rows {start}..{stop} of {name} do not lie within 0..{rows}")
    size = (stored.stop - stored.start) // rows if rows else 0
    first = stored.start + start * size
    shape, last = (stop - start, *stored.shape[1:]), stored.start + stop * size
    return StoredTensor(stored.file, stored.dtype, shape, first, last)


def _experts_range(experts: slice | None, count: int) -> tuple[int, int]:
    start, stop, step = (experts or slice(None)).indices(count)
    if step != 1 or stop < start or (experts is not None and (experts.stop or 0) > count):
        raise CheckpointError(f"experts {experts} of {count}: a range with step 1 that lies within them is expected")
    return start, stop


# -- checks ------------------------------------------------------------------------------------------------------------
def _detect(path: Path, tensors: dict[str, StoredTensor]) -> tuple[str, str, bool]:
    """(layout, experts order, attention in FP8), told by the names alone."""
    if "embedding.weight" in tensors:
        return "original", "out_in", False
    endings = {name.rsplit(".mlp.experts.", 1)[1] for name in tensors if ".mlp.experts." in name}
    attention = any(".self_attn." in name and name.endswith("_scale_inv") for name in tensors)
    if endings & {f"{p}_{part}" for p in PROJECTIONS for part in ("blocks", "scales")}:
        return "hf", "out_in", False
    if endings & {f"{p}.weight_scale_inv" for p in PROJECTIONS}:
        return "fp8", "out_in", attention
    if endings & {f"{p}.weight" for p in PROJECTIONS}:
        return "bf16", "out_in", False
    if endings & set(PROJECTIONS):
        return "bf16", "in_out", False
    raise CheckpointError(f"{path} holds no experts under a name of the layouts known here (hf, original, fp8, bf16)")


def _check_tensors(path: Path, specs: tuple[TensorSpec, ...], tensors: dict[str, StoredTensor]) -> None:
    expected = {spec.name: spec for spec in specs}
    for name, stored in tensors.items():
        if name not in expected:
            raise CheckpointError(f"{stored.file} holds the unknown tensor {name}")
        spec = expected[name]
        if stored.shape != spec.shape:
            shapes = f"the shape {list(stored.shape)}; {list(spec.shape)} is expected"
            raise CheckpointError(f"{stored.file}: {name} has {shapes}")
        if stored.dtype != spec.dtype:
            raise CheckpointError(f"{stored.file}: {name} has the dtype {stored.dtype}; {spec.dtype} is expected")
    absent = [name for name in expected if name not in tensors]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise CheckpointError(f"{path} lacks the tensor {absent[0]}{more}; {len(expected)} tensors are expected")


def _quantisation(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")).get("quantization_config") or {}


def _check_quantisation(path: Path, layout: str, quantisation: dict[str, Any]) -> None:
    """The block size of FP8 stands in the config and is not worked out from shapes: 2880 rows have 23 scale rows."""
    method = quantisation.get("quant_method")
    if layout == "fp8" and method != "fp8":
        raise CheckpointError(f"{path} holds FP8 but its config.json says quant_method {method!r}; 'fp8' is expected")
    if layout != "fp8" and method == "fp8":
        raise CheckpointError(f"{path}: config.json says quant_method 'fp8' but the tensors are in the {layout} layout")
    if layout == "fp8" and quantisation.get("weight_block_size") != [BLOCK, BLOCK]:
        raise CheckpointError(f"{path}: weight_block_size is {quantisation.get('weight_block_size')} in config.json; "
                              f"[{BLOCK}, {BLOCK}] is expected")
