"""Loading: what is kept how, what is refused, and that nothing is copied that need not be."""
import pytest
import torch
from random_models import Memory, config, distance, random_source, tokens

from gptoss_kernels.registry import BackendUnavailable, register
from gptoss_lab.checkpoint import CheckpointError, synth
from gptoss_lab.checkpoint.stored import Dense, Fp8
from gptoss_lab.config import preset
from gptoss_lab.model import build_model, choose_operations, load_model
from gptoss_lab.model.load import _is_dense

CONFIG = config(num_layers=2)


@pytest.fixture(scope="module")
def source():
    return random_source(CONFIG)


# -- storage of the experts ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("storage, form, dtype", [
    ("stored", "mxfp4", torch.uint8), ("dense", "dense", torch.bfloat16), ("auto", "dense", torch.bfloat16),
])
def test_storage(source, storage, form, dtype):
    model = build_model(source, dtype=torch.bfloat16, expert_storage=storage)
    for block in model.layers:
        for projection in (block.moe.gate_up, block.moe.down):
            assert projection.form == form and projection.values.dtype == dtype


def test_auto_is_dense_while_small():
    assert _is_dense(preset("nano"), torch.float32, "auto")
    assert not _is_dense(preset("gpt-oss-20b"), torch.bfloat16, "auto")
    assert _is_dense(preset("gpt-oss-20b"), torch.bfloat16, "dense")


def test_unknown_storage(source):
    with pytest.raises(ValueError, match="expert_storage is 'int8'; 'auto', 'stored' or 'dense'"):
        build_model(source, expert_storage="int8")


def test_cut_blocks_are_refused_as_stored(source):
    class Cut(Memory):
        def experts(self, layer, projection, *, device=None):
            shape = (5, 320, 96) if projection == "gate_up_proj" else (5, 96, 160)
            scales = torch.ones(5, 3, 2) if projection == "gate_up_proj" else torch.ones(5, 1, 2)
            return Fp8(torch.zeros(shape).to(torch.float8_e4m3fn), scales, first_column=32)

    with pytest.raises(ValueError, match="column 32 of a block; stored FP8 experts must be cut at multiples of 128"):
        build_model(Cut(CONFIG, source.tensors), expert_storage="stored")


# -- memory ----------------------------------------------------------------------------------------------------------
def test_bf16_on_the_cpu_uses_the_map(tmp_path):
    """No copy of what already has its dtype: the parameters lie in the reader's memory map, one storage per file."""
    folder = synth(CONFIG, tmp_path / "model")
    model = load_model(folder, dtype=torch.bfloat16, expert_storage="stored")
    storages = {
        name: p.untyped_storage().data_ptr() for name, p in model.named_parameters()
        if name.endswith(("embedding.weight", "out.weight", "values", "scales", "down.bias")) or "unembedding" in name
    }
    assert len(storages) == 2 + 2 * 6 and len(set(storages.values())) == len(list(folder.glob("*.safetensors")))


def test_qkv_is_one_matrix_in_the_order_q_k_v(source):
    model = build_model(source, dtype=torch.float32)
    q, k, v = (source.tensors[f"model.layers.1.self_attn.{x}_proj.weight"].float() for x in "qkv")
    assert torch.equal(model.layers[1].attention.qkv.weight, torch.cat([q, k, v]))


def test_nothing_requires_a_gradient(source):
    model = build_model(source)
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    assert not model(tokens(CONFIG, 3)).requires_grad


# -- what is refused -------------------------------------------------------------------------------------------------
def test_missing_folder(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_model(tmp_path / "nowhere")


def test_wrong_shape(source):
    wrong = Memory(CONFIG, source.tensors | {"lm_head.weight": torch.zeros(130, 96)})
    with pytest.raises(RuntimeError, match="size mismatch for unembedding.weight"):
        build_model(wrong)


def test_layers_must_be_stored_alike(source):
    class Mixed(Memory):
        def experts(self, layer, projection, *, device=None):
            stored = super().experts(layer, projection)
            return stored if layer == 0 else Dense(stored.dequantise())

    with pytest.raises(ValueError, match="layer 1: gate_up_proj is stored as dense, layer 0 as mxfp4"):
        build_model(Mixed(CONFIG, source.tensors), expert_storage="stored")


# -- operations ------------------------------------------------------------------------------------------------------
def test_operations_are_chosen_once_with_a_reason(source):
    model = build_model(source)
    table = model.operations.table()
    assert [name for name, _, _ in table] == ["rms_norm", "rope", "sink_attention", "route", "moe"]
    assert all(reason for _, _, reason in table)


def test_a_backend_that_does_not_exist(source):
    with pytest.raises(BackendUnavailable, match="moe has no backend 'abacus'"):
        build_model(source, backends={"moe": "abacus"})
    with pytest.raises(BackendUnavailable, match="the model has no operation 'attention'"):
        build_model(source, backends={"attention": "reference"})


def test_a_named_backend_is_used_and_sees_the_needs(source):
    """A backend that doubles its result is registered, refuses bf16, and is used where it is asked for."""
    seen = []

    def refuses(**needs):
        seen.append(needs)
        return "only fp32" if needs["dtype"] != torch.float32 else None

    reference = choose_operations(backends={"moe": "reference"}).moe.function

    def doubled(*args, **kwargs):
        return 2 * reference(*args, **kwargs)

    register("moe", "test-doubled", rank=10**6, obstacle=refuses)(doubled)
    plain = build_model(source, dtype=torch.float32, expert_storage="stored", backends={"moe": "reference"})
    other = build_model(source, dtype=torch.float32, expert_storage="stored", backends={"moe": "test-doubled"})
    assert seen[-1] == {"device": torch.device("cpu"), "dtype": torch.float32, "expert_form": "mxfp4"}
    assert other.operations.moe.backend == "test-doubled"
    ids = tokens(CONFIG, 10)
    assert distance(other(ids), plain(ids)) > 0.01
    with pytest.raises(BackendUnavailable, match="'test-doubled' cannot run here: only fp32"):
        build_model(source, dtype=torch.bfloat16, backends={"moe": "test-doubled"})
