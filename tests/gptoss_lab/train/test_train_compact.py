"""The compact file and its expansion: every tensor arrives, in both layouts, and bad files are refused."""
import pytest
import torch
from safetensors.torch import load_file, save_file
from trained import TINY, random_model, vocabulary

from gptoss_lab.checkpoint import CheckpointError, manifest, open_checkpoint
from gptoss_lab.checkpoint.compact import expand, read_compact, write_compact
from gptoss_lab.config import preset
from gptoss_lab.train.export import released_tensors
from gptoss_lab.train.model import TrainedModel


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    model = random_model()
    tensors = released_tensors(model)
    file = tmp_path_factory.mktemp("compact") / "small.safetensors"
    return write_compact(file, TINY, torch.from_numpy(vocabulary().token_ids), tensors), tensors, model


@pytest.mark.parametrize("layout", ["hf", "original"])
def test_every_tensor_arrives(small, tmp_path, layout):
    file, tensors, _ = small
    opened = open_checkpoint(expand(file, tmp_path / layout, layout))
    assert opened.layout == layout and opened.config.num_layers == TINY.num_layers
    kept, ids = vocabulary(), torch.arange(TINY.vocab_size)
    for spec in manifest(TINY, "hf"):
        found, right = opened.tensor(spec.name), tensors[spec.name]
        if spec.name in ("lm_head.weight", "model.embed_tokens.weight"):
            right = right[torch.from_numpy(kept.compact(ids)).long()]
        assert torch.equal(found, right), spec.name


def test_experts_are_the_models_values(small, tmp_path):
    file, _, model = small
    opened = open_checkpoint(expand(file, tmp_path / "hf"))
    for n in range(TINY.num_layers):
        for name, projection in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
            assert torch.equal(opened.experts(n, projection).dequantise(torch.float32),
                               model.get_parameter(f"layers.{n}.{name}").detach())


def test_there_and_back(small):
    file, tensors, _ = small
    config, ids, read = read_compact(file)
    assert config == TINY and ids.tolist() == vocabulary().token_ids.tolist()
    assert read.keys() == tensors.keys() and all(torch.equal(read[n], tensors[n]) for n in read)
    assert not list(file.parent.glob("*.part"))


def test_the_shipped_size_fits(tmp_path):
    """The real shapes with 1,800 kept tokens: under 16 MB, and the draft model under 8 MB."""
    from gptoss_lab.train.settings import DRAFT

    ids = torch.arange(1_800, dtype=torch.int32)
    for config, limit in ((preset("nano"), 16_000_000), (DRAFT, 8_000_000)):
        model = TrainedModel(config, 1_801, config.vocab_size - 1_800)
        file = write_compact(tmp_path / config.name, config, ids, released_tensors(model), limit)
        assert file.stat().st_size < limit
        with pytest.raises(CheckpointError, match="at most 1,000 may be shipped"):
            write_compact(tmp_path / "no", config, ids, released_tensors(model), 1_000)
    assert not (tmp_path / "no").exists()


def altered(file, tmp_path, change, metadata=True):
    from safetensors import safe_open

    with safe_open(file, "pt") as source:
        words = source.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, tmp_path / "bad.safetensors", metadata=words if metadata else None)
    return tmp_path / "bad.safetensors"


@pytest.mark.parametrize(("change", "message"), [
    (lambda t: t.pop("model.norm.weight"), "model.norm.weight is None"),
    (lambda t: t.update({"extra": torch.zeros(1)}), "extra is"),
    (lambda t: t.update({"lm_head.weight": t["lm_head.weight"][1:]}), "lm_head.weight is"),
    (lambda t: t.update({"model.norm.weight": t["model.norm.weight"].float()}), "model.norm.weight is"),
    (lambda t: t.update({"token_ids": t["token_ids"].flip(0)}), "ascending int32 ids within 0..699"),
    (lambda t: t.update({"token_ids": t["token_ids"] + 600}), "ascending int32 ids within 0..699"),
    (lambda t: t.pop("token_ids"), "lacks token_ids"),
])
def test_a_wrong_file_is_refused_and_nothing_is_written(small, tmp_path, change, message):
    bad = altered(small[0], tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        expand(bad, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.safetensors"]


def test_what_is_no_compact_file_is_refused(small, tmp_path):
    with pytest.raises(CheckpointError, match="has no metadata of the form"):
        read_compact(altered(small[0], tmp_path, lambda t: None, metadata=False))
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(small[0].read_bytes()[:-10])
    for file in (cut, tmp_path / "absent.safetensors"):
        with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
            read_compact(file)
    with pytest.raises(CheckpointError, match="layouts hf and original, not 'fp8'"):
        expand(small[0], tmp_path / "x", "fp8")
    with pytest.raises(CheckpointError, match="exists"):
        expand(small[0], tmp_path)
