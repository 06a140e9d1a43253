"""Sharded reading: each rank gets exactly its slices; all slices together are the checkpoint, by the manifest."""
import math
from collections import Counter

import pytest
import torch
from parallel_cases import TINY, small_nano, source

from gptoss_lab.checkpoint import open_checkpoint, synth
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.checkpoint.manifest import manifest
from gptoss_lab.checkpoint.names import hf_parts
from gptoss_lab.checkpoint.stored import Fp8
from gptoss_lab.config import preset
from gptoss_lab.parallel import Plan, share_of, shares, valid_plans
from gptoss_lab.parallel.rules import region, region_bytes
from gptoss_lab.parallel.traffic import read_bytes

FORMS = {
    "hf": {}, "fp8": {"to": "fp8"}, "fp8 attention": {"to": "fp8", "attention_fp8": True}, "bf16": {"to": "bf16"},
    "bf16 in_out": {"to": "bf16", "experts_order": "in_out"},
}


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Every form of a checkpoint whose experts have two blocks and a half, one of them narrow."""
    root = tmp_path_factory.mktemp("forms")
    config = small_nano(num_layers=2, vocab_size=101, num_experts=4, experts_per_token=2, intermediate_size=320)
    synth(config, root / "original", layout="original")
    synth(config, root / "hf")
    made = {"original": root / "original", "hf": root / "hf"}
    for name, options in FORMS.items():
        if options:
            made[name] = root / name
            convert(root / "hf", made[name], **options)
    return made


def hf_names(checkpoint):
    """Hugging Face names of everything that the manifest lists."""
    if checkpoint.layout != "original":
        return [spec.name for spec in checkpoint.specs]
    return [name for spec in checkpoint.specs for name in hf_parts(spec.name, checkpoint.config)]


PLANS = [Plan(1, 1, 2), Plan(2, 1, 2), Plan(1, 1, 4), Plan(2, 2, 2), Plan(1, 1, 8), Plan(2, 1, 4, True)]


@pytest.mark.parametrize("form", ["original", *FORMS])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_union_of_the_shards_is_the_checkpoint(forms, form, plan):
    """Put every rank's bytes back where they came from: each tensor of the manifest is whole and equal, bit for bit."""
    checkpoint = open_checkpoint(forms[form])
    config, held = checkpoint.config, shares(checkpoint.config, plan)
    sources = [source(forms[form], share) for share in held]
    for name in hf_names(checkpoint):
        whole = checkpoint.tensor(name)
        raw = whole.view(torch.uint8 if whole.element_size() == 1 else
                         {2: torch.int16, 4: torch.int32}[whole.element_size()])
        back, seen = torch.zeros_like(raw), torch.zeros(whole.shape, dtype=torch.int32)
        for share, shard in zip(held, sources, strict=True):
            spans = region(name, tuple(whole.shape), config, share)
            at = tuple(slice(s.start, s.stop) for s in spans)
            part = shard.tensor(name)
            if seen[at].numel():
                back[at] = part.view(raw.dtype)
                seen[at] += 1
        assert bool((seen > 0).all()), f"{name}: rows that no rank holds"
        assert torch.equal(back, raw), name


@pytest.mark.parametrize("form", ["original", *FORMS])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_each_rank_reads_its_bytes_and_no_others(forms, form, plan):
    """What was handed out for a whole model is, tensor by tensor, the region that the plan says."""
    checkpoint = open_checkpoint(forms[form])
    config = checkpoint.config
    for share in shares(config, plan):
        shard = source(forms[form], share)
        for n in range(config.num_layers):
            for projection in ("gate_up_proj", "down_proj"):
                shard.experts(n, projection)
            for x in "qkvo":
                shard.linear(f"model.layers.{n}.self_attn.{x}_proj")
        rest = [name for name in hf_names(checkpoint) if name not in shard.read_bytes]
        for name in rest:
            shard.tensor(name)
        expected = {}
        for name in hf_names(checkpoint):
            stored = checkpoint.stored(name)
            cells = math.prod(map(len, region(name, stored.shape, config, share)))
            expected[name] = cells * (stored.stop - stored.start) // math.prod(stored.shape)
        assert shard.read_bytes == expected
        if form != "original" and form != "bf16 in_out" and form != "fp8 attention":
            assert sum(shard.read_bytes.values()) == read_bytes(config, share, checkpoint.layout)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_regions_of_the_real_models_tile(world):
    """Every cell of every tensor of the 120B's manifests is held, as often as its group has copies. Counted, not read.
    """
    config = preset("gpt-oss-120b").with_layers(1)
    for layout in ("hf", "fp8", "bf16"):
        for plan in valid_plans(config, world):
            held = shares(config, plan)
            for spec in manifest(config, layout):
                found = Counter()
                for share in held:
                    found[region(spec.name, spec.shape, config, share)] += 1
                distinct = sum(math.prod(map(len, spans)) for spans in found)
                assert distinct == spec.numel, (str(plan), layout, spec.name)


def test_biases_of_others_are_zero_and_not_read(small):
    name = "model.layers.0.self_attn.o_proj.bias"
    first, second = (source(small, share_of(small_nano(), Plan(1, 1, 2), r)) for r in range(2))
    assert bool(first.tensor(name).any()) and first.read_bytes[name] == 2 * 224
    assert not bool(second.tensor(name).any()) and second.read_bytes[name] == 0
    down = "model.layers.0.mlp.experts.down_proj_bias"
    assert first.tensor(down).shape == second.tensor(down).shape == (16, 224)
    assert not bool(second.tensor(down).any()) and second.read_bytes[down] == 0


def test_slices_of_fp8_need_whole_blocks_of_scales():
    """P11: eighths of 2880 would need 3 or 4 scale blocks each and share them; ours need 3 each and share none."""
    scales = torch.arange(1.0, 24.0)[:, None].expand(23, 1).contiguous()
    whole = Fp8(torch.ones(2880, 64).to(torch.float8_e4m3fn), scales)
    full = whole.dequantise(torch.float32)
    blocks = []
    for rank in range(8):
        part = whole.slice_rows(360 * rank, 360 * (rank + 1))
        assert torch.equal(part.dequantise(torch.float32), full[360 * rank : 360 * (rank + 1)])
        first = int(part.scale_inv[0, 0]) - 1
        blocks.append((first, first + part.scale_inv.shape[0]))
    assert blocks == [(0, 3), (2, 6), (5, 9), (8, 12), (11, 15), (14, 17), (16, 20), (19, 23)]
    config = preset("gpt-oss-120b")
    spec = next(s for s in manifest(config, "fp8") if s.name.endswith("0.mlp.experts.down_proj.weight_scale_inv"))
    ours = [region(spec.name, spec.shape, config, share)[2] for share in shares(config, Plan(1, 1, 8))]
    assert [(r.start, r.stop) for r in ours] == [(3 * n, 3 * n + 3) for n in range(7)] + [(21, 23)]


def test_tiny_fixture_shards(forms):
    """24 heads on 4, 8 experts of 96: with EP1 TP2 the second slice is empty and that rank holds no experts."""
    config = open_checkpoint(TINY / "hf").config
    held = shares(config, Plan(1, 1, 2))
    assert [len(s.experts) for s in held] == [8, 0]
    total = sum(region_bytes(spec, config, share) for share in held for spec in manifest(config, "hf")
                if spec.role.startswith("expert"))
    assert total == sum(spec.nbytes for spec in manifest(config, "hf") if spec.role.startswith("expert"))
