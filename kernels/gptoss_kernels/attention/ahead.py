"""What the attention kernels are given when they are compiled for Hopper without a GPU (gptoss_kernels.ahead)."""
from __future__ import annotations

import triton
from triton.experimental.gluon._runtime import GluonASTSource

from gptoss_kernels.ahead import ALIGNED, HOPPER, Resources, compile_kernel, resources
from gptoss_kernels.attention.gluon_backend import OPTIONS, tile_layout
from gptoss_kernels.attention.gluon_prefill import ROWS, gluon_prefill_kernel
from gptoss_kernels.attention.layer import DTYPES, LayerKind
from gptoss_kernels.attention.triton_backend import decode_config, prefill_config
from gptoss_kernels.attention.triton_decode import decode_kernel, merge_kernel
from gptoss_kernels.attention.triton_prefill import next_power_of_two, prefill_kernel


def compile_prefill(
    layer: LayerKind, *, page_size: int = 0, lse: bool = False, e4m3: bool = False, quantise: bool = False,
    **changed: int,
) -> Resources:
    """Compile the prefill kernel for a kind of layer (page_size 0: ragged). e4m3: of the pages. quantise: the output.
    changed: other block sizes or options."""
    element = DTYPES[layer.dtype]
    constants = {
        "NUM_HEADS": layer.num_heads, "GROUP": layer.group, "HEAD_DIM": layer.head_dim,
        "WINDOWED": layer.window is not None, "PAGED": page_size > 0, "PAGE_SIZE": page_size, "SINK_FIRST": True,
        "LSE": lse, "E4M3": e4m3, "PRECISION": "ieee" if element == "fp32" else "tf32", "INTERPRET": False,
        **_output(quantise), **prefill_config(layer), **changed,
    }
    stored = "fp8e4nv" if e4m3 else element
    types = {"q": element, "k": stored, "v": stored, "out": "fp8e4nv" if quantise else element, "sinks": "bf16",
             "lse": "fp32", "key_scales": "fp32", "value_scales": "fp32", "out_scales": "fp32"}
    return _compile(prefill_kernel, types, constants)


def compile_decode(
    layer: LayerKind, *, page_size: int = 64, splits: int = 8, e4m3: bool = False, **changed: int
) -> Resources:
    """Compile the decode kernel for a kind of layer. e4m3: of the pages."""
    element = DTYPES[layer.dtype]
    constants = {
        "NUM_HEADS": layer.num_heads, "GROUP": layer.group, "ROWS": max(16, next_power_of_two(layer.group)),
        "HEAD_DIM": layer.head_dim, "SPLITS": splits, "WINDOWED": layer.window is not None, "PAGE_SIZE": page_size,
        "SINK_FIRST": True, "LSE": False, "E4M3": e4m3, "PRECISION": "ieee" if element == "fp32" else "tf32",
        "INTERPRET": False, **decode_config(layer), **changed,
    }
    stored = "fp8e4nv" if e4m3 else element
    types = {"q": element, "k_pages": stored, "v_pages": stored, "key_scales": "fp32", "value_scales": "fp32",
             "out": element, "sinks": "bf16", "lse": "fp32", "part_out": "fp32", "part_m": "fp32", "part_den": "fp32"}
    return _compile(decode_kernel, types, constants)


def compile_merge(layer: LayerKind, *, splits: int = 8) -> Resources:
    """Compile the kernel that merges the splits of a decode."""
    constants = {
        "NUM_HEADS": layer.num_heads, "HEAD_DIM": layer.head_dim, "BLOCK_N": decode_config(layer)["BLOCK_N"],
        "SPLITS": splits, "SPLIT_ROWS": next_power_of_two(splits), "WINDOWED": layer.window is not None,
        "SINK_FIRST": True, "LSE": False,
    }
    types = {"out": DTYPES[layer.dtype], "sinks": "bf16", "lse": "fp32", "part_out": "fp32", "part_m": "fp32",
             "part_den": "fp32"}
    return _compile(merge_kernel, types, constants)


def compile_gluon(layer: LayerKind, *, lse: bool = False, quantise: bool = False) -> Resources:
    """Compile the Gluon prefill kernel for a kind of layer (head_dim 64, 16-bit). quantise: the output."""
    element = DTYPES[layer.dtype]
    block, constants = OPTIONS["BLOCK"], {
        "NUM_HEADS": layer.num_heads, "GROUP": layer.group, "HEAD_DIM": layer.head_dim, "SINK_FIRST": True, "LSE": lse,
        **_output(quantise), **OPTIONS,
    }
    boxes = {"q_desc": [ROWS // layer.group, layer.group, layer.head_dim], "k_desc": [block, layer.head_dim],
             "v_desc": [block, layer.head_dim]}
    types = {name: f"tensordesc<{element}{box},{tile_layout(len(box))!r}>" for name, box in boxes.items()}
    pointers = {"out": "fp8e4nv" if quantise else element, "sinks": "bf16", "lse": "fp32", "tiles": "i32",
                "out_scales": "fp32"}
    signature, attributes = {}, {}
    for index, name in enumerate(gluon_prefill_kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in pointers and name not in constants:
            signature[name] = f"*{pointers[name]}"
            attributes[(index,)] = ALIGNED
        elif name == "scale_log2":
            signature[name] = "fp32"
    source = GluonASTSource(gluon_prefill_kernel, signature, constexprs=constants, attrs=attributes)
    return resources(triton.compile(source, target=HOPPER, options={"num_warps": 4}))


def _output(quantise: bool) -> dict[str, object]:
    """The constants that say whether the output is e4m3; its scales are column-major."""
    return {"QUANTISE": quantise, "stride_st": 1} | ({} if quantise else {"out_scales": None, "stride_sg": 1})


def _compile(kernel: triton.JITFunction, element_types: dict[str, str], constants: dict[str, object]) -> Resources:
    strides = [name for name in kernel.arg_names if name.startswith("stride")]
    types = {name: "*" + element_types.get(name, "i32") for name in kernel.arg_names if name not in strides}
    return compile_kernel(kernel, {**types, "scale_log2": "fp32", "window": "i32"}, constants, strides)
