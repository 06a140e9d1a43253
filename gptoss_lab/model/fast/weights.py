"""The weights as the fast forward's kernels take them: laid out once, read or made straight where they stay.

Experts are kept as e4m3 in 128x128 blocks (the prefill form), as packed MXFP4 (half the bytes: the decode form) or
dense (the CPU); QKV and output projection in the model's dtype or, by choice, in e4m3 blocks. Whatever form the source
has is turned into the one that was asked for on the device, one layer at a time: the codes of a layer go through a
table there and are forgotten before the next layer comes, so neither host nor device ever holds the model twice. From
MXFP4 to e4m3 nothing is rounded (checkpoint/fp8.py); projections in e4m3 are, and `rounding` says by how much.

Biases of e4m3 products, norms and sinks are fp32 (the exact values of the file), the router is in the model's dtype.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from gptoss_kernels.moe import LayerWeights
from gptoss_kernels.reference.experts import ExpertMatrices
from gptoss_lab.checkpoint import Dense, Fp8, Mxfp4, Stored, fp8
from gptoss_lab.checkpoint.forms import to_fp8, to_mxfp4
from gptoss_lab.config import ModelConfig
from gptoss_lab.model.load import Source

EXPERT_FORMS = ("fp8", "mxfp4", "dense")
PROJECTION_FORMS = ("dense", "fp8")


class Projection(NamedTuple):
    """One dense product. weight: [N, K] in the model's dtype, bias [N] likewise; or e4m3 with scale_inv
    [ceil(N / 128), ceil(K / 128)] fp32, and an fp32 bias."""

    weight: torch.Tensor
    bias: torch.Tensor
    scale_inv: torch.Tensor | None = None


@dataclass(frozen=True)
class FastLayer:
    """One layer. attention_norm: [H] fp32. qkv: rows Q, K, V. sinks: [Hq] fp32. moe: see gptoss_kernels.moe."""

    sliding: bool
    attention_norm: torch.Tensor
    qkv: Projection
    out: Projection
    sinks: torch.Tensor
    moe: LayerWeights


@dataclass(frozen=True)
class FastWeights:
    """All weights of a model on one device.

    embedding: [V, H] in `dtype`; unembedding: likewise, or this rank's rows of the vocabulary. norm: [H] fp32.
    experts, projections: their forms. rounding: relative error (norm over norm) that the projections' e4m3 form added,
    by projection, the largest of the layers.
    """

    config: ModelConfig
    dtype: torch.dtype
    experts: str
    projections: str
    embedding: torch.Tensor
    layers: tuple[FastLayer, ...]
    norm: torch.Tensor
    unembedding: torch.Tensor
    rounding: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def first(self, layers: int) -> FastWeights:
        """The model of the first `layers` layers, with these very tensors."""
        return replace(self, config=self.config.with_layers(layers), layers=self.layers[:layers])

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.embedding, self.norm, self.unembedding)
        for layer in self.layers:
            moe = layer.moe
            yield from (layer.attention_norm, layer.sinks, moe.norm, moe.router, moe.router_bias, moe.gate_up_bias,
                        moe.down_bias)
            for part in (*layer.qkv, *layer.out, *moe.gate_up[1:], *moe.down[1:]):
                if part is not None:
                    yield part


def lay_out(
    source: Source, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, *, experts: str = "fp8",
    projections: str = "dense",
) -> FastWeights:
    """Read or make every tensor of `source` and lay it out on `device`.

    dtype: of the residual stream and of what is not quantised. experts: "fp8", "mxfp4" or "dense". projections:
    "dense" (in dtype) or "fp8". ValueError for a form that does not exist; CheckpointError from the source.
    """
    if experts not in EXPERT_FORMS:
        raise ValueError(f"experts is {experts!r}; one of {', '.join(EXPERT_FORMS)}")
    if projections not in PROJECTION_FORMS:
        raise ValueError(f"projections is {projections!r}; one of {', '.join(PROJECTION_FORMS)}")
    return _Layout(source, torch.device(device), dtype, experts, projections).all()


class _Layout:
    """Gathers the tensors of a source, layer by layer."""

    def __init__(
        self, source: Source, device: torch.device, dtype: torch.dtype, experts: str, projections: str
    ) -> None:
        self.source, self.config, self.device, self.dtype = source, source.config, device, dtype
        self.read_to = None if device.type == "cpu" else device
        self.expert_form, self.projection_form = experts, projections
        self.rounding: dict[str, float] = {}

    def all(self) -> FastWeights:
        """Every layer, then the whole."""
        embedding = self.get("model.embed_tokens.weight", self.dtype)
        layers = tuple(self.layer(n) for n in range(self.config.num_layers))
        return FastWeights(
            self.config, self.dtype, self.expert_form, self.projection_form, embedding, layers,
            self.get("model.norm.weight", torch.float32), self.get("lm_head.weight", self.dtype), self.rounding,
        )

    def get(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor in another dtype."""
        return self.source.tensor(name, self.read_to).to(dtype).contiguous()

    def layer(self, n: int) -> FastLayer:
        """Attention and experts of layer n."""
        place = f"model.layers.{n}"
        attention = f"{place}.self_attn"
        qkv = [self.source.linear(f"{attention}.{x}_proj", self.read_to) for x in "qkv"]
        biases = torch.cat([self.get(f"{attention}.{x}_proj.bias", torch.float32) for x in "qkv"])
        out = self.source.linear(f"{attention}.o_proj", self.read_to)
        return FastLayer(
            self.config.is_sliding(n),
            self.get(f"{place}.input_layernorm.weight", torch.float32),
            self.projection("qkv", qkv, biases),
            self.projection("out", [out], self.get(f"{attention}.o_proj.bias", torch.float32)),
            self.get(f"{attention}.sinks", torch.float32),
            self.experts(n),
        )

    def projection(self, name: str, parts: list[Dense | Fp8], bias: torch.Tensor) -> Projection:
        """Parts [n_i, K] one below the other, as one product."""
        if self.projection_form == "dense":
            weight = torch.cat([part.dequantise(self.dtype) for part in parts]).contiguous()
            return Projection(weight, bias.to(self.dtype))
        whole_blocks = all(part.shape[0] % fp8.BLOCK == 0 for part in parts[:-1])
        if whole_blocks and all(isinstance(part, Fp8) for part in parts):
            weight, scales = (torch.cat([getattr(part, of) for part in parts]) for of in ("weight", "scale_inv"))
            return Projection(weight.contiguous(), bias, scales.contiguous())
        values = torch.cat([part.dequantise(torch.float32) for part in parts])
        weight, scales, _ = fp8.quantise(values, "amax", name)
        error = (fp8.dequantise(weight, scales) - values).norm() / values.norm()
        self.rounding[name] = max(self.rounding.get(name, 0.0), float(error))
        return Projection(weight, bias, scales)

    def experts(self, n: int) -> LayerWeights:
        """Router and experts of layer n."""
        place, c = f"model.layers.{n}", self.config
        matrices, biases = {}, {}
        for ours in ("gate_up", "down"):
            stored = self.source.experts(n, f"{ours}_proj", device=self.read_to)
            matrices[ours] = self.matrices(stored, f"layer {n}, {ours}_proj")
            biases[ours] = self.get(f"{place}.mlp.experts.{ours}_proj_bias", torch.float32)
        return LayerWeights(
            norm=self.get(f"{place}.post_attention_layernorm.weight", torch.float32),
            router=self.get(f"{place}.mlp.router.weight", self.dtype),
            router_bias=self.get(f"{place}.mlp.router.bias", self.dtype),
            gate_up=matrices["gate_up"], gate_up_bias=biases["gate_up"], down=matrices["down"],
            down_bias=biases["down"], experts_per_token=c.experts_per_token, norm_eps=c.rms_norm_eps,
            alpha=c.swiglu_alpha, limit=c.swiglu_limit,
        )

    def matrices(self, stored: Stored, where: str) -> ExpertMatrices:
        """One projection of all experts in the form asked for."""
        if self.expert_form == "dense":
            direct = self.dtype if self.dtype == torch.bfloat16 or isinstance(stored, Dense) else torch.float32
            return ExpertMatrices("dense", stored.dequantise(direct).to(self.dtype).contiguous())
        if self.expert_form == "fp8":
            if not isinstance(stored, Fp8):
                parts, _ = to_fp8(stored, "pow2", where)
                return ExpertMatrices("fp8", parts[".weight"], parts[".weight_scale_inv"])
            return ExpertMatrices("fp8", stored.weight.contiguous(), stored.scale_inv.contiguous())
        if not isinstance(stored, Mxfp4):
            parts, _ = to_mxfp4(stored, where)
            return ExpertMatrices("mxfp4", parts["_blocks"], parts["_scales"])
        return ExpertMatrices("mxfp4", stored.blocks.contiguous(), stored.scales.contiguous())
