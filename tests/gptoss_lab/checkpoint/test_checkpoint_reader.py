"""Reading both layouts, and refusing everything that is not whole before a tensor is read."""
import json
import shutil

import pytest
import torch
from checkpoint_helpers import INDEX, TINY, same_bits, tensors_of, write_sharded, write_single
from safetensors.torch import load_file, save_file

from gptoss_lab.checkpoint import mxfp4
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.header import read_header
from gptoss_lab.checkpoint.reader import open_checkpoint
from gptoss_lab.checkpoint.stored import Dense, Mxfp4, split_gate_up

GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
PROJECTIONS = ("gate_up_proj", "down_proj")


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_every_tensor_under_its_hugging_face_name(layout, device):
    expected = tensors_of("hf")
    checkpoint = open_checkpoint(TINY / layout)
    assert checkpoint.layout == layout and checkpoint.config.num_layers == 4
    for name, tensor in expected.items():
        assert same_bits(checkpoint.tensor(name, device), tensor)


@pytest.mark.parametrize("layout", ["hf", "original"])
def test_sharded_is_the_same_as_single(tmp_path, layout):
    folder = write_sharded(tmp_path / "sharded", tensors_of(layout), layout=layout)
    checkpoint, expected = open_checkpoint(folder), tensors_of("hf")
    assert len(checkpoint.files) == 3
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        assert same_bits(checkpoint.tensor(name), tensor)
        last = tensor.shape[0]
        for start, stop in ((0, last), (last // 3, last - 1), (last - 1, last), (0, 0)):
            assert same_bits(checkpoint.rows(name, start, stop), tensor[start:stop])


def test_a_file_opens_too():
    assert open_checkpoint(TINY / "hf" / "model.safetensors").nbytes == open_checkpoint(TINY / "hf").nbytes


@pytest.mark.parametrize("layout", ["hf", "original"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_experts_come_as_stored(layout, device):
    checkpoint, expected = open_checkpoint(TINY / layout), tensors_of("hf")
    for projection in PROJECTIONS:
        prefix = f"model.layers.2.mlp.experts.{projection}"
        whole = checkpoint.experts(2, projection, device=device)
        assert isinstance(whole, Mxfp4)
        assert same_bits(whole.blocks, expected[f"{prefix}_blocks"])
        assert same_bits(whole.scales, expected[f"{prefix}_scales"])
        part = checkpoint.experts(2, projection, slice(3, 7), device=device)
        assert same_bits(part.blocks, expected[f"{prefix}_blocks"][3:7])
        assert same_bits(part.dequantise(), mxfp4.decode(part.blocks, part.scales, torch.bfloat16))
        assert same_bits(checkpoint.expert_bias(2, projection), expected[f"{prefix}_bias"])
    linear = checkpoint.linear("model.layers.0.self_attn.v_proj", device)
    assert isinstance(linear, Dense) and same_bits(linear.weight, expected["model.layers.0.self_attn.v_proj.weight"])


def test_gate_is_even_and_up_is_odd():
    """Weights and bias alike: gate is rows 0::2, up rows 1::2, in whichever axis the outputs lie."""
    checkpoint = open_checkpoint(TINY / "hf")
    weight, bias = checkpoint.experts(0, "gate_up_proj").dequantise(), checkpoint.expert_bias(0, "gate_up_proj")
    for tensor, axis in ((weight, 1), (weight, -2), (weight.transpose(1, 2), 2), (weight.transpose(1, 2), -1)):
        gate, up = split_gate_up(tensor, axis)
        wanted = (weight[:, 0::2], weight[:, 1::2])
        if axis in (2, -1):
            wanted = tuple(part.transpose(1, 2) for part in wanted)
        assert torch.equal(gate, wanted[0]) and torch.equal(up, wanted[1])
    gate, up = split_gate_up(bias, -1)
    assert torch.equal(gate, bias[:, 0::2]) and torch.equal(up, bias[:, 1::2])
    gate, up = split_gate_up(torch.tensor([1.0, 10.0, 2.0, 20.0]), 0)
    assert gate.tolist() == [1, 2] and up.tolist() == [10, 20]
    with pytest.raises(CheckpointError, match="odd"):
        split_gate_up(bias[:, :3], 1)


def test_a_mapped_tensor_may_be_written_without_touching_the_file(tmp_path):
    folder = write_single(tmp_path / "c", tensors_of("hf"))
    checkpoint = open_checkpoint(folder)
    checkpoint.tensor("model.norm.weight").zero_()
    assert same_bits(open_checkpoint(folder).tensor("model.norm.weight"), tensors_of("hf")["model.norm.weight"])


def test_tensors_at_odd_offsets(tmp_path):
    """Nothing in the format says that a bf16 tensor starts at an even byte."""
    folder = write_single(tmp_path / "c", tensors_of("hf"))
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    header += b" " * (1 + len(header) % 2)
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    assert len(header) % 2 == 1
    for name, tensor in tensors_of("hf").items():
        assert same_bits(open_checkpoint(folder).tensor(name), tensor)
        assert same_bits(open_checkpoint(folder).rows(name, 0, 1), tensor[:1])


# -- not whole ---------------------------------------------------------------------------------------------------------
def refused(folder, *words):
    """The one-line error, which names each of `words`."""
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


@pytest.fixture
def sharded(tmp_path):
    return write_sharded(tmp_path / "c", tensors_of("hf"))


def shard(folder, number):
    return folder / f"model-{number:05d}-of-00002.safetensors"


def change(file, edit):
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)


def reindex(folder, edit):
    content = json.loads((folder / INDEX).read_text())
    edit(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


def test_missing_shard(sharded):
    shard(sharded, 1).unlink()
    refused(sharded, "model-00001-of-00002.safetensors", "missing")


def test_missing_shard_of_the_numbered_layout(tmp_path):
    folder = write_sharded(tmp_path / "c", tensors_of("original"), layout="original")
    for number in (3, 1):
        (folder / f"model--{number:05d}-of-00003.safetensors").unlink()
        refused(folder, f"model--{number:05d}-of-00003.safetensors", "missing")


@pytest.mark.parametrize("change_by", [-1, 1])
def test_shard_of_the_wrong_length(sharded, change_by):
    file = shard(sharded, 2)
    raw = file.read_bytes()
    file.write_bytes(raw[:-1] if change_by < 0 else raw + b"\0")
    refused(sharded, file.name, "truncated" if change_by < 0 else "too long", str(len(raw)))


@pytest.mark.parametrize("keep", [0, 5, 8, 200])
def test_shard_cut_in_its_header(sharded, keep):
    file = shard(sharded, 0)
    file.write_bytes(file.read_bytes()[:keep])
    refused(sharded, file.name, "no whole safetensors file")


def test_extra_shard(sharded):
    shutil.copy(shard(sharded, 0), sharded / "model-00003-of-00002.safetensors")
    refused(sharded, "model-00003-of-00002.safetensors", "does not belong")


def test_doubled_shard(sharded):
    """A copy under another name, which the index names as well."""
    change(shard(sharded, 0), lambda t: t.update(load_file(shard(sharded, 1))))
    refused(sharded, "two files", shard(sharded, 0).name, shard(sharded, 1).name)


def test_extra_file_beside_a_single_one(tmp_path):
    folder = write_single(tmp_path / "c", tensors_of("hf"))
    shutil.copy(folder / "model.safetensors", folder / "model copy.safetensors")
    refused(folder, "model copy.safetensors")


@pytest.mark.parametrize("named", [True, False])
def test_a_directory_named_like_a_shard(sharded, named):
    if named:
        shard(sharded, 1).unlink()
        shard(sharded, 1).mkdir()
        refused(sharded, shard(sharded, 1).name, "directory")
    else:
        (sharded / "x.safetensors").mkdir()
        refused(sharded, "x.safetensors", "directory")


def test_index_names_a_tensor_that_the_shard_lacks(sharded):
    name = next(iter(load_file(shard(sharded, 1))))
    change(shard(sharded, 1), lambda t: t.pop(name))
    refused(sharded, shard(sharded, 1).name, name)


def test_index_points_to_the_other_shard(sharded):
    name = next(iter(load_file(shard(sharded, 1))))
    reindex(sharded, lambda m: m.update({name: shard(sharded, 2).name}))
    refused(sharded, name, shard(sharded, 1).name, shard(sharded, 2).name)


def test_shard_holds_a_tensor_that_the_index_does_not_name(sharded):
    name = next(iter(load_file(shard(sharded, 1))))
    reindex(sharded, lambda m: m.pop(name))
    refused(sharded, name, shard(sharded, 1).name)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": {}}'])
def test_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    refused(sharded, INDEX)


def test_index_that_points_outside(sharded):
    reindex(sharded, lambda m: m.update({"model.norm.weight": "../model.safetensors"}))
    refused(sharded, "model.norm.weight", "../model.safetensors")


def test_shards_without_their_index(sharded):
    (sharded / INDEX).unlink()
    refused(sharded, INDEX)


def test_missing_tensor(tmp_path):
    tensors = tensors_of("hf")
    del tensors["model.layers.3.self_attn.sinks"]
    refused(write_single(tmp_path / "c", tensors), "model.layers.3.self_attn.sinks", "79")


def test_unknown_tensor(tmp_path):
    tensors = tensors_of("hf") | {"model.layers.0.self_attn.rotary": torch.zeros(2)}
    refused(write_single(tmp_path / "c", tensors), "unknown tensor model.layers.0.self_attn.rotary")


def test_a_layer_too_many(tmp_path):
    tensors = tensors_of("hf") | {"model.layers.4.self_attn.sinks": torch.zeros(24, dtype=torch.bfloat16)}
    refused(write_single(tmp_path / "c", tensors), "unknown tensor model.layers.4.self_attn.sinks")


@pytest.mark.parametrize("layout", ["hf", "original"])
def test_wrong_shape(tmp_path, layout):
    name = {"hf": "model.layers.0.self_attn.o_proj.weight", "original": "block.0.attn.out.weight"}[layout]
    tensors = tensors_of(layout)
    tensors[name] = tensors[name].T.contiguous()
    refused(write_single(tmp_path / "c", tensors, layout), name, "[1536, 128]", "[128, 1536]")


def test_wrong_dtype(tmp_path):
    tensors = tensors_of("hf")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    refused(write_single(tmp_path / "c", tensors), "model.norm.weight", "F32", "BF16")


def test_not_a_checkpoint(tmp_path):
    refused(tmp_path / "nowhere", "does not exist")
    refused(tmp_path, "config.json")
    shutil.copy(TINY / "hf" / "config.json", tmp_path)
    refused(tmp_path, "no .safetensors file")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, "no experts")
    (tmp_path / "config.json").write_text("{")
    refused(tmp_path, "not JSON")


def edit_header(file, edit):
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    text = edit(entries) or json.dumps(entries)
    file.write_bytes(len(text).to_bytes(8, "little") + text.encode() + raw[8 + length :])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda h: h["lm_head.weight"].update(dtype="F4"), "lm_head.weight has the unknown dtype 'F4'"),
        (lambda h: h["lm_head.weight"].update(shape=None), "lm_head.weight lacks"),
        (lambda h: h["lm_head.weight"].update(shape=[320, 127]), "lm_head.weight has 81920 bytes"),
        (lambda h: h["lm_head.weight"].update(data_offsets=h["model.embed_tokens.weight"]["data_offsets"]), "expected"),
        (lambda h: '{"a": {}, "a": {}}', "names a twice"),
        (lambda h: "[1]", "not a JSON object"),
        (lambda h: "{1}", "not JSON"),
    ],
)
def test_header_that_contradicts_itself(tmp_path, edit, words):
    file = write_single(tmp_path / "c", tensors_of("hf")) / "model.safetensors"
    edit_header(file, edit)
    with pytest.raises(CheckpointError, match=words) as error:
        read_header(file)
    assert "model.safetensors" in str(error.value) and "\n" not in str(error.value)


def test_scale_byte_255_is_found_where_it_is(tmp_path):
    tensors = tensors_of("hf")
    tensors[f"{GATE_UP}_scales"][5, 7, 2] = 255
    checkpoint = open_checkpoint(write_single(tmp_path / "c", tensors))
    checkpoint.experts(0, "gate_up_proj")
    checkpoint.experts(1, "gate_up_proj", slice(0, 5))
    with pytest.raises(CheckpointError, match=rf"{GATE_UP}: scale byte 255 .* \[5, 7, 2\]"):
        checkpoint.experts(1, "gate_up_proj")


def test_file_that_shrinks_after_it_was_opened(tmp_path):
    folder = write_single(tmp_path / "c", tensors_of("hf"))
    checkpoint = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100_000])
    with pytest.raises(CheckpointError, match="ended .* bytes early"):
        for name in tensors_of("hf"):
            checkpoint.rows(name, 0, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.tensor("model.layers.9.self_attn.sinks"), "model.layers.9.self_attn.sinks"),
        (lambda c: c.rows("model.norm.weight", 0, 129), r"rows 0..129 of model.norm.weight do not lie within 0..128"),
        (lambda c: c.rows("model.norm.weight", 5, 4), r"5..4"),
        (lambda c: c.experts(4, "down_proj"), r"no layer 4; .* has layers 0..3"),
        (lambda c: c.experts(0, "up_proj"), "'up_proj'"),
        (lambda c: c.experts(0, "down_proj", slice(0, 9)), "of 8"),
        (lambda c: c.experts(0, "down_proj", slice(0, 8, 2)), "step 1"),
    ],
)
@pytest.mark.parametrize("layout", ["hf", "original"])
def test_what_is_not_there_is_named(layout, call, words):
    with pytest.raises(CheckpointError, match=words) as error:
        call(open_checkpoint(TINY / layout))
    assert "\n" not in str(error.value)
