"""Is a model that was trained again as good as the first one? Two evaluation.json, measure by measure.

    python -m gptoss_lab.train.rebuilt DIR/evaluation.json             against the one that is shipped in data/nano

The same seed does not give the same weights: how many updates fit into the time depends on the machine, and a GPU adds
in its own order. So shares are compared, not bytes: two agree where their 95 % intervals (Wilson) meet. Of 20 measures
one may part by chance; what must agree is what the model is made for (MUST). Exit code 1 if one of those does not.
"""
from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parents[2] / "data" / "nano" / "evaluation.json"
MUST = ("all", "in_range", "task calculator", "well-formed")


@dataclass(frozen=True)
class Compared:
    """A measure of both runs; first, again: {"right", "count", "share", "low", "high"}."""

    name: str
    first: Mapping[str, float]
    again: Mapping[str, float]

    @property
    def agree(self) -> bool:
        """Whether the two intervals meet."""
        return self.first["low"] <= self.again["high"] and self.again["low"] <= self.first["high"]

    @property
    def text(self) -> str:
        """A line for people."""
        shown = [f"{s['right']:>5,} of {s['count']:,} {s['share']:7.1%} ({s['low']:.1%} to {s['high']:.1%})"
                 for s in (self.first, self.again)]
        return f"{self.name:16} {shown[0]:42} {shown[1]:42} {'' if self.agree else 'apart'}".rstrip()


def compared(first: Mapping[str, Any], again: Mapping[str, Any]) -> list[Compared]:
    """Every measure that both reports have. ValueError if one lacks what must agree."""
    both = [{**report["exact_match"], "well-formed": report["well_formed"]} for report in (first, again)]
    missing = [name for name in MUST if any(not shares.get(name, {}).get("count") for shares in both)]
    if missing:
        raise ValueError(f"an evaluation has no answers under {missing[0]!r}; both need {', '.join(MUST)}")
    return [Compared(name, both[0][name], both[1][name]) for name in both[0]
            if both[0][name]["count"] and both[1].get(name, {}).get("count")]


def main(words: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("again", type=Path, help="evaluation.json of the second run")
    parser.add_argument("--first", type=Path, default=SHIPPED, help="of the first run (default: the shipped one)")
    given = parser.parse_args(words)
    found = compared(*(json.loads(path.read_text(encoding="utf-8")) for path in (given.first, given.again)))
    print("\n".join(one.text for one in found))
    parted = [one.name for one in found if not one.agree]
    print(f"{len(found) - len(parted)} of {len(found)} measures agree; apart: {', '.join(parted) or 'none'}")
    return int(any(name in MUST for name in parted))


if __name__ == "__main__":
    raise SystemExit(main())
