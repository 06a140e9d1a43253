"""The same model on a GPU: fp32 logits as on the CPU, every form of the experts, prefill in chunks and decode."""
import pytest
import torch
from random_models import config, distance, tokens

from gptoss_lab.checkpoint import synth
from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.model import Recorder, load_model

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: the CPU tests stand alone"),
]
REFERENCE = {"rms_norm": "reference", "rope": "reference", "sink_attention": "reference", "moe": "reference"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpu")
    hf = synth(config(hidden_size=160, intermediate_size=288), root / "hf")
    return {"hf": hf, "fp8": convert(hf, root / "fp8").path, "bf16": convert(hf, root / "bf16", to="bf16").path}


@pytest.mark.parametrize("storage", ["stored", "dense"])
@pytest.mark.parametrize("form", ["hf", "fp8", "bf16"])
def test_gpu_equals_cpu(folders, form, storage):
    ids = tokens(config(), 90)
    model = load_model(folders[form], "cuda", torch.float32, expert_storage=storage, backends=REFERENCE)
    expected = load_model(folders[form], "cpu", torch.float32)(ids, logits="all")
    assert all(p.device.type == "cuda" for p in model.parameters())
    assert distance(model(ids.cuda(), logits="all").cpu(), expected) <= 1e-5


def test_chunks_and_ragged_decode(folders):
    ids = tokens(config(), 60).cuda()
    model = load_model(folders["fp8"], "cuda", torch.float32, expert_storage="stored", backends=REFERENCE)
    whole, recorder = model(ids, logits="all"), Recorder()
    caches = [model.new_cache(4), model.new_cache(4)]
    model(torch.cat([ids[:20], ids[:33]]), [20, 33], caches, logits="none", observe=recorder)
    got = model(torch.cat([ids[20:21], ids[33:34]]), [1, 1], caches)
    assert distance(got.cpu(), whole[[20, 33]].cpu()) <= 1e-5
    assert recorder.stacked("sink_mass").shape == (4, 53, 6)


def test_bf16(folders):
    ids = tokens(config(), 60)
    exact = load_model(folders["fp8"], "cpu", torch.float32)(ids, logits="all")
    got = load_model(folders["fp8"], "cuda", torch.bfloat16)(ids.cuda(), logits="all").cpu()
    assert ((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median() <= 0.03
