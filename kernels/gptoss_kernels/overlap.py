"""Triton kernels that are launched before the one in front has ended (programmatic dependent launch, sm_90).

In a decode step a kernel takes two microseconds, and nearly one passes from its last instruction to the first of the
next. A kernel launched with `**OVERLAPPING` is set up in that time, and with its first line, `after_previous()`, waits
until everything before it is written. The line also lets the next kernel be set up; that one, if it was launched so,
waits in its turn. A kernel that shall let it come later makes the two steps apart. In front of the line nothing is
written, and read only, by `load_early`, what no kernel writes that may still be running: weights, tables, and what was
copied to the device before the step.
"""
import torch
import triton
import triton.language as tl

_POSSIBLE = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9     # no GPU: compiled for one
OVERLAPS = tl.constexpr(_POSSIBLE and not triton.knobs.runtime.interpret)
OVERLAPPING = {"launch_pdl": True} if OVERLAPS.value else {}
"""Launch options."""


@triton.jit
def wait_for_previous():
    """Wait for the kernel in front."""
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start():
    """The next kernel may be set up once all programs of this one have come here."""
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def after_previous():
    """Wait for the kernel in front, and let the next one be set up."""
    wait_for_previous()
    let_next_start()


@triton.jit
def load_early(pointers, mask):
    """`tl.load` for in front of `after_previous`, 0 where masked; an ordinary load would be moved behind it."""
    return tl.load(pointers, mask=mask, other=0, volatile=True)
