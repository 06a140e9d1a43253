"""The streaming writer, read back by the safetensors library; what it refuses; what it leaves behind."""
import hashlib
import json

import pytest
import torch
from checkpoint_helpers import same_bits
from safetensors.torch import load_file

from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import TensorSpec
from gptoss_lab.checkpoint.writer import ShardWriter, write_json

SPECS = [
    TensorSpec("codes", (3, 5), "U8", "expert weights"), TensorSpec("half", (7,), "BF16", "norms"),
    TensorSpec("scale", (2, 3), "F32", "expert scales"), TensorSpec("eight", (4, 3), "F8_E4M3", "expert weights"),
]
TENSORS = {
    "codes": torch.arange(15, dtype=torch.uint8).view(3, 5), "half": torch.randn(7).to(torch.bfloat16),
    "scale": torch.randn(2, 3), "eight": torch.randn(4, 3).to(torch.float8_e4m3fn),
}


def test_pieces_in_any_order_make_the_file(tmp_path):
    file = tmp_path / "x.safetensors"
    with ShardWriter(file, SPECS) as writer:
        for start in range(4):
            writer.write("eight", TENSORS["eight"][start : start + 1])
            if start < 3:
                writer.write("codes", TENSORS["codes"][start])
        writer.write("scale", TENSORS["scale"].T.contiguous().T)                # not contiguous
        writer.write("half", TENSORS["half"][:0])
        writer.write("half", TENSORS["half"])
        assert not file.exists()
        sums = writer.close()
    loaded = load_file(file)
    assert all(same_bits(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert sums == {
        name: hashlib.sha256(tensor.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in TENSORS.items()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_every_tensor_starts_at_a_multiple_of_its_element(tmp_path):
    file = tmp_path / "x.safetensors"
    with ShardWriter(file, SPECS, checksums=False) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)
        assert writer.close() == {}
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(raw[8 : 8 + length]).items():
        assert name == "__metadata__" or entry["data_offsets"][0] % TENSORS[name].element_size() == 0


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (lambda w: w.write("ghost", TENSORS["half"]), "ghost was written but is not planned"),
        (lambda w: w.write("half", TENSORS["half"].float()), "half is BF16, but torch.float32"),
        (lambda w: [w.write("half", TENSORS["half"]) for _ in range(2)], "half has 14 bytes, but more was written"),
        (lambda w: [w.write("half", TENSORS["half"][:6]), w.close()], r"0 of the 24 bytes of scale were written"),
        (lambda w: [*(w.write(n, t) for n, t in TENSORS.items() if n != "codes"), w.close()], "0 of the 15 bytes"),
    ],
)
def test_a_file_that_is_not_whole_does_not_appear(tmp_path, work, words):
    with pytest.raises(CheckpointError, match=words) as error, ShardWriter(tmp_path / "x.safetensors", SPECS) as writer:
        work(writer)
    assert "x.safetensors" in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_planned_twice(tmp_path):
    with pytest.raises(CheckpointError, match="half is planned twice"):
        ShardWriter(tmp_path / "x.safetensors", [*SPECS, SPECS[1]])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        ShardWriter(tmp_path / "no" / "x.safetensors", SPECS)
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        write_json(tmp_path / "no" / "x.json", {})
