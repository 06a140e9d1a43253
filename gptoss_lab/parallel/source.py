"""A checkpoint as one rank sees it: only its own slices, each read once.

Satisfies what `gptoss_lab.model.load` asks of a source, so a sharded model is built by the code that builds a whole
one. Slices along the first axis (experts, vocabulary, output rows) are read as they lie in the file; a cut further in
is copied out of the memory map, row by row. `read_bytes` counts what was handed out, which a test compares with what
the plan says. A bias that another rank adds comes back as zeros and is not read.
"""
from __future__ import annotations

import torch

from gptoss_lab.checkpoint import Checkpoint, Dense, Fp8, Mxfp4, Stored, mxfp4
from gptoss_lab.checkpoint.manifest import BLOCK
from gptoss_lab.parallel.rules import Region, region
from gptoss_lab.parallel.share import Share


class ShardedSource:
    """The share of one rank of an opened checkpoint.

    config: of the whole model. share: what of it is here. whole_embedding: the embedding is not cut (looking a row up
    here costs no exchange; the head still is). read_bytes: name -> bytes handed out so far.
    """

    def __init__(self, checkpoint: Checkpoint, share: Share, whole_embedding: bool = False) -> None:
        self.checkpoint, self.config, self.share = checkpoint, checkpoint.config, share
        self.whole_embedding = whole_embedding
        self.read_bytes: dict[str, int] = {}

    def tensor(self, name: str, device: torch.device | None = None) -> torch.Tensor:
        """This rank's part of a tensor in its stored dtype. device None: memory-mapped where that is possible."""
        shape = self.checkpoint.stored(name).shape
        wanted = region(name, shape, self.config, self.share)
        if self.whole_embedding and name == "model.embed_tokens.weight":
            wanted = tuple(map(range, shape))
        part = self._read(name, shape, wanted, device)
        self.read_bytes[name] = self.read_bytes.get(name, 0) + part.nbytes
        return self._bias_of_others(name, part, shape)

    def linear(self, name: str, device: torch.device | None = None) -> Dense | Fp8:
        """This rank's part of a linear weight outside the experts; `name` without ".weight"."""
        weight = self.tensor(f"{name}.weight", device)
        if weight.dtype != torch.float8_e4m3fn:
            return Dense(weight)
        rows, columns = region(f"{name}.weight", self.checkpoint.stored(f"{name}.weight").shape, self.config,
                               self.share)
        scales = self.tensor(f"{name}.weight_scale_inv", device)
        return Fp8(weight, scales, rows.start % BLOCK, columns.start % BLOCK)

    def experts(self, layer: int, projection: str, *, device: torch.device | None = None) -> Stored:
        """The matrices of this rank's experts, or of its slice of them: [experts, out, in] as stored."""
        prefix, layout = f"model.layers.{layer}.mlp.experts.{projection}", self.checkpoint.layout
        if layout in ("hf", "original"):
            blocks, scales = self.tensor(f"{prefix}_blocks", device), self.tensor(f"{prefix}_scales", device)
            mxfp4.check(blocks, scales, f"{prefix}, experts from {self.share.experts.start}")
            return Mxfp4(blocks, scales)
        if layout == "fp8":
            return Fp8(self.tensor(f"{prefix}.weight", device), self.tensor(f"{prefix}.weight_scale_inv", device))
        order = self.checkpoint.experts_order
        return Dense(self.tensor(prefix if order == "in_out" else f"{prefix}.weight", device), order)

    def _read(self, name: str, shape: tuple[int, ...], wanted: Region, device: torch.device | None) -> torch.Tensor:
        rows, inner = wanted[0], wanted[1:]
        if all(len(span) == n for span, n in zip(inner, shape[1:], strict=True)):
            if device is None:
                return self.checkpoint.tensor(name)[rows.start : rows.stop]
            return self.checkpoint.rows(name, rows.start, rows.stop, device)
        cut = self.checkpoint.tensor(name)[tuple(slice(span.start, span.stop) for span in wanted)]
        return cut.contiguous() if device is None else cut.contiguous().to(device)

    def _bias_of_others(self, name: str, part: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros in place of a bias that another rank adds."""
        if name.endswith("o_proj.bias") and not self.share.output_bias:
            return part.new_zeros(shape)
        if name.endswith("down_proj_bias") and not self.share.down_bias:
            return part.new_zeros(len(self.share.experts), shape[1])
        return part
