"""Attention with sinks over packed dialogues, with gradients, in three forms that compute the same.

An attention here is `attend(layer, q, k, v, sinks, window)` over one packed batch: q [T, Hq, D], k and v [T, Hkv, D],
sinks [Hq], dialogues one after the other as `offsets` [B + 1] says; it returns [T, Hq, D].

    reference   gptoss_kernels.reference.attention, one dialogue after the other; any device, slow on many
    flash       PyTorch's variable-length flash kernels, which know windows but no sinks
    flex        PyTorch's flex_attention, compiled, with the sink applied afterwards through the log-sum-exp

How flash learns of sinks: with o0 and l0 the kernel's output and log-sum-exp, the full denominator is
l = log(exp(l0) + exp(s)) and the output is o = o0 exp(l0 - l). The kernel's backward recomputes p = exp(z - l0) from
the l0 that it is given and takes the row term sum(do * o); given l and o instead, its p is the true probability and its
row term the true one, so dq, dk and dv come out exact with nothing else changed. What is left is the sink's own
gradient, -exp(s - l) sum(do * o). No virtual key, no mask in memory, no padding.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from gptoss_kernels.reference.attention import sink_attention

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int | None], torch.Tensor]
FORMS = ("reference", "flash", "flex")


def packed(form: str, offsets: Sequence[int], device: torch.device) -> Attend:
    """The attention of one packed batch. form: one of FORMS. offsets: [B + 1], where dialogues begin, ints."""
    if form == "reference":
        return functools.partial(_reference, tuple(offsets))
    if form == "flash":
        starts = to_device(torch.tensor(offsets, dtype=torch.int32), device)
        longest = max(b - a for a, b in zip(offsets[:-1], offsets[1:], strict=True))
        return functools.partial(_flash, FlashKernels(starts, longest))
    if form == "flex":
        return _Flex(offsets, device)
    raise ValueError(f"attention form is {form!r}; one of {', '.join(FORMS)}")


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`; on a GPU through pinned memory, so the host does not wait for the work before it."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _reference(
    offsets: tuple[int, ...], layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    return sink_attention(q, k, v, sinks, cu_seqlens_q=offsets, cu_seqlens_k=offsets, window=window)[0]


# -- flash -------------------------------------------------------------------------------------------------------------
class FlashKernels:
    """PyTorch's flash kernels on packed sequences. starts: [B + 1] int32. longest: tokens of the longest."""

    def __init__(self, starts: torch.Tensor, longest: int) -> None:
        self.starts, self.longest = starts, longest

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """(out [T, Hq, D], log-sum-exp [Hq, T] fp32, what the backward needs of the generator)."""
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, self.starts, self.starts, self.longest, self.longest, 0.0, True, False, **_window(window),
        )
        return out, lse, (state, unused)

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, state: tuple[torch.Tensor, ...], window: int | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v."""
        return torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, self.starts, self.starts, self.longest, self.longest, 0.0, True, *state,
            **_window(window),
        )


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _flash(
    kernels: FlashKernels, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor,
    window: int | None,
) -> torch.Tensor:
    return WithSink.apply(q.contiguous(), k.contiguous(), v.contiguous(), sinks.float(), kernels, window)


class WithSink(torch.autograd.Function):
    """A sink on top of kernels without one; see the module's text."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, kernels, window):
        """q [T, Hq, D], k and v [T, Hkv, D], sinks [Hq] fp32 -> [T, Hq, D]. kernels: as `FlashKernels`."""
        plain, lse, state = kernels.forward(q, k, v, window)
        full = torch.logaddexp(lse, sinks[:, None].to(lse.dtype))                     # [Hq, T]
        out = (plain.to(lse.dtype) * torch.exp(lse - full).t()[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, full, sinks, *state)
        ctx.kernels, ctx.window = kernels, window
        return out

    @staticmethod
    def backward(ctx, grad):
        """Gradients of q, k, v and sinks."""
        q, k, v, out, full, sinks, *state = ctx.saved_tensors
        grad = grad.contiguous()
        dq, dk, dv = ctx.kernels.backward(grad, q, k, v, out, full, tuple(state), ctx.window)
        row = (grad.to(full.dtype) * out.to(full.dtype)).sum(dim=-1)                  # [T, Hq]
        dsinks = -(torch.exp(sinks[:, None].to(full.dtype) - full) * row.t()).sum(dim=1)
        return dq, dk, dv, dsinks.to(sinks.dtype), None, None


# -- flex --------------------------------------------------------------------------------------------------------------
class _Flex:
    """flex_attention over one packed batch; on the CPU uncompiled and without gradients."""

    def __init__(self, offsets: Sequence[int], device: torch.device) -> None:
        lengths = torch.tensor([b - a for a, b in zip(offsets[:-1], offsets[1:], strict=True)], device=device)
        self._dialogue = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
        self._masks: dict[int | None, object] = {}

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        from torch.nn.attention.flex_attention import AuxRequest

        if window not in self._masks:
            self._masks[window] = self._mask(window)
        rows = (x.transpose(0, 1)[None] for x in (q, k, v))                           # [1, heads, T, D]
        out, aux = _flex_attention(q.device.type)(
            *rows, block_mask=self._masks[window], enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        kept = torch.sigmoid(aux.lse - sinks.float()[None, :, None])                  # [1, Hq, T]
        return (out * kept[..., None].to(out.dtype))[0].transpose(0, 1)

    def _mask(self, window: int | None) -> object:
        from torch.nn.attention.flex_attention import create_block_mask

        dialogue = self._dialogue

        def seen(batch, head, query, key):
            same = (dialogue[query] == dialogue[key]) & (key <= query)
            return same if window is None else same & (query - key < window)

        size = len(dialogue)
        return create_block_mask(seen, None, None, size, size, device=dialogue.device)


@functools.cache
def _flex_attention(device: str) -> Callable[..., object]:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=False)


# -- choice ------------------------------------------------------------------------------------------------------------
TOLERANCE = 2e-2
"""Of the self-check: largest difference over the largest value; bf16 keeps 8 bits, and gradients sum over rows."""


def choose_form(device: torch.device, dtype: torch.dtype, form: str = "auto") -> tuple[str, str]:
    """(form, reason). "auto": on a GPU the first of flash and flex whose values and gradients are the reference's."""
    if form != "auto":
        return form, "asked for"
    if device.type != "cuda":
        return "reference", f"the device is {device.type}; flash and flex need a GPU"
    refused = []
    for name in ("flash", "flex"):
        why = disagreement(name, device, dtype)
        if why is None:
            return name, "agrees with the reference" + "".join(f"; {r}" for r in refused)
        refused.append(f"{name} refused: {why}")
    return "reference", "; ".join(refused)


def disagreement(form: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a form is not to be used here: its error, or how far it is from the reference. None if it agrees."""
    torch.manual_seed(0)
    offsets = (0, 5, 200, 700, 1024)
    q, k, v = (torch.randn(1024, heads, 64, device=device, dtype=dtype, requires_grad=True) for heads in (8, 2, 2))
    sinks = torch.randn(8, device=device, requires_grad=True)
    weight = torch.randn(1024, 8, 64, device=device, dtype=dtype)
    for window in (None, 128):
        found = []
        for name in ("reference", form):
            try:
                out = packed(name, offsets, device)(0, q, k, v, sinks, window)
                found.append((out, *torch.autograd.grad((out * weight).float().sum(), (q, k, v, sinks))))
            except (RuntimeError, TypeError, AttributeError, ImportError, NotImplementedError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        for what, right, mine in zip(("out", "dq", "dk", "dv", "dsinks"), *found, strict=True):
            off = float(((right - mine).float().abs().max() / right.float().abs().max()).detach())
            if not off < TOLERANCE:
                return f"{what} is off by {off:.1e} with window {window}"
    return None
