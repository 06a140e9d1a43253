"""Row layout of the grouped GEMM: closed forms and properties."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptoss_kernels.moe import group_layout, max_tiles, padding_share


def test_published_case():
    layout = group_layout([7, 0, 130, 1], 128)
    assert layout.aligned == (128, 0, 256, 128)
    assert layout.starts == (0, 128, 128, 384)
    assert layout.total == 512


@given(st.lists(st.integers(0, 400), min_size=1, max_size=40), st.sampled_from([16, 64, 128]))
def test_groups_are_disjoint_aligned_and_in_order(sizes, align):
    layout = group_layout(sizes, align)
    at = 0
    for size, aligned, start in zip(layout.sizes, layout.aligned, layout.starts, strict=True):
        assert start == at and start % align == 0
        assert size <= aligned < size + align
        at += aligned
    assert layout.total == at


@given(st.integers(1, 300), st.integers(1, 4), st.integers(4, 128), st.sampled_from([16, 64, 128]), st.data())
def test_no_routing_needs_more_tiles_than_the_bound(tokens, top, experts, align, data):
    sizes = [0] * experts
    for _ in range(tokens * top):
        sizes[data.draw(st.integers(0, min(experts, 6) - 1))] += 1
    assert group_layout(sizes, align).total <= max_tiles(tokens, top, experts, align) * align


def test_the_bound_is_reached():
    # one row in every expert but the first, which takes the rest so that every group wastes as much as it can
    tokens, top, experts, align = 96, 4, 128, 128
    sizes = [tokens * top - (experts - 1)] + [1] * (experts - 1)
    assert group_layout(sizes, align).total == 130 * align == (max_tiles(tokens, top, experts, align)) * align


def test_padding_share():
    assert padding_share([128, 256], 128) == 0
    assert padding_share([64, 64], 128) == 1
    with pytest.raises(ValueError, match="all groups are empty"):
        padding_share([0, 0], 128)


@pytest.mark.parametrize(("sizes", "align", "message"), [([1], 0, "positive"), ([3, -1], 16, "none may be negative")])
def test_bad_input(sizes, align, message):
    with pytest.raises(ValueError, match=message):
        group_layout(sizes, align)
