"""The bench of a layer's small kernels: what can be known of it without a GPU."""
import pytest
import torch

from gptoss_lab.bench import layer
from gptoss_lab.results import make_row


def test_without_a_gpu_it_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):
        layer.run()


def test_table():
    assert [case.name for case in layer.CASES][0] == "T1"
    rows = [make_row("profile", "qkv projection/T1", "e4m3, decode", "microseconds", [5.0, 6.0, 7.0], "us", bound=3.0,
                     peer=("torch bf16", 9.0))]
    assert layer.table(rows).split() == ["qkv", "projection/T1", "e4m3,", "decode", "6.0", "us", "50.0%", "1.50x",
                                         "33.3%"]
