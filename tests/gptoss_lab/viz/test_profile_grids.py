"""Waves, tiles and lanes against counting them one by one."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptoss_kernels.projection.few_cuda import ROWS
from gptoss_lab.viz import tune_grids
from gptoss_lab.viz.tune_grids import CLUSTERS, Product


def scheduled(rows, n, columns):
    """The kernel's schedule written out: for each cluster the columns that it multiplies, from `find_item`."""
    tiles, items = -(-n // columns), []
    for each in rows:
        t = -(-each // 128)
        for inside in range(t // 2 * tiles + t % 2 * ((tiles + 1) // 2)):
            if inside < t // 2 * tiles:
                mine = [inside // (t // 2)] * 2                                 # both CTAs take one column tile
            else:
                mine = [2 * (inside - t // 2 * tiles) + rank for rank in (0, 1)]
            widths = [0 if tile >= tiles else 128 if columns == 256 and tile * 256 + 128 >= n else columns
                      for tile in mine]
            items.append(max(widths))
    return [sum(items[cluster::CLUSTERS]) for cluster in range(CLUSTERS)], len(items)


@given(st.lists(st.integers(0, 900), min_size=1, max_size=40).filter(any), st.integers(4, 120).map(lambda n: 64 * n),
       st.sampled_from(tune_grids.TILES))
def test_a_product_takes_as_long_as_its_busiest_cluster(rows, n, columns):
    product = Product(tuple(rows), n, columns)
    loads, items = scheduled(rows, n, columns)
    assert (product.cost, product.items) == (max(loads), items) == (product.cost, len(product.lengths))
    assert product.rounds == -(-items // CLUSTERS) and 0 < product.useful <= 1
    assert product.in_wave == pytest.approx(items / (product.rounds * CLUSTERS))


def test_2880_5120_and_7168_by_hand():
    qkv = {p.columns: p for p in tune_grids.products(8192, 5120)}
    assert [qkv[c].items for c in (128, 192, 256)] == [32 * 40, 32 * 27, 32 * 20]
    assert [qkv[c].cost for c in (128, 192, 256)] == [20 * 128, 14 * 192, 10 * 256]
    down = {p.columns: p for p in tune_grids.products(8192, 2880, 128)}
    assert [down[c].cost for c in (128, 192, 256)] == [5760, 5760, 6144]
    assert down[192].in_width == 1 and down[256].in_width == pytest.approx(2880 / 3072)
    wide = {p.columns: p for p in tune_grids.products(8192, 7168)}
    assert wide[256].in_width == 1 and wide[192].in_width < 1


def test_rounds_and_tails():
    assert [tune_grids.rounds(n, 132) for n in (1, 132, 133, 264)] == [1, 1, 2, 2]
    assert tune_grids.busy(133, 132) == pytest.approx(133 / 264) and tune_grids.busy(132, 132) == 1
    assert tune_grids.balanced(180) == pytest.approx(180 / 264) == tune_grids.balanced(90) == pytest.approx(90 / 132)
    for items, workers in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least 1 of both"):
            tune_grids.rounds(items, workers)


@given(st.integers(1, 4000), st.sampled_from([4, 32, 128]))
def test_even_rows(tokens, experts):
    rows = tune_grids.even_rows(tokens, experts, 4)
    assert sum(rows) == 4 * tokens and max(rows) - min(rows) <= 1 and len(rows) == experts


def test_power_of_two():
    assert [tune_grids.power_of_two(n) for n in (1, 2, 3, 2880, 4096, 7168)] == [1, 2, 4, 4096, 4096, 8192]


def test_tables():
    products = tune_grids.products_table(8192, 128).frame
    assert products["product"].tolist().count("gate/up product") == 1 and len(products) == 4 + 9
    row = products[(products["product"] == "QKV product") & (products["tile"] == "192")].iloc[0]
    assert (row["items"], row["rounds"], row["useful, %"]) == ("864", "14", "92.4")
    lanes = tune_grids.lanes_table().frame
    assert lanes["lanes used, %"].tolist() == ["87.5", "35.2", "70.3", "100.0", "93.8"]
    decode = tune_grids.decode_table().frame.set_index("product")
    assert decode.loc["experts' down, one token", "programs"] == "92"
    assert decode.loc["few-token output, chosen", "evenness, %"] == "68.2"
    assert decode.loc["few-token QKV, chosen", "programs"] == str(5120 // ROWS) == "320"
