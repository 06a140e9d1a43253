"""Every launch of the fast forward's prefill and decode: grid, block, FLOPs, least bytes, and where it was measured.

The list is read off the code, not off a trace: which launches a layer makes is in `gptoss_lab.model.fast.forward` and
`gptoss_kernels.moe.layer`, grids and blocks come from the kernels' own rules. So it is known before anything has run,
and a trace can be checked against it.

Counting. FLOPs of products and attention, and the bytes of weights and keys, are those of `gptoss_lab.cost.parts`, per
layer. What a kernel reads and writes of activations is added here, in the formats in which it does so. Kernels without
a product have the vector operations of their formula (VECTOR), which run on the fp32 units.

What is taken: one GPU, e4m3 experts and projections, the backends that `auto` takes without vendor packages, prompts
that are not cut into chunks. Left out: the copies that bring ids, positions and slots to the device before a step. A
grid of () is torch's own kernel, whose grid is its affair.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gptoss_kernels.attention.layer import LayerKind
from gptoss_kernels.attention.triton_backend import DECODE_PROGRAMS, decode_config, prefill_config
from gptoss_kernels.moe import few_cuda
from gptoss_kernels.moe.combine import combine_config, combine_norm_config
from gptoss_kernels.moe.decode_cuda import TUNED
from gptoss_kernels.moe.gemm_cuda import TILE_M
from gptoss_kernels.moe.layout import max_tiles
from gptoss_kernels.moe.routing import (
    FEW_TOKENS,
    ONE_PROGRAM,
    SCANNED_BLOCKS,
    choose_config,
    logits_config,
    place_config,
    scan_config,
)
from gptoss_kernels.projection.few import MOST_TOKENS
from gptoss_kernels.projection.few_cuda import ROWS
from gptoss_kernels.projection.norm import norm_residual_config
from gptoss_kernels.quant.norm_quant import norm_quantise_config
from gptoss_kernels.quant.place_scales import place_scales_config
from gptoss_kernels.rope.cache import rope_config
from gptoss_lab.bench.trace import Kernel
from gptoss_lab.bench.tune_launches import Case, chosen
from gptoss_lab.config import ModelConfig
from gptoss_lab.cost import workload
from gptoss_lab.cost.hardware import H200
from gptoss_lab.cost.parts import Part, forward_parts
from gptoss_lab.cost.precision import SERVED
from gptoss_lab.viz.tune_grids import power_of_two

SMS = 132
FP32_FLOPS = 67e12              # NVIDIA H200 SXM datasheet, outside the tensor cores
VECTOR = {"norm": 4, "quantise": 3, "rope": 3, "combine": 2}
"""fp32 operations per element: square, add, two factors; magnitude, maximum, factor; two factors and a sum; factor and
sum, for each expert."""
Row = Mapping[str, Any]
Source = tuple[str, str, str]   # suite, case, backend


@dataclass(frozen=True)
class Launch:
    """A launch that a step makes `times` times, every time alike.

    what: its part in the layer. kernel: its name in a trace. grid: CTAs, () for torch's. threads: of a CTA. flop: of
    one launch, on `unit` ("fp8", "bf16" or "fp32"). bytes: of one launch, each read or written once. sources: rows in
    which this very launch was timed, the best first.
    """

    what: str
    kernel: str
    times: int
    grid: tuple[int, ...]
    threads: int
    unit: str
    flop: float
    bytes: float
    sources: tuple[Source, ...] = ()

    @property
    def kind(self) -> str:
        """Of bench.trace.KINDS."""
        return Kernel(self.kernel, 0, 0).kind

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.bytes

    @property
    def rate(self) -> float:
        """Datasheet FLOP/s of its unit."""
        return FP32_FLOPS if self.unit == "fp32" else H200.flop_per_second(self.unit)

    @property
    def bound_us(self) -> float:
        """Least microseconds of one launch."""
        return 1e6 * max(self.flop / self.rate, self.bytes / H200.memory_bytes_per_second)

    @property
    def limited_by(self) -> str:
        """"bytes" or "arithmetic"."""
        return "arithmetic" if self.flop / self.rate > self.bytes / H200.memory_bytes_per_second else "bytes"

    def measured(self, rows: Iterable[Row]) -> Row | None:
        """The last recorded row in microseconds of the first source that has one."""
        found = {(r["suite"], r["case"], r["backend"]): r for r in rows
                 if r["metric"] == "microseconds" and r["value"] is not None}
        return next((found[source] for source in self.sources if source in found), None)


def prefill(config: ModelConfig, tokens: int) -> list[Launch]:
    """The launches of one prompt of more than 128 tokens, in the order of a layer."""
    if tokens <= FEW_TOKENS:
        raise ValueError(f"tokens is {tokens}; a prefill here has more than {FEW_TOKENS}")
    parts = _parts(config, workload.prefill(tokens))
    t, h, layers, q = tokens, config.hidden_size, config.num_layers, config.q_size
    full = sum(not config.is_sliding(n) for n in range(layers))
    rows, wide = t * config.experts_per_token, _scaled(h)
    where = f"E{config.num_experts}/T{t}"
    norm, quantise = VECTOR["norm"], VECTOR["quantise"]
    return [
        _torch("embedding", "embedding", 1, "fp32", 0.0, 4.0 * t * h),
        _quantise("first norm and quantise, before QKV", 1, t, h, norm + quantise, (
            _tuned("norm and quantise", t), ("profile", f"norm and quantise/T{t}", "triton"))),
        _product("QKV product", layers, parts["qkv_projection"], t, _scaled(h), 2 * config.qkv_size,
                 (_tuned("QKV product", t),)),
        *_rope(config, t, "rope and cache", layers, full),
        *_prefill_attention(config, t, parts, full),
        _product("output product, residual included", layers, parts["output_projection"], t, _scaled(q), 4 * h,
                 (_tuned("output product", t),)),
        *_prefill_routing(config, t, parts["router"]),
        _quantise("norm and quantise, before the experts", layers, t, h, norm + quantise),
        _place_scales(config, t),
        _product("gate/up product", layers, parts["experts_gate_up"], rows, wide, _scaled(config.intermediate_size),
                 (("moe", f"gemm1 with swiglu/{where}/uniform", "cuda"),)),
        _product("down product", layers, parts["experts_down"], rows, _scaled(config.intermediate_size), 2 * h,
                 (("moe", f"gemm2/{where}/uniform", "cuda"),)),
        _combine_norm(config, t),
        _combine(config, t, 1, where),
        _torch("pick the last row", "index_select", 1, "fp32", 0.0, 4.0 * h),
        *_head(config, 1, parts["head"]),
    ]


def decode(config: ModelConfig, context: int, batch: int) -> list[Launch]:
    """The launches of one step of up to 32 sequences that each attend to `context` tokens."""
    if not 1 <= batch <= MOST_TOKENS:
        raise ValueError(f"batch is {batch}; 1 to {MOST_TOKENS} sequences")
    parts = _parts(config, workload.decode(context, batch))
    b, h, layers, q = batch, config.hidden_size, config.num_layers, config.q_size
    full = sum(not config.is_sliding(n) for n in range(layers))
    return [
        _torch("lengths and page tables to the plans", "copy", 4, "fp32", 0.0, 4.0 * b * (1 + -(-context // 64))),
        _torch("embedding", "embedding", 1, "fp32", 0.0, 4.0 * b * h),
        _few("QKV, norm included", "qkv", layers, b, config.qkv_size, h, parts["qkv_projection"], 2),
        *_rope(config, b, "rope to pages", layers, full),
        *_decode_attention(config, context, b, parts, full),
        _few("output, residual included", "out", layers, b, h, q, parts["output_projection"], 4),
        *_decode_experts(config, b, parts),
        *_head(config, b, parts["head"]),
    ]


def _parts(config: ModelConfig, work: workload.Workload) -> dict[str, Part]:
    return {part.name: part for part in forward_parts(config, work, SERVED)}


def _scaled(columns: int) -> float:
    """Bytes of a row in e4m3 with its fp32 scales."""
    return columns + 4 * -(-columns // 128)


def _torch(what: str, kernel: str, times: int, unit: str, flop: float, amount: float) -> Launch:
    return Launch(what, kernel, times, (), 0, unit, flop, amount)


def _tuned(kernel: str, t: int, experts: int = 0) -> Source:
    """The chosen launch of a case of the tuning bench."""
    case = Case(kernel, t, experts)
    return "profile", case.name, chosen(case).name


def _quantise(what: str, layers: int, t: int, columns: int, vector: int, sources: tuple[Source, ...] = ()) -> Launch:
    """t rows to e4m3, in their order. vector: operations per element. sources: what was timed has scales column by
    column, as the dense product takes them."""
    launch = norm_quantise_config(t, columns, False)
    return Launch(what, "_norm_quantise_kernel", layers, (t,), 32 * launch["num_warps"], "fp32",
                  float(vector * t * columns), t * (2 * columns + _scaled(columns)), sources)


def _place_scales(config: ModelConfig, t: int) -> Launch:
    """The rows' scales, sorted by expert."""
    groups, rows = -(-config.hidden_size // 128), t * config.experts_per_token
    launch = place_scales_config(groups)
    grid = max_tiles(t, config.experts_per_token, config.num_experts, TILE_M) * TILE_M // launch["ROWS"]
    return Launch("place the rows' scales", "_place_scales_kernel", config.num_layers, (grid,),
                  32 * launch["num_warps"], "fp32", 0.0, 8.0 * rows * groups)


def _product(
    what: str, layers: int, part: Part, rows: int, read: float, written: float, sources: tuple[Source, ...]
) -> Launch:
    """A tensor-core product: two CTAs for every pair of multiprocessors. read, written: bytes of a row."""
    return Launch(what, "grouped_gemm", layers, (SMS // 2 * 2,), 384, part.unit, part.flop / layers,
                  part.weight_bytes / layers + rows * (read + written), sources)


def _decode_product(
    what: str, layers: int, part: Part, rows: int, read: float, written: float, sources: tuple[Source, ...]
) -> Launch:
    return Launch(what, "decode_gemm", layers, (SMS,), TUNED["fp8"].threads, part.unit, part.flop / layers,
                  part.weight_bytes / layers + rows * (read + written), sources)


def _decode_experts(config: ModelConfig, b: int, parts: Mapping[str, Part]) -> list[Launch]:
    """One token's experts choose and add for themselves; more tokens are placed, multiplied and combined."""
    layers, h, inner = config.num_layers, config.hidden_size, config.intermediate_size
    up, down, rows, where = (parts["experts_gate_up"], parts["experts_down"], b * config.experts_per_token,
                             f"E{config.num_experts}/T{b}")
    if b <= few_cuda.MOST_TOKENS["fp8"]:
        chosen = 4.0 * config.num_experts
        return [
            _router_logits(config, b, parts["router"]),
            _few_experts("gate/up product, choice included", 0, layers, b, rows * (2 * inner), up,
                         b * (_scaled(h) + chosen) + 2 * rows * inner),
            _few_experts("down product, sum included", 1, layers, b, b * h, down,
                         2 * rows * inner + b * (4 * h + chosen)),
        ]
    return [
        *_decode_routing(config, b, parts["router"]),
        _decode_product("gate/up product", layers, up, rows, _scaled(h), _scaled(inner),
                        (("moe", f"gemm1 with swiglu/{where}/uniform", "cuda, fp8 weights"),)),
        _decode_product("down product", layers, down, rows, _scaled(inner), 2 * h,
                        (("moe", f"gemm2/{where}/uniform", "cuda, fp8 weights"),)),
        _combine(config, b, layers, where),
    ]


def _few_experts(what: str, part: int, layers: int, b: int, results: int, of: Part, moved: float) -> Launch:
    """f16 products of widened e4m3 weights. results: rows of weights that this part multiplies, of all tokens."""
    return Launch(what, "few_experts", layers, (results // few_cuda.ROWS[part],), few_cuda.TUNED["fp8"][part].threads,
                  "bf16", of.flop / layers, of.weight_bytes / layers + moved)


def _few(what: str, name: str, layers: int, b: int, n: int, k: int, part: Part, per_result: int) -> Launch:
    """A projection of a few tokens: bf16 products of widened e4m3 weights, 16 rows of them in eight warps. per_result:
    bytes moved per result."""
    return Launch(what, "few_linear", layers, (n // ROWS,), 256, "bf16", part.flop / layers,
                  part.weight_bytes / layers + b * (2 * k + per_result * n),
                  (("profile", f"{name} projection/T{b}", "few, e4m3"),))


def _rope(config: ModelConfig, t: int, what: str, layers: int, full: int) -> list[Launch]:
    """Queries turned and copied, keys and values into the pages; in prefill beside each other as well."""
    launch = rope_config(config.num_kv_heads, config.head_dim, t)
    grid = (-(-t // launch["BLOCK_T"]), -(-config.num_heads // launch["GROUP"]) + 2)
    kv, prompt = 4 * config.num_kv_heads * config.head_dim, t > MOST_TOKENS
    made = []
    for kind, times, kept in (("full", full, t), ("sliding", layers - full, min(t, config.sliding_window))):
        kept = kept if prompt else t
        amount = t * 2 * (config.qkv_size + config.q_size) + kept * kv + (t * kv if prompt else 0)
        made.append(Launch(f"{what}, {kind}", "rope_cache_kernel", times, grid, 32 * launch["num_warps"], "fp32",
                           float(VECTOR["rope"] * t * (config.q_size + config.kv_size)), float(amount),
                           (("profile", f"rope and cache/T{t}", "triton"),) if kind == "full" and not prompt else ()))
    return made


def _kind(config: ModelConfig, sliding: bool) -> LayerKind:
    return LayerKind(config.num_heads, config.num_kv_heads, config.head_dim, torch.bfloat16,
                     config.sliding_window if sliding else None)


def _prefill_attention(config: ModelConfig, t: int, parts: Mapping[str, Part], full: int) -> list[Launch]:
    """Queries read in bf16, rows written in e4m3; the recorded launches write bf16."""
    window = _kind(config, True)
    chosen = prefill_config(window)
    tiles = -(-t // (chosen["BLOCK_M"] // chosen["GROUP_ROWS"]))
    rows, kv = t * (2 * config.q_size + _scaled(config.q_size)), t * 4 * config.num_kv_heads * config.head_dim
    sliding, whole = parts["attention_window"], parts["attention_full"]
    others = config.num_layers - full
    return [
        Launch("attention, full", "gluon_prefill_kernel", full, (SMS,), 512, "bf16", whole.flop / full, rows + kv,
               (("attention", f"prefill/full/{t}", "gluon"),)),
        Launch("attention, window", "prefill_kernel", others, (tiles, config.num_kv_heads), 32 * chosen["num_warps"],
               "bf16", sliding.flop / others, rows + kv,
               (("attention", f"prefill/window{config.sliding_window}/{t}", "triton"),
                ("profile", f"tune: window attention/T{t}", "as a window of 128"))),
    ]


def _decode_attention(
    config: ModelConfig, context: int, b: int, parts: Mapping[str, Part], full: int
) -> list[Launch]:
    from gptoss_kernels.attention.triton_decode import split_count

    made, heads = [], config.num_heads
    for sliding, times in ((False, full), (True, config.num_layers - full)):
        part = parts["attention_window" if sliding else "attention_full"]
        chosen = decode_config(_kind(config, sliding))
        blocks = 1 if sliding else -(-context // chosen["BLOCK_N"])
        splits = split_count(b, config.num_kv_heads, blocks, DECODE_PROGRAMS)
        partial = b * heads * splits * 4 * (config.head_dim + 2) if splits > 1 else 0
        out, name = b * 2 * config.q_size, f"window{config.sliding_window}" if sliding else "full"
        made.append(Launch(
            f"attention, {'window' if sliding else 'full'}", "decode_kernel", times, (splits, config.num_kv_heads, b),
            32 * chosen["num_warps"], "bf16", part.flop / times,
            part.kv_bytes / times + out + (partial if splits > 1 else out),
            (("attention", f"decode/{name}/{context}/batch{b}", "triton"),
             *((("profile", f"tune: decode attention/T{context}/batch{b}", f"{DECODE_PROGRAMS} programs, blocks for "
                 f"heads of {config.head_dim}"),) if not sliding else ()))))
        if splits > 1:
            made.append(Launch("merge the splits", "merge_kernel", times, (heads, b), 128, "fp32",
                               float(2 * b * heads * splits * config.head_dim), float(partial + out)))
    return made


def _prefill_routing(config: ModelConfig, t: int, router: Part) -> list[Launch]:
    """Above SCANNED_BLOCKS blocks of tokens a launch of its own sums their counts, else every placing program."""
    layers, rows, choose = config.num_layers, t * config.experts_per_token, choose_config(t)
    blocks, experts = -(-t // choose["BLOCK_T"]), max(16, power_of_two(config.num_experts))
    place, scan = place_config(choose["BLOCK_T"], config.experts_per_token), scan_config()
    counts = 4.0 * blocks * experts
    made = [Launch("choose experts", "_choose_kernel", layers, (blocks,), 32 * choose["num_warps"], "bf16",
                   router.flop / layers, router.weight_bytes / layers + 2 * t * config.hidden_size + 8 * rows + counts)]
    scanned = blocks > SCANNED_BLOCKS
    if scanned:
        made.append(Launch("scan the counts", "_scan_kernel", layers, (experts // scan["EXPERTS"],),
                           32 * scan["num_warps"], "fp32", 0.0, 2 * counts))
    return [*made, Launch("place rows", "_place_scanned_kernel" if scanned else "_place_kernel", layers, (blocks,),
                          32 * place["num_warps"], "fp32", 0.0, 12.0 * rows + counts)]


def _router_logits(config: ModelConfig, b: int, router: Part) -> Launch:
    layers, e = config.num_layers, config.num_experts
    chosen = logits_config(b, config.hidden_size)
    grid = (-(-b // chosen["BLOCK_T"]), -(-e // chosen["BLOCK_E"]) + 1)         # one more quantises the rows
    return Launch("router logits and quantised rows", "_logits_kernel", layers, grid, 32 * chosen["num_warps"], "fp32",
                  router.flop / layers, router.weight_bytes / layers + 2 * b * config.hidden_size + 4 * b * e
                  + b * _scaled(config.hidden_size))


def _decode_routing(config: ModelConfig, b: int, router: Part) -> list[Launch]:
    layers, e, rows = config.num_layers, config.num_experts, b * config.experts_per_token
    tables = 4.0 * (2 * max_tiles(b, config.experts_per_token, e, 16) * 17 + 3 * rows)
    logits = _router_logits(config, b, router)
    if b <= ONE_PROGRAM:
        return [logits, Launch("choose and place", "_choose_and_place_kernel", layers, (1,), 32 if b <= 2 else 128,
                               "fp32", 0.0, 4.0 * b * e + tables)]
    place = place_config(1, config.experts_per_token)
    return [logits, Launch("choose experts", "_choose_one_kernel", layers, (b,), 32, "fp32", 0.0,
                           4.0 * b * e + 8.0 * rows + 4.0 * b * power_of_two(e)),
            Launch("place rows", "_place_kernel", layers, (b,), 32 * place["num_warps"], "fp32", 0.0,
                   4.0 * b * power_of_two(e) + tables)]


def _combine_norm(config: ModelConfig, t: int) -> Launch:
    """Of all layers but the last: the norm that the next one's QKV takes is made along."""
    h, k = config.hidden_size, config.experts_per_token
    return Launch("combine, residual and next norm included", "_combine_norm_kernel", config.num_layers - 1, (t,),
                  32 * combine_norm_config(h)["num_warps"], "fp32",
                  float((VECTOR["combine"] * k + VECTOR["norm"] + VECTOR["quantise"]) * t * h),
                  t * (2.0 * h * (k + 2) + 8.0 * k + _scaled(h)))


def _combine(config: ModelConfig, t: int, times: int, where: str) -> Launch:
    h, k = config.hidden_size, config.experts_per_token
    launch = combine_config(t, h)
    return Launch("combine, residual included", "_combine_kernel", times, (t, -(-h // launch["BLOCK_H"])),
                  32 * launch["num_warps"], "fp32", float(VECTOR["combine"] * k * t * h),
                  2.0 * t * h * (k + 2) + 8.0 * t * k,
                  (*([_tuned("combine", t, config.num_experts)] if t > FEW_TOKENS else []),
                   ("moe", f"combine/{where}/uniform", "triton")))


def _head(config: ModelConfig, rows: int, part: Part) -> list[Launch]:
    h = config.hidden_size
    norm = norm_residual_config(h)
    return [Launch("norm before the head", "norm_residual_kernel", 1, (rows,), 32 * norm["num_warps"], "fp32",
                   float(VECTOR["norm"] * rows * h), 4.0 * rows * h + 4 * h),
            _torch("head", "head gemm", 1, "bf16", part.flop, part.weight_bytes + part.activation_bytes),
            _torch("logits to fp32", "copy", 1, "fp32", 0.0, 6.0 * rows * config.vocab_size)]
