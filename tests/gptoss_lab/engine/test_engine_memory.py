"""How large a pool is, in positions and in bytes."""
import pytest
import torch
from toy_models import SMALL, small_model

from gptoss_lab.config import preset
from gptoss_lab.engine.memory import pool_for, positions_in
from gptoss_lab.model.paged import PagePool


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b"])
@pytest.mark.parametrize(("sequences", "draft", "kv"), [(1, 0, "same"), (64, 0, "same"), (8, 4, "fp8")])
def test_as_many_positions_as_the_bytes_hold(name, sequences, draft, kv):
    """A pool of so many is within the bytes, and one page more is beyond; on the meta device."""
    config, memory = preset(name), 20 * 10**9
    positions = positions_in(memory, config, sequences, draft=draft, value_bytes=1 if kv == "fp8" else 2)
    scales = 2 * config.num_layers * config.num_kv_heads * 4 if kv == "fp8" else 0

    def size(extra):
        return PagePool(config, pages=positions // 64 + 1 + extra, rings=sequences + 1, draft=draft,
                        dtype=torch.bfloat16, device="meta", kv_form=kv).bytes - scales

    assert size(0) <= memory < size(1) and positions % 64 == 0


def test_no_room():
    assert positions_in(10**6, preset("gpt-oss-120b"), 4) == 0


def test_a_pool_for_a_model():
    model = small_model()
    pool = pool_for(model, 100, 3, page_size=16, draft=2, kv_form="fp8")
    assert (pool.free_pages, pool.free_rings, pool.page_size, pool.draft, pool.kv_form) == (7, 3, 16, 2, "fp8")
    assert pool.keys[0].shape[2:] == (SMALL.num_kv_heads, SMALL.head_dim) and pool.dtype == torch.float32
