"""Conversions end to end: every form into every other, against decoding written here; accounting, refusals, options."""
import errno
import hashlib
import importlib
import itertools
import json
from dataclasses import replace

import pytest
import torch
from checkpoint_helpers import SMALL, TINY, same_bits, tensors_of, write_single
from safetensors.torch import load_file

from gptoss_kernels.reference import quant
from gptoss_lab.checkpoint import tasks, writer
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.manifest import manifest, total_bytes
from gptoss_lab.checkpoint.reader import open_checkpoint
from gptoss_lab.checkpoint.synth import synth
from gptoss_lab.config import ModelConfig

convert_module = importlib.import_module("gptoss_lab.checkpoint.convert")
PROJECTIONS = ("gate_up_proj", "down_proj")


def load_folder(folder):
    """Every tensor of a folder, by the safetensors library."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def expert_values(layer, projection):
    """fp64 values of the tiny fixture's experts, [E, out, in], by the plain reference."""
    tensors, prefix = tensors_of("hf"), f"model.layers.{layer}.mlp.experts.{projection}"
    return quant.mxfp4_decode(tensors[f"{prefix}_blocks"], tensors[f"{prefix}_scales"], torch.float64)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The tiny fixture in every form: folder by name."""
    root = tmp_path_factory.mktemp("forms")
    forms = {
        "fp8": {"to": "fp8"}, "fp8 amax": {"to": "fp8", "scales": "amax"},
        "fp8 attention": {"to": "fp8", "attention_fp8": True},
        "bf16": {"to": "bf16"}, "bf16 in_out": {"to": "bf16", "experts_order": "in_out"},
    }
    made = {"hf": TINY / "hf", "original": TINY / "original"}
    for name, options in forms.items():
        made[name] = convert(TINY / "hf", root / name.replace(" ", "-"), **options).path
    return made


def test_fp8_is_bit_equal_after_dequantisation(made):
    tensors = load_folder(made["fp8"])
    for layer in range(4):
        for projection in PROJECTIONS:
            name = f"model.layers.{layer}.mlp.experts.{projection}"
            weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
            assert weight.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
            values = quant.dequantise_blocks(weight, scale, dtype=torch.float64)
            assert same_bits(values, expert_values(layer, projection))


def test_everything_else_is_copied(made):
    for form in ("fp8", "fp8 amax", "bf16", "bf16 in_out"):
        tensors = load_folder(made[form])
        for name, tensor in tensors_of("hf").items():
            if not name.endswith(("_blocks", "_scales")):
                assert same_bits(tensors[name], tensor)


def test_bf16_in_both_orders(made):
    out_in, in_out = load_folder(made["bf16"]), load_folder(made["bf16 in_out"])
    for layer in range(4):
        for projection in PROJECTIONS:
            name, values = f"model.layers.{layer}.mlp.experts.{projection}", expert_values(layer, projection)
            assert same_bits(out_in[f"{name}.weight"], values.to(torch.bfloat16))
            assert same_bits(in_out[name], values.to(torch.bfloat16).transpose(1, 2))
    assert not set(out_in) & {f"model.layers.0.mlp.experts.{p}" for p in PROJECTIONS}


def test_transformers_reads_the_in_out_form(made):
    transformers = pytest.importorskip("transformers")
    model = transformers.GptOssForCausalLM.from_pretrained(made["bf16 in_out"], dtype=torch.bfloat16)
    state = model.state_dict()
    for layer in range(4):
        for projection in PROJECTIONS:
            values = expert_values(layer, projection).to(torch.bfloat16).transpose(1, 2)
            assert torch.equal(state[f"model.layers.{layer}.mlp.experts.{projection}"], values)
    assert torch.equal(state["lm_head.weight"], tensors_of("hf")["lm_head.weight"])


@pytest.mark.parametrize("options", [{"to": "fp8"}, {"to": "bf16", "experts_order": "in_out"}, {"to": "mxfp4"}])
def test_both_layouts_convert_alike(made, tmp_path, options):
    from_original = load_folder(convert(TINY / "original", tmp_path / "o", **options).path)
    if options["to"] == "mxfp4":
        expected = tensors_of("hf")
    else:
        expected = load_folder(made["fp8" if options["to"] == "fp8" else "bf16 in_out"])
    assert set(from_original) == set(expected)
    assert all(same_bits(from_original[name], expected[name]) for name in expected)


@pytest.mark.parametrize("form", ["fp8", "bf16", "bf16 in_out"])
def test_there_and_back(made, tmp_path, form):
    """Values come back from every exact form; bytes too but for the few groups that were not canonical."""
    result = convert(made[form], tmp_path / "back", to="mxfp4")
    back, expected, poor, changed = open_checkpoint(result.path), tensors_of("hf"), 0, 0
    assert back.layout == "hf" and result.totals["weights_exact"] == 8 and result.totals["max_abs_error"] == 0
    for name, tensor in expected.items():
        if name.endswith("_scales"):
            blocks, original = name.replace("_scales", "_blocks"), expected[name.replace("_scales", "_blocks")]
            assert same_bits(
                quant.mxfp4_decode(back.tensor(blocks), back.tensor(name)), quant.mxfp4_decode(original, tensor)
            )
            same = (back.tensor(name) == tensor) & (back.tensor(blocks) == original).all(-1)
            codes = torch.stack([original & 7, original >> 4 & 7], dim=-1).flatten(-2).amax(-1)
            assert same[codes >= 6].all(), "a canonical group must come back byte for byte"
            changed += int((~same).sum())
            poor += int((codes < 6).sum())
        elif not name.endswith("_blocks"):
            assert same_bits(back.tensor(name), tensor)
    assert changed == poor > 0


def test_synthetic_checkpoints_come_back_byte_for_byte(tmp_path):
    source = synth(SMALL, tmp_path / "source", seed=3)
    eight = convert(source, tmp_path / "fp8").path
    back = load_folder(convert(eight, tmp_path / "back", to="mxfp4").path)
    assert all(same_bits(back[name], tensor) for name, tensor in load_folder(source).items())


def test_measured_errors_are_the_errors(made):
    for form in ("fp8 amax", "fp8 attention"):
        tensors, original = load_folder(made[form]), tensors_of("hf")
        rows = {row["destination"]: row for row in json.loads((made[form] / "manifest.json").read_text())["rows"]}
        for name, tensor in tensors.items():
            if tensor.dtype != torch.float8_e4m3fn:
                continue
            after = quant.dequantise_blocks(tensor, tensors[f"{name}_scale_inv"], dtype=torch.float64)
            if ".experts." in name:
                layer, projection = int(name.split(".")[2]), name.split(".")[-2]
                before = expert_values(layer, projection)
            else:
                before = original[name].double()
            statistics = rows[name]["statistics"]
            wanted = float((after - before).abs().max())
            assert statistics["max_abs_error"] == pytest.approx(wanted, rel=1e-6)
            assert rows[name]["exact"] == (wanted == 0)
            assert wanted > 0 or form == "fp8 attention"
            if "relative_rms_error" in statistics:
                relative = float((after - before).square().sum().sqrt() / before.square().sum().sqrt())
                assert statistics["relative_rms_error"] == pytest.approx(relative, rel=1e-6)


def test_manifest_accounts_for_every_tensor_and_byte(made):
    for form, source in (("fp8", "hf"), ("bf16", "hf")):
        content = json.loads((made[form] / "manifest.json").read_text())
        tensors = load_folder(made[form])
        assert {row["destination"] for row in content["rows"]} == set(tensors) and len(content["rows"]) == len(tensors)
        for row in content["rows"]:
            tensor = tensors[row["destination"]]
            assert row["shape"] == list(tensor.shape) and row["bytes"] == tensor.nbytes
            assert row["sha256"] == hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
            assert (made[form] / row["file"]).is_file()
        used = {origin["name"] for row in content["rows"] for origin in row["source"]}
        assert used == set(tensors_of(source))
        assert content["totals"]["bytes_written"] == sum(tensor.nbytes for tensor in tensors.values())
        assert content["totals"]["bytes_read"] == sum(tensor.nbytes for tensor in tensors_of(source).values())
        assert str(made[form].parent) not in json.dumps(content)


def test_manifest_says_which_rows_of_the_fused_tensor(tmp_path):
    rows = {row["destination"]: row for row in convert(TINY / "original", tmp_path / "o").rows}
    assert rows["model.layers.2.self_attn.k_proj.bias"]["source"] == [
        {"name": "block.2.attn.qkv.bias", "rows": [1536, 1792], "shape": [256], "dtype": "BF16", "bytes": 512}
    ]
    weight = rows["model.layers.0.mlp.experts.down_proj.weight"]
    names = [origin["name"] for origin in weight["source"]]
    assert names == ["block.0.mlp.mlp2_weight.blocks", "block.0.mlp.mlp2_weight.scales"]
    assert weight["rule"] == "mxfp4 to fp8 pow2"
    assert weight["statistics"]["exact_blocks"] == weight["statistics"]["blocks"] == 8


def test_totals_of_the_released_shapes():
    """What the converter would plan for 20B is what the shapes add up to."""
    config = ModelConfig.load(TINY / "hf")
    assert total_bytes(manifest(config, "fp8")) == open_checkpoint(TINY / "hf").nbytes - 8 * 4 * (
        192 * 4 * 17 + 128 * 3 * 17) + 8 * 4 * (192 * 128 + 128 * 96 + 4 * (2 + 1))


def test_config_of_the_result(made):
    fp8 = json.loads((made["fp8"] / "config.json").read_text())["quantization_config"]
    assert fp8["quant_method"] == "fp8" and fp8["weight_block_size"] == [128, 128] and fp8["scale_fmt"] == "ue8m0"
    assert "model.layers.*.self_attn" in fp8["modules_to_not_convert"]
    attention = json.loads((made["fp8 attention"] / "config.json").read_text())["quantization_config"]
    assert "model.layers.*.self_attn" not in attention["modules_to_not_convert"]
    assert "quantization_config" not in json.loads((made["bf16"] / "config.json").read_text())
    for form in made:
        config = replace(ModelConfig.load(made[form]), name="")
        assert config == replace(ModelConfig.load(TINY / ("original" if form == "original" else "hf")), name="")


def test_experts_read_back_as_what_they_are(made):
    kinds = {form: open_checkpoint(path) for form, path in made.items()}
    assert {form: c.layout for form, c in kinds.items()} == {
        "hf": "hf", "original": "original", "fp8": "fp8", "fp8 amax": "fp8", "fp8 attention": "fp8", "bf16": "bf16",
        "bf16 in_out": "bf16",
    }
    assert kinds["bf16 in_out"].experts_order == "in_out" and kinds["fp8 attention"].attention_fp8
    for form in ("fp8", "bf16", "bf16 in_out", "original"):
        for projection in PROJECTIONS:
            for device in (None, "cpu"):
                part = kinds[form].experts(3, projection, slice(2, 5), device)
                assert same_bits(part.dequantise(torch.float32).contiguous(), expert_values(3, projection)[2:5].float())
    attention = kinds["fp8 attention"].linear("model.layers.1.self_attn.o_proj")
    assert attention.scale_inv.shape == (1, 12) and attention.weight.dtype == torch.float8_e4m3fn


# -- wide blocks -------------------------------------------------------------------------------------------------------
def test_wide_blocks_are_converted_measured_and_listed(tmp_path):
    source = synth(SMALL, tmp_path / "wide", spread=18, seed=2)
    result = convert(source, tmp_path / "fp8")
    rows = {row["destination"]: row for row in result.rows}
    statistics = rows["model.layers.1.mlp.experts.gate_up_proj.weight"]["statistics"]
    places = [(b["expert"], b["row"], b["column"], b["spread"]) for b in statistics["wide"]]
    assert places == [(e, 0, 0, 18) for e in range(4)]
    assert statistics["wide_blocks"] == 4 and statistics["exact_blocks"] == statistics["blocks"] - 4
    assert not rows["model.layers.1.mlp.experts.gate_up_proj.weight"]["exact"]
    assert result.totals["wide_blocks"] == 16 and result.totals["weights_exact"] == 0
    a, b = open_checkpoint(source), open_checkpoint(result.path)
    for e in range(4):
        before = a.experts(1, "gate_up_proj", slice(e, e + 1)).dequantise(torch.float32)
        after = b.experts(1, "gate_up_proj", slice(e, e + 1)).dequantise(torch.float32)
        assert statistics["wide"][e]["max_abs_error"] == float((before - after).abs().max()) > 0
        assert statistics["wide"][e]["rounded"] == int((before != after).sum())


def test_exact_refuses_what_was_really_rounded(tmp_path):
    wide = synth(SMALL, tmp_path / "wide", spread=15, seed=2)
    words = r"gate_up_proj: 1 of 8 blocks were rounded: expert 0 block \(0, 0\) spread 15"
    with pytest.raises(CheckpointError, match=words) as error:
        convert(wide, tmp_path / "fp8", exact=True)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["wide"]


def test_exact_accepts_a_wide_block_whose_codes_all_land(tmp_path):
    tensors = tensors_of("hf")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[f"{name}_scales"][0] = 127
    tensors[f"{name}_blocks"][0, 0, 0], tensors[f"{name}_scales"][0, 0, 0] = 0x66, 127 - 17
    tensors[f"{name}_blocks"][0, 1, 0] = 0x77
    source = write_single(tmp_path / "source", tensors)
    result = convert(source, tmp_path / "fp8", exact=True)
    row = next(row for row in result.rows if row["destination"] == f"{name}.weight")
    assert row["exact"] and row["statistics"]["wide"][0]["rounded"] == 0 and result.totals["wide_blocks"] == 1


def test_exact_refuses_roundings_of_other_kinds(tmp_path):
    for options in ({"attention_fp8": True}, {"scales": "amax"}):
        with pytest.raises(CheckpointError, match="rounded, by at most"):
            convert(TINY / "hf", tmp_path / "fp8", exact=True, **options)
    assert list(tmp_path.iterdir()) == []


# -- refusals ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("to", ["fp8", "bf16", "mxfp4"])
def test_scale_byte_255(tmp_path, to):
    tensors = tensors_of("original")
    tensors["block.2.mlp.mlp1_weight.scales"][6, 17, 1] = 255
    source = write_single(tmp_path / "source", tensors, "original")
    with pytest.raises(CheckpointError, match="model.layers.2.mlp.experts.gate_up_proj.*scale byte 255"):
        convert(source, tmp_path / "target", to=to)
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("source", "options", "words"),
    [
        ("hf", {"to": "int8"}, "'int8'; one of fp8, bf16, mxfp4"),
        ("hf", {"to": "mxfp4"}, "hf layout already"),
        ("fp8", {"to": "fp8"}, "fp8 layout already"),
        ("bf16", {"to": "bf16"}, "bf16 layout with experts out_in already"),
        ("hf", {"to": "fp8", "scales": "max"}, "'max'"),
        ("hf", {"to": "bf16", "scales": "amax"}, "scales='amax' does not belong"),
        ("hf", {"to": "bf16", "attention_fp8": True}, "attention_fp8 does not belong"),
        ("hf", {"to": "fp8", "experts_order": "in_out"}, "experts_order does not belong"),
        ("hf", {"to": "bf16", "experts_order": "io"}, "'io'"),
    ],
)
def test_options_that_do_not_fit(made, tmp_path, source, options, words):
    with pytest.raises(CheckpointError, match=words) as error:
        convert(made[source], tmp_path / "target", **options)
    assert "\n" not in str(error.value) and list(tmp_path.iterdir()) == []


def test_bf16_changes_its_order(made, tmp_path):
    turned = load_folder(convert(made["bf16"], tmp_path / "io", to="bf16", experts_order="in_out").path)
    expected = load_folder(made["bf16 in_out"])
    assert all(same_bits(turned[name], tensor) for name, tensor in expected.items())


def test_fp8_config_must_state_the_block_size(made, tmp_path):
    target = convert(TINY / "hf", tmp_path / "fp8").path
    raw = json.loads((target / "config.json").read_text())
    for change, words in (
        ({"weight_block_size": [126, 126]}, r"weight_block_size is \[126, 126\]"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
    ):
        changed = {**raw, "quantization_config": {**raw["quantization_config"], **change}}
        (target / "config.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(target)


def test_existing_target(made, tmp_path):
    (tmp_path / "target").write_text("mine")
    with pytest.raises(CheckpointError, match="target exists"):
        convert(TINY / "hf", tmp_path / "target")
    assert (tmp_path / "target").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_no_space_is_seen_before(monkeypatch, tmp_path):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 5_062_527})())
    with pytest.raises(CheckpointError, match="5,062,528 bytes are needed, 5,062,527 are free"):
        convert(TINY / "hf", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "no space left while writing"), (errno.EIO, "cannot be written")]
)
def test_the_disk_fails_midway(monkeypatch, tmp_path, code, words):
    """One line, no target; what was finished serves the next attempt."""
    real, calls = writer._write_all, []

    def failing(stream, at, view):
        calls.append(at)
        if len(calls) > 80:
            raise OSError(code, "the disk said no")
        real(stream, at, view)

    monkeypatch.setattr(writer, "_write_all", failing)
    with pytest.raises(CheckpointError, match=words) as error:
        convert(TINY / "hf", tmp_path / "target")
    assert "\n" not in str(error.value) and "model-0000" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["target.partial"]
    assert not list(tmp_path.rglob("*.part"))
    monkeypatch.setattr(writer, "_write_all", real)
    assert convert(TINY / "hf", tmp_path / "target").reused > 0


def test_a_tensor_left_unread_is_an_error(monkeypatch, tmp_path):
    """The ledger is of what was read, so a rule that skips, repeats or forgets rows is found."""
    honest = tasks.Task.reads
    for wrong, words in (
        (lambda reads: [], "were not read"), (lambda reads: reads * 2, "were read twice"),
        (lambda reads: [(name, start, stop - 1) for name, start, stop in reads], "were not read"),
        (lambda reads: [("ghost", 0, 1), *reads], "ghost was read"),
    ):
        def reads(self, source, piece, wrong=wrong):
            found = honest(self, source, piece)
            return wrong(found) if self.name == "model.layers.1.self_attn.sinks" else found

        monkeypatch.setattr(tasks.Task, "reads", reads)
        with pytest.raises(CheckpointError, match=words):
            convert(TINY / "hf", tmp_path / "target", workers=1)
        assert not (tmp_path / "target").exists()
        for path in sorted(tmp_path.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()


def test_a_plan_that_forgets_a_tensor_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(convert_module, "plan_tasks", lambda *args: tasks.plan_tasks(*args)[:-1])
    with pytest.raises(CheckpointError, match="does not fill the target's manifest: lm_head.weight"):
        convert(TINY / "hf", tmp_path / "target")


def test_the_result_does_not_depend_on_workers(made, tmp_path):
    for workers in (1, 3):
        again = load_folder(convert(TINY / "hf", tmp_path / str(workers), workers=workers).path)
        assert all(same_bits(again[name], tensor) for name, tensor in load_folder(made["fp8"]).items())
    threads = torch.get_num_threads()
    convert(TINY / "hf", tmp_path / "threads", workers=2)
    assert torch.get_num_threads() == threads


def test_progress_reaches_the_whole(tmp_path):
    seen = []
    result = convert(TINY / "hf", tmp_path / "target", progress=lambda *args: seen.append(args))
    total = result.totals["bytes_written"]
    assert seen[-1][:2] == (total, total) and all(a[0] <= b[0] for a, b in itertools.pairwise(seen))
