"""Random checkpoints: both layouts alike, reproducible, of the released form, atomic."""
import importlib
import json
import shutil
import statistics
from dataclasses import replace

import pytest
import torch
from checkpoint_helpers import SMALL, same_bits

from gptoss_kernels.reference import quant
from gptoss_lab.checkpoint import nano, random
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.fp8 import from_mxfp4
from gptoss_lab.checkpoint.manifest import manifest
from gptoss_lab.checkpoint.reader import open_checkpoint
from gptoss_lab.checkpoint.synth import synth
from gptoss_lab.config import ModelConfig, preset


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("synth")
    return {layout: open_checkpoint(synth(SMALL, folder / layout, layout, seed=7)) for layout in ("hf", "original")}


def test_splitmix_vectors():
    """The published first outputs of splitmix64 for the seed 1234567."""
    wanted = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [x % 2**64 for x in random.words(1234567, 0, 5).tolist()] == wanted


def test_any_part_of_a_stream_is_that_part():
    key = random.stream_key(3, "x")
    whole = random.random_bytes(key, 0, 300_000)
    for start, stop in ((0, 1), (3, 70_003), (262_144, 300_000), (8, 8)):
        assert torch.equal(random.random_bytes(key, start, stop - start), whole[start:stop])
    values = random.normal(key, 0, 70_000, 0.0, 1.0)
    assert same_bits(random.normal(key, 40_001, 29_000, 0.0, 1.0), values[40_001:69_001])


def test_normal_values_are_normal():
    values = random.normal(random.stream_key(0, "n"), 0, 1_000_000, 2.0, 0.5).double()
    assert values.mean().item() == pytest.approx(2.0, abs=0.003)
    assert values.std().item() == pytest.approx(0.5, abs=0.002)
    standard = random.normal(random.stream_key(1, "n"), 0, 1_000_000, 0.0, 1.0).double()
    for edge in (0.5, 1.0, 2.0):                                        # what rounds to at most `edge` in bf16
        share = statistics.NormalDist().cdf(edge * (1 + 2.0**-8)) * 2 - 1
        assert (standard.abs() <= edge).double().mean().item() == pytest.approx(share, abs=0.002)


def test_both_layouts_hold_the_same_weights(small):
    assert small["hf"].config == SMALL and replace(small["original"].config, name="small") == SMALL
    for spec in manifest(SMALL, "hf"):
        assert same_bits(small["hf"].tensor(spec.name), small["original"].tensor(spec.name))


def test_the_seed_decides(small, tmp_path):
    again, other = (open_checkpoint(synth(SMALL, tmp_path / str(seed), seed=seed)) for seed in (7, 8))
    for spec in manifest(SMALL, "hf"):
        assert same_bits(small["hf"].tensor(spec.name), again.tensor(spec.name))
        assert not same_bits(small["hf"].tensor(spec.name), other.tensor(spec.name))


def test_few_layers_are_the_first_layers(small, tmp_path):
    one = open_checkpoint(synth(SMALL, tmp_path / "one", layers=1, seed=7))
    assert one.config == SMALL.with_layers(1)
    for spec in manifest(SMALL.with_layers(1), "hf"):
        assert same_bits(small["hf"].tensor(spec.name), one.tensor(spec.name))


@pytest.mark.parametrize("layout", ["hf", "original"])
def test_shards_change_nothing(small, tmp_path, layout):
    split = open_checkpoint(synth(SMALL, tmp_path / "split", layout, seed=7, shard_bytes=100_000))
    names = [file.name for file in split.files]
    count = len(names)
    assert count > 3
    wanted = ([f"model-{i:05d}-of-{count - 1:05d}.safetensors" for i in range(count)] if layout == "hf"
              else [f"model--{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)])
    assert names == wanted
    for spec in manifest(SMALL, "hf"):
        assert same_bits(small["hf"].tensor(spec.name), split.tensor(spec.name))


def test_config_files(small):
    raw = json.loads((small["original"].path / "config.json").read_text())
    assert ModelConfig.from_dict(raw).num_experts == SMALL.num_experts and len(raw) == 16
    dtypes = json.loads((small["original"].path / "dtypes.json").read_text())
    assert dtypes["block.0.mlp.mlp1_weight.blocks"] == "FP4" and dtypes["block.0.mlp.mlp1_weight.scales"] == "UE8"
    assert set(dtypes) == {spec.name for spec in manifest(SMALL, "original")}


def test_experts_look_like_quantised_normal_weights(small):
    for projection, gain in (("gate_up_proj", 1.0), ("down_proj", 0.5)):
        experts = small["hf"].experts(1, projection)
        values = quant.mxfp4_decode(experts.blocks, experts.scales)
        size = SMALL.hidden_size if projection == "gate_up_proj" else SMALL.intermediate_size
        assert 0.6 < values.std().item() * size**0.5 / gain < 1.6
        codes = torch.stack([experts.blocks & 15, experts.blocks >> 4], dim=-1).flatten(-2)
        assert (codes & 7).amax(-1).min() >= 6, "every group has a code of 4 or 6, as the quantiser leaves it"
        assert codes.unique().tolist() == list(range(16))
        assert int(experts.scales.max()) - int(experts.scales.min()) == 3
        assert from_mxfp4(experts.blocks, experts.scales)[2].exact


def test_dense_weights_keep_activations_sane(small):
    sinks = torch.cat([small["hf"].tensor(f"model.layers.{n}.self_attn.sinks") for n in range(2)]).float()
    assert sinks.min() > -1 and sinks.max() < 3
    assert small["hf"].tensor("model.norm.weight").float().mean().item() == pytest.approx(1.0, abs=0.05)
    assert small["hf"].tensor("model.embed_tokens.weight").float().std().item() == pytest.approx(1.0, abs=0.05)


def test_experts_are_used_about_evenly(tmp_path):
    config = preset("nano").with_layers(1)
    checkpoint = open_checkpoint(synth(replace(config, vocab_size=64), tmp_path / "c"))
    weight, bias = (checkpoint.tensor(f"model.layers.0.mlp.router.{part}").float() for part in ("weight", "bias"))
    x = torch.randn(4000, config.hidden_size, generator=torch.Generator().manual_seed(0))
    counts = (x @ weight.T + bias).topk(4, dim=-1).indices.flatten().bincount(minlength=16).double()
    assert counts.min() > 0.6 * counts.mean() and counts.max() < 1.5 * counts.mean()


@pytest.mark.parametrize("spread", [0, 2, 9, 15, 20])
def test_spread_is_the_widest_block(tmp_path, spread):
    checkpoint = open_checkpoint(synth(SMALL, tmp_path / "c", layers=1, spread=spread))
    experts = checkpoint.experts(0, "down_proj")
    for e in range(SMALL.num_experts):
        report = from_mxfp4(experts.blocks[e], experts.scales[e])[2]
        assert max(s for s, count in enumerate(report.spreads) if count) == spread
        assert [(b.row, b.column) for b in report.wide] == ([(0, 0)] if spread > 14 else [])
        assert report.exact == (spread <= 14)


def test_existing_target_is_left_alone(tmp_path):
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        synth(SMALL, tmp_path / "c")
    assert list((tmp_path / "c").iterdir()) == [] and list(tmp_path.iterdir()) == [tmp_path / "c"]


def test_no_space_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match="no space .* bytes are needed, .* are free"):
        synth(preset("gpt-oss-120b").with_layers(1000), tmp_path / "c")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path):
    def stop(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synth(SMALL, tmp_path / "c", progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_progress_reaches_the_whole(tmp_path):
    seen = []
    checkpoint = open_checkpoint(synth(SMALL, tmp_path / "c", progress=lambda *args: seen.append(args)))
    assert seen[-1][:2] == (checkpoint.nbytes, checkpoint.nbytes)
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)


@pytest.mark.parametrize(
    ("options", "words"), [({"layout": "fp8"}, "'fp8'"), ({"spread": -1}, "spread is -1"), ({"spread": 101}, "0..100")]
)
def test_bad_options(tmp_path, options, words):
    with pytest.raises(CheckpointError, match=words):
        synth(SMALL, tmp_path / "c", **options)


# -- nano --------------------------------------------------------------------------------------------------------------
@pytest.fixture
def tiny_nano(monkeypatch, tmp_path):
    """`ensure_nano` with a cache of its own, no trained checkpoint and a config that is quick to write."""
    monkeypatch.setenv("GPTOSS_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nano, "trained_nano", lambda: None)
    monkeypatch.setattr(nano, "preset", lambda name: SMALL)


def test_nano_is_made_once(tiny_nano, tmp_path, monkeypatch):
    path = nano.ensure_nano()
    assert path.parent == tmp_path / "cache" and open_checkpoint(path).config == SMALL
    monkeypatch.setattr(nano, "synth", lambda *args, **kwargs: pytest.fail("made twice"))
    assert nano.ensure_nano() == path


def test_nano_lost_race(tiny_nano, monkeypatch):
    """A process that no lock holds gives its folder the name first: that one is used, ours leaves nothing behind."""
    synth_module = importlib.import_module("gptoss_lab.checkpoint.synth")
    publish = synth_module.publish

    def late(partial, target):
        shutil.copytree(partial, target)
        publish(partial, target)

    monkeypatch.setattr(synth_module, "publish", late)
    path = nano.ensure_nano()
    assert open_checkpoint(path).config == SMALL
    assert sorted(path.parent.iterdir()) == [path, path.with_name(f"{path.name}.lock")]


def test_nano_prefers_the_trained_one(tiny_nano, monkeypatch, tmp_path):
    """It is expanded once, and again when its file has changed."""
    file, made = tmp_path / "nano.safetensors", []
    monkeypatch.setattr(nano, "trained_nano", lambda: file)
    monkeypatch.setattr(nano, "expand", lambda source, target: made.append(source) or synth(SMALL, target))
    file.write_bytes(b"one")
    first = nano.ensure_nano()
    assert nano.ensure_nano() == first and made == [file] and open_checkpoint(first).config == SMALL
    file.write_bytes(b"two")
    assert nano.ensure_nano() != first and len(made) == 2


def test_what_drafts_for_nano_lies_beside_it(tiny_nano, monkeypatch, tmp_path):
    assert nano.ensure_nano_draft() is None and nano.trained_beside("mtp.safetensors") is None
    monkeypatch.setattr(nano, "trained_nano", lambda: tmp_path / "nano.safetensors")
    monkeypatch.setattr(nano, "expand", lambda source, target: synth(SMALL, target))
    assert nano.ensure_nano_draft() is None
    (tmp_path / "draft.safetensors").write_bytes(b"draft")
    folder = nano.ensure_nano_draft()
    assert open_checkpoint(folder).config == SMALL and nano.ensure_nano_draft() == folder
