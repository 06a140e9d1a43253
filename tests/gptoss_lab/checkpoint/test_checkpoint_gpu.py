"""A GPU gives the same bytes as the CPU, in every codec and in whole files."""
import pytest
import torch
from checkpoint_helpers import SMALL, same_bits
from safetensors.torch import load_file

from gptoss_lab.checkpoint import fp8, mxfp4, random
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.checkpoint.reader import open_checkpoint
from gptoss_lab.checkpoint.synth import synth

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


def random_mxfp4(spread):
    g = torch.Generator().manual_seed(spread)
    blocks = torch.randint(0, 256, (2, 700, 90, 16), dtype=torch.uint8, generator=g)
    return blocks, torch.randint(100, 101 + spread, (2, 700, 90), dtype=torch.uint8, generator=g)


@pytest.mark.parametrize("spread", [3, 14, 22])
def test_codecs(spread):
    blocks, scales = random_mxfp4(spread)
    on_gpu = blocks.cuda(), scales.cuda()
    for dtype in (torch.float32, torch.bfloat16):
        assert same_bits(mxfp4.decode(*on_gpu, dtype).cpu(), mxfp4.decode(blocks, scales, dtype))
    values = mxfp4.decode(blocks, scales)
    assert all(same_bits(a.cpu(), b) for a, b in zip(mxfp4.encode(values.cuda()), mxfp4.encode(values), strict=True))
    *ours, report = fp8.from_mxfp4(*on_gpu)
    *theirs, expected = fp8.from_mxfp4(blocks, scales)
    assert all(same_bits(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)) and report == expected
    assert same_bits(fp8.dequantise(*ours).cpu(), fp8.dequantise(*theirs))
    assert torch.equal(fp8.exact_blocks(*on_gpu, *ours).cpu(), fp8.exact_blocks(blocks, scales, *theirs))


def test_random_numbers():
    key = random.stream_key(1, "w")
    assert torch.equal(random.random_bytes(key, 5, 100_001, "cuda").cpu(), random.random_bytes(key, 5, 100_001))
    assert same_bits(random.normal(key, 3, 100_000, 0.0, 1.0, "cuda").cpu(), random.normal(key, 3, 100_000, 0.0, 1.0))


@pytest.mark.parametrize("options", [{"to": "fp8"}, {"to": "bf16", "experts_order": "in_out"}])
def test_whole_files(tmp_path, options):
    folders = {}
    for device in ("cpu", "cuda"):
        source = synth(SMALL, tmp_path / f"source-{device}", device=device)
        folders[device] = convert(source, tmp_path / f"target-{device}", device=device, **options).path
    for file in folders["cpu"].glob("*.safetensors"):
        ours, theirs = load_file(folders["cuda"] / file.name), load_file(file)
        assert set(ours) == set(theirs) and all(same_bits(ours[name], theirs[name]) for name in ours)
    checkpoint = open_checkpoint(folders["cuda"])
    for projection in ("gate_up_proj", "down_proj"):
        on_gpu = checkpoint.experts(1, projection, slice(1, 3), device="cuda").dequantise()
        assert on_gpu.is_cuda and same_bits(on_gpu.cpu(), checkpoint.experts(1, projection, slice(1, 3)).dequantise())
