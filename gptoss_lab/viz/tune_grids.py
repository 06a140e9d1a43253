"""Tiles, waves and lanes: how well a launch shape fits 2880, 5120 and 5760, and how well it would fit 7168.

Three kinds of waste, all known before anything runs. Columns: the last tile of an axis reaches beyond it. Waves: work
is dealt to a fixed number of workers in rounds, and in the last round some have none. Lanes: a program that holds a
whole row holds the next power of two, and the lanes beyond the row do nothing.

The tensor-core product deals work *items* in turn to clusters of two CTAs (66 on 132 multiprocessors): two row tiles
of an expert and one column tile, or the odd last row tile and two column tiles. An item takes as long as it multiplies
columns: its tile's, or 128 where the second half of a tile of 256 lies beyond the axis and is skipped. The whole takes
as long as the busiest cluster; what it should take is the real columns of all row tiles, spread evenly.

What is lost: nothing here knows of memory. That tiles of 128 fetch more bytes per product, and that one long product
has fewer gaps than two short ones, only a measurement says (`gptoss-lab bench tune`).
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from gptoss_lab.viz import style
from gptoss_lab.viz.table import Table, table

CLUSTERS, TILE_ROWS = 66, 128
TILES = (128, 192, 256)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def rounds(items: int, workers: int) -> int:
    """Rounds in which `workers` do `items`, one each per round. ValueError below 1."""
    if items < 1 or workers < 1:
        raise ValueError(f"items and workers are {items} and {workers}; at least 1 of both")
    return -(-items // workers)


def busy(items: int, workers: int) -> float:
    """The share of workers that have an item, over all rounds: what the tail leaves."""
    return items / (rounds(items, workers) * workers)


def balanced(programs: int, workers: int = 132) -> float:
    """The mean over the largest load, if programs that all run at once are spread as evenly as they can be."""
    return busy(programs, workers)


def even_rows(tokens: int, experts: int, experts_per_token: int) -> list[int]:
    """Rows of each expert if routing is as even as it can be."""
    rows, each = tokens * experts_per_token, tokens * experts_per_token // experts
    return [each + (n < rows - each * experts) for n in range(experts)]


@dataclass(frozen=True)
class Product:
    """A tensor-core product [rows of each group, n columns], in tiles of `columns`."""

    rows: tuple[int, ...]
    n: int
    columns: int

    @property
    def tiles(self) -> int:
        """Column tiles."""
        return -(-self.n // self.columns)

    @property
    def items(self) -> int:
        """Work items of all groups."""
        row_tiles = [-(-rows // TILE_ROWS) for rows in self.rows]           # the kernel's items_of
        return sum(t // 2 * self.tiles + t % 2 * -(-self.tiles // 2) for t in row_tiles)

    @property
    def rounds(self) -> int:
        """Rounds of the clusters."""
        return rounds(self.items, CLUSTERS)

    @property
    def in_width(self) -> float:
        """Share of the column tiles' width that is n."""
        return self.n / (self.tiles * self.columns)

    @property
    def in_wave(self) -> float:
        """Share of cluster rounds that have an item."""
        return busy(self.items, CLUSTERS)

    @property
    def lengths(self) -> list[int]:
        """Columns that each item multiplies, in the order in which items are dealt."""
        each = [128 if self.columns == 256 and self.n - tile * 256 <= 128 else self.columns
                for tile in range(self.tiles)]
        found = []
        for rows in self.rows:
            pairs, odd = divmod(-(-rows // TILE_ROWS), 2)
            found += [length for length in each for _ in range(pairs)]
            found += [max(each[tile : tile + 2]) for tile in range(0, self.tiles, 2)] * odd
        return found

    @property
    def cost(self) -> int:
        """Columns that the busiest cluster multiplies, one after the other."""
        lengths = self.lengths
        return max(sum(lengths[cluster::CLUSTERS]) for cluster in range(CLUSTERS))

    @property
    def least(self) -> float:
        """The same if the n columns of every two row tiles were spread evenly over the clusters."""
        return sum(-(-rows // TILE_ROWS) for rows in self.rows) / 2 * self.n / CLUSTERS

    @property
    def useful(self) -> float:
        """least / cost: what columns, pairs and the last round leave."""
        return self.least / self.cost


PRODUCTS = {"QKV product": 5120, "output product": 2880, "gate/up product": 5760, "down product": 2880}


def products(tokens: int, n: int, experts: int = 0, tiles: Sequence[int] = TILES) -> list[Product]:
    """A product of even routing (experts 0: dense) in each tile width."""
    rows = even_rows(tokens, experts, 4) if experts else [tokens]
    return [Product(tuple(rows), n, columns) for columns in tiles]


def products_table(tokens: int, experts: int) -> Table:
    """The four products of a layer, and one of width 7168, in each tile width; gate/up has but one, a scale group."""
    lines = []
    for name, n in {**PRODUCTS, "a width of 7168": 7168}.items():
        routed = name in ("gate/up product", "down product")
        for p in products(tokens, n, experts if routed else 0, (256,) if name == "gate/up product" else TILES):
            lines.append([name, n, p.columns, f"{n / p.columns:.2f}", p.items, f"{p.items / CLUSTERS:.2f}", p.rounds,
                          f"{100 * p.in_width:.1f}", f"{100 * p.in_wave:.1f}", p.cost, f"{100 * p.useful:.1f}",
                          "modelled"])
    return table(lines, ["product", "columns", "tile", "tiles", "items", "waves", "rounds", "width used, %",
                         "rounds used, %", "columns in turn", "useful, %", "origin"])


def useful_figure(n: int = 5120, experts: int = 0, most: int = 16384) -> go.Figure:
    """Useful share over the tokens for each tile width: a saw, since a round more costs as much as a full one."""
    tokens = list(range(128, most + 1, 128))
    fig = go.Figure()
    for columns, colour, dash in zip(TILES, (style.GREY, style.BLUE, style.RED), ("dot", "solid", "dash"),
                                     strict=True):
        share = [100 * products(t, n, experts, (columns,))[0].useful for t in tokens]
        fig.add_scatter(x=tokens, y=share, mode="lines", name=f"tiles of {columns}",
                        line={"color": colour, "dash": dash, "width": 1.6},
                        hovertemplate="%{x:,} tokens: %{y:.1f} %<extra>%{fullData.name}</extra>")
    fig.update_xaxes(title_text="tokens of the step", range=[0, most])
    fig.update_yaxes(title_text="useful, % of the clusters' time", range=[0, 102])
    at = [f"{100 * p.useful:.0f}" for p in products(8192, n, experts)]
    what = f"{experts} experts, even routing" if experts else "one group"
    return style.finish(fig, f"{n:,} columns, 8,192 tokens: tiles of 128, 192, 256 are {at[0]}, {at[1]}, {at[2]} % "
                             "useful", "modelled",
                        f"columns beyond the axis and the last round of 66 clusters; {what}")


def lanes_table(columns: Iterable[int] = (7168, 2880)) -> Table:
    """Programs that hold a row at once, or in parts: lanes in use as for 7168 and as chosen, at both widths."""
    blocks = [("a row of 7168 at once", 8192), ("a row of 2880 at once", 4096), ("parts of 1024", 1024)]
    return table([[what, width, block, -(-width // block), f"{100 * width / (-(-width // block) * block):.1f}",
                   "modelled"]
                  for what, block in blocks for width in columns if width <= block or block == 1024],
                 ["program", "row", "lanes", "parts of a row", "lanes used, %", "origin"])


def decode_table() -> Table:
    """Programs of the decode products on 132 multiprocessors: rows of a weight dealt to programs or items."""
    cases = [
        ("few-token output, Triton as for 7168", 2880, 32, -(-2880 // 32)),
        ("few-token output, chosen", 2880, 16, -(-2880 // 16)),
        ("few-token QKV, Triton", 5120, 32, -(-5120 // 32)),
        ("few-token QKV, chosen", 5120, 16, -(-5120 // 16)),
        ("a width of 7168, Triton", 7168, 32, -(-7168 // 32)),
        ("experts' gate/up, one token", 5760, 256, 4 * -(-5760 // 256)),
        ("experts' down, one token", 2880, 128, 4 * -(-2880 // 128)),
    ]
    return table([[what, n, block, programs, f"{programs / 132:.2f}", -(-programs // 132),
                   f"{100 * balanced(programs):.1f}", "modelled"] for what, n, block, programs in cases],
                 ["product", "weight rows", "rows each", "programs", "per SM", "most on one SM", "evenness, %",
                  "origin"])
