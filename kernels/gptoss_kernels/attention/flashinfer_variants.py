"""The sink as two small C++ classes that FlashInfer's kernel templates call: one for FA2, one for FA3.

What: a kernel template of FlashInfer owns the loop over keys; a "variant" class fills in what is particular. These two
add one logit to the softmax, whose value vector is zero.

How: a template lets a variant touch the running maximum m and the denominator d only once, after the loop, and under
split-KV once per chunk. So the sink is folded in there, by the first chunk alone:

    m' = max(m, s),   d' = d * 2^(m - m') + 2^(s - m'),   output *= 2^(m - m') / d'

That equals starting the loop at m = s, d = 1 (see `triton_prefill`): the online softmax does not care at which place a
key comes by. Everything is in units of log2, so a sink s enters as s * log2(e).

Why own ones: these read the sinks as bf16 or fp32 (`sink_bits` says which), guard the row that sees neither key nor
sink, and the FA3 one can leave the sink out of the returned LSE (`sink_in_lse`).

What is lost: FA2's LSE always includes the sink, because FA2 merges its chunks by that LSE; the caller who wants it
without runs FA2 with sinks of -inf and rescales the output afterwards (`sinks.rescale_by_sink`).
"""
from __future__ import annotations

READ_SINK = r"""
// The sinks are one array of bf16 or of float; 16 or 32 bits each. Returns units of log2.
__device__ __forceinline__ float gptoss_read_sink(const void* sinks, int64_t bits, uint32_t head) {
  const float s = bits == 16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(sinks)[head])
                             : static_cast<const float*>(sinks)[head];
  return s * math::log2e;
}
"""

FA2_SOURCE = READ_SINK + r"""
struct GptOssSinkFA2 : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;  // the template reads these names
  float sm_scale_log2;                   // and this one

  template <typename Params>
  __device__ __host__ GptOssSinkFA2(const Params& params, uint32_t batch_idx, uint8_t*)
      : qo_len(params.get_qo_len(batch_idx)), kv_len(params.get_kv_len(batch_idx)) {
    window_left = params.window_left < 0 ? kv_len : static_cast<uint32_t>(params.window_left);
    sm_scale_log2 = static_cast<float>(params.sm_scale) * math::log2e;
  }

  // Query qo_idx stands at key position kv_len - qo_len + qo_idx and sees window_left keys before its own.
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return kv_len + qo_idx <= kv_idx + qo_len + window_left;
  })

  REGISTER_M_D_UPDATE(params, kv_tile_idx, qo_head_idx, m, d, scale, {
    scale = 1.f;
    if (kv_tile_idx != 0 || qo_head_idx >= params.num_qo_heads) return;
    const float s = gptoss_read_sink(params.sinks, params.sink_bits, qo_head_idx);
    const float before = static_cast<float>(m);
    const float top = fmaxf(before, s);
    if (top == -math::inf) return;  // neither a key nor a sink
    scale = math::ptx_exp2(before - top);
    d = d * scale + math::ptx_exp2(s - top);
    m = top;
  })

  REGISTER_OUTPUT_TRANSFORM(params, output, batch_idx, qo_idx, qo_head_idx, m, d, scale, {
    return d > 0.f ? output * (scale * math::ptx_rcp(d)) : 0.f;
  })
};
"""

FA3_SOURCE = READ_SINK + r"""
template <int ROWS>
struct GptOssSinkSoftmax : OnlineSoftmax<ROWS, /*WITH_SCALE=*/true> {
  using Base = OnlineSoftmax<ROWS, /*WITH_SCALE=*/true>;
  float sink2;
  bool sink_in_lse;

  CUTLASS_DEVICE GptOssSinkSoftmax(float scale2, float sink2, bool sink_in_lse)
      : Base(scale2), sink2(sink2), sink_in_lse(sink_in_lse) {}

  // Called once after the last key block. Leaves the factor of the output in scores_scale, the LSE in row_sum.
  template <typename Scores>
  __forceinline__ __device__ void finalize(Scores&, float pv_scale = 1.f) {
    SumOp<float> add;
    quad_allreduce_(this->row_sum, this->row_sum, add);  // until here each of 4 threads held a part of the row
#pragma unroll
    for (int i = 0; i < size(this->row_max); ++i) {
      const float before = this->row_max(i) * this->sm_scale_log2;
      const float keys = this->row_sum(i);
      const float top = fmaxf(before, sink2);
      const bool empty = top == -math::inf;  // neither a key nor a sink
      const float keep = empty ? 0.f : math::ptx_exp2(before - top);
      const float all = empty ? 0.f : keys * keep + math::ptx_exp2(sink2 - top);
      this->scores_scale(i) = empty ? 0.f : pv_scale * keep / all;
      this->row_sum(i) = sink_in_lse ? top + math::ptx_log2(all) : before + math::ptx_log2(keys);
    }
  }
};

struct GptOssSinkFA3 : AttentionVariantBase {
  float scale2, sink2;
  bool sink_in_lse;

  template <typename MainloopParams, typename BlockCoord>
  __device__ GptOssSinkFA3(const MainloopParams& params, const BlockCoord& block) {
    const auto& own = params.additional_params;
    scale2 = static_cast<float>(own.sm_scale) * math::log2e;
    sink2 = gptoss_read_sink(own.sinks, own.sink_bits, cute::get<1>(block));  // entry 1 is the query head
    sink_in_lse = own.sink_in_lse != 0;
  }

  template <int ROWS>
  __device__ auto GetAttentionUpdater() {
    return GptOssSinkSoftmax<ROWS>(scale2, sink2, sink_in_lse);
  }
};
"""

SOURCES = {"fa2": ("GptOssSinkFA2", FA2_SOURCE), "fa3": ("GptOssSinkFA3", FA3_SOURCE)}
EXTRA_TENSORS = (["sinks"], ["float"])          # the C type only names the pointer; sink_bits tells how to read it
EXTRA_SCALARS = (["sm_scale", "sink_bits", "sink_in_lse"], ["double", "int64_t", "int64_t"])


def module_name(template: str, dtype_name: str, head_dim: int, windowed: bool) -> str:
    """Name of the compiled module; everything that changes its machine code is in it."""
    window = "_window" if windowed and template == "fa3" else ""   # FA2 reads the window at run time
    return f"gptoss_sink_{template}_{dtype_name}_d{head_dim}{window}"
