"""The fused all-reduce on two GPUs, against the plain sum: any rows, many calls in a row, in a replayed graph."""
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA GPUs, there are {torch.cuda.device_count()}")]
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def two():
    from gptoss_lab.parallel import Ranks

    with Ranks(2, "nccl", timeout=60) as ranks:
        yield ranks


@pytest.mark.parametrize("form", ["one_shot", "two_shot", None])
def test_sums_and_norms(two, form):
    """The sum has the reference's own bits; the norm at most one step of bf16 at its largest values (about 6)."""
    import comm_gpu_work

    for found in two.run(comm_gpu_work.errors, form, (1, 3, 8, 128, 1000), 2880, torch.bfloat16, 10):
        assert found[0] == 0.0 and found[1] <= 2**-5


@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
def test_other_shapes(two, form):
    import comm_gpu_work

    for found in two.run(comm_gpu_work.errors, form, (1, 5), 224, torch.float32, 3):
        assert found[0] <= 1e-6 and found[1] <= 1e-5


@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
@pytest.mark.parametrize("rows", [1, 8, 128])
def test_in_a_graph(two, form, rows):
    import comm_gpu_work

    assert two.run(comm_gpu_work.replayed, form, rows, 2880) == [0.0, 0.0]


@pytest.mark.parametrize(("form", "rows"), [("one_shot", 1), ("one_shot", 8), ("two_shot", 33), ("two_shot", 2048)])
def test_a_residual_stream(two, form, rows):
    """As in a model: each call's residual is the last call's sum, in the two-shot form in the very same memory."""
    import comm_gpu_work

    assert two.run(comm_gpu_work.chained, form, rows, 2880, 4) == [0.0, 0.0]
