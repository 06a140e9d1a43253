"""The expert layer with gradients: rows sorted by expert, one grouped product for all experts, rows sorted back.

Every token has k rows, one for each chosen expert. Sorted by expert they are E blocks, and a grouped product multiplies
each block with its own matrix: `torch._grouped_mm` in bf16 on Hopper, a loop elsewhere. Two details keep the backward
plain and deterministic. Sorting there and back are permutations, whose gradient is the inverse permutation, not a
scatter with atomic adds. And the biases come without a scatter: gate_up's is one more input column whose value is 1
(eight, so that rows stay multiples of 16 bytes), down's is the dense matrix of expert weights times the biases.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

PAD = 8
"""Columns added for the bias: 16 bytes in bf16, which the grouped product needs rows to be a multiple of."""

GROUPED_KERNEL = True
"""Whether a GPU uses PyTorch's grouped kernel in bf16, else the loop."""
Swiglu = Callable[[torch.Tensor, float, float], torch.Tensor]


def expert_layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down: torch.Tensor,
    down_bias: torch.Tensor,
    *,
    alpha: float,
    limit: float,
    swiglu: Swiglu,
) -> torch.Tensor:
    """Sum over each token's experts of weight * (down(swiglu(gate_up(x) + bias)) + bias).

    x: [T, H]. ids: [T, k] int64. weights: [T, k] fp32. gate_up: [E, 2 I, H], rows alternating gate and up; down:
    [E, H, I]; biases [E, 2 I] and [E, H]; all in x's dtype. Returns [T, H] in x's dtype; the sum is fp32 at least.
    """
    tokens, k = ids.shape
    experts = gate_up.shape[0]
    chosen = functional.one_hot(ids, experts)                                         # [T, k, E]
    ends = chosen.sum(dim=(0, 1)).cumsum(0).to(torch.int32)                           # [E]
    order = torch.argsort(ids.flatten(), stable=True)                                 # [T k]
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ones = functional.pad(x.new_ones(tokens, 1), (0, PAD - 1))
    rows = _Spread.apply(torch.cat([x, ones], dim=1), order, inverse, k)              # [T k, H + 8]
    matrices = torch.cat([gate_up, gate_up_bias[..., None], gate_up.new_zeros(*gate_up.shape[:2], PAD - 1)], dim=-1)
    h = swiglu(grouped_product(rows, matrices, ends), alpha, limit)                       # [T k, I]
    y = _Permute.apply(grouped_product(h, down, ends), inverse, order)                # [T k, H], token by token
    wide = torch.promote_types(x.dtype, torch.float32)
    total = (y.view(tokens, k, -1).to(wide) * weights[..., None]).sum(dim=1)
    dense = (chosen * weights[..., None]).sum(dim=1)                                  # [T, E]
    return (total + dense.to(wide) @ down_bias.to(wide)).to(x.dtype)


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Block e of `rows` times matrix e transposed. rows: [N, in]; matrices: [E, out, in]; ends: [E] int32, one past."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and GROUPED_KERNEL:
        return _kernel(rows, matrices, ends)
    return _loop(rows, matrices, ends)


def _kernel(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return torch._grouped_mm(rows, matrices.transpose(-2, -1), offs=ends)


def _loop(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    blocks = rows.tensor_split(ends[:-1].tolist())
    return torch.cat([block @ matrix.t() for block, matrix in zip(blocks, matrices, strict=True)])


def choose_product(device: torch.device) -> tuple[bool, str]:
    """(whether to use the grouped kernel, why). On a GPU it must agree with the loop, gradients too."""
    if device.type != "cuda":
        return True, "loop: the device is no GPU"
    torch.manual_seed(0)
    ends = torch.tensor([5, 5, 300, 512], dtype=torch.int32, device=device)
    inputs = [torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((512, 232), (4, 576, 232))]
    found = []
    for product in (_loop, _kernel):
        leaves = [x.clone().requires_grad_() for x in inputs]
        try:
            out = product(*leaves, ends)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), leaves)))
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            return False, f"loop: the grouped kernel raised {type(error).__name__}: {str(error)[:200]}"
    pairs = zip(*found, strict=True)
    off = max(float(((a - b).float().abs().max() / a.float().abs().max()).detach()) for a, b in pairs)
    return (True, "grouped kernel") if off < 2e-2 else (False, f"loop: the grouped kernel is off by {off:.1e}")


def balance_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """E * sum_e (share of rows at e) * (mean probability of e): 1 when even, E when one expert takes all.

    logits: [T, E] fp32. ids: [T, k]. The probabilities carry the gradient, the shares do not (Switch Transformer).
    """
    experts = logits.shape[-1]
    share = functional.one_hot(ids, experts).float().mean(dim=(0, 1))
    return experts * (share * torch.softmax(logits, dim=-1).mean(dim=0)).sum()


class _Spread(torch.autograd.Function):
    """Each token's row k times, in the order of experts. The gradient adds the k rows of a token up again."""

    @staticmethod
    def forward(ctx, x, order, inverse, k):
        """x [T, C] -> [T k, C]."""
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx, grad):
        """[T k, C] -> [T, C]."""
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.k)).sum(dim=1), None, None, None


class _Permute(torch.autograd.Function):
    """Rows in another order; the gradient in the inverse order."""

    @staticmethod
    def forward(ctx, x, permutation, inverse):
        """x [N, C] -> x[permutation]."""
        ctx.save_for_backward(inverse)
        return x[permutation]

    @staticmethod
    def backward(ctx, grad):
        """[N, C] in the order before."""
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None
