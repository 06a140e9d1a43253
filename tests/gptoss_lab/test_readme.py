"""README's tables and errors against the rows that they claim to show: a number rounds to what stands there."""
from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from gptoss_lab.cost import performance
from gptoss_lab.results import read_rows, recorded_folder

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
FP8, PACKED = "fast, fp8 experts, fp8 projections", "fast, mxfp4 experts, fp8 projections"


@pytest.fixture(scope="module")
def rows():
    return list(read_rows(recorded_folder()))


def cells(line):
    """The numbers of the table line that begins with these cells, None for "does not fit"."""
    [found] = [text for text in README.splitlines() if text.startswith(f"| {line} |")]
    shown = re.findall(r"does not fit|\d+(?:\.\d+)?", found.removeprefix(f"| {line} |"))
    return [None if text == "does not fit" else text for text in shown]


def rounds_to(value, shown):
    """Whether `value` is `shown` to the digits that stand there."""
    digits = len(shown.partition(".")[2])
    return abs(value - float(shown)) <= 0.5 * 10**-digits + 1e-12


def value_of(rows, suite, backend, model, plan, tokens, batch):
    of = {"model": model, "ep": plan[0], "dp": plan[1], "tp": plan[2], "tokens": tokens, "batch": batch}
    found = [row for row in rows if row["suite"] == suite and row["backend"] == backend and row["case"] in (
        suite, f"{suite} over ranks") and all(row["conditions"].get(k) == v for k, v in of.items())
        and not row["conditions"].get("sequence_split")]
    assert len({row["value"] for row in found}) == 1, (suite, backend, of, len(found))
    return found[0]["value"]


ONE, TWO = (1, 1, 1), (2, 1, 2)
DECODE = {
    "120B, FP8 experts": ("gpt-oss-120b", FP8, ONE), "120B, MXFP4 experts kept packed": ("gpt-oss-120b", PACKED, ONE),
    "20B, FP8 experts": ("gpt-oss-20b", FP8, ONE), "20B, MXFP4 experts kept packed": ("gpt-oss-20b", PACKED, ONE),
    "120B on two GPUs, EP2 DP1 TP2, FP8 experts": ("gpt-oss-120b", FP8, TWO),
    "20B on two GPUs, EP2 DP1 TP2, FP8 experts": ("gpt-oss-20b", FP8, TWO),
}


@pytest.mark.parametrize("line", DECODE)
def test_decode(rows, line):
    model, backend, plan = DECODE[line]
    shown = cells(line)
    cases = [(tokens, batch) for tokens in (8192, 32768) for batch in (1, 8, 32, 128)]
    assert len(shown) in (7, 8)                    # "does not fit" ends a list of batches
    for (tokens, batch), text in zip(cases, shown, strict=False):
        value = value_of(rows, "decode", backend, model, plan, tokens, batch)
        assert value is None if text is None else rounds_to(value, text), (tokens, batch, value, text)


PREFILL = {
    "gpt-oss-120b": ("gpt-oss-120b", ONE), "gpt-oss-20b": ("gpt-oss-20b", ONE),
    "gpt-oss-120b on two GPUs, EP2 DP1 TP2": ("gpt-oss-120b", TWO),
    "gpt-oss-20b on two GPUs, EP2 DP1 TP2": ("gpt-oss-20b", TWO),
}


@pytest.mark.parametrize("line", PREFILL)
def test_prefill(rows, line):
    model, plan = PREFILL[line]
    for tokens, text in zip((8192, 32768, 65536, 128000), cells(line), strict=True):
        assert rounds_to(value_of(rows, "prefill", FP8, model, plan, tokens, 1), text), (tokens, text)


def test_the_errors_of_the_performance_model(rows):
    """Median and worst of what no fit has seen, by how many GPUs and data-parallel groups."""
    model, errors = performance.calibrate(rows), {}
    for phase in performance.PHASES:
        for checked in model.of(phase).checked:
            dp, tp = re.search(r"DP(\d) TP(\d)", checked.label).groups()
            errors.setdefault((dp, tp, phase), []).append(100 * checked.relative_error)
    text = " ".join(README.split())
    sentence = (
        r"On one GPU: prefill (\S+) % off in the median and (\S+) % at worst, decode (\S+) % and (\S+) %\..*one "
        r"data-parallel group prefill (\S+) % and (\S+) %, decode (\S+) % and (\S+) %; with two groups prefill (\S+) % "
        r"and (\S+) %, decode (\S+) % and, for one user, (\S+) %")
    shown = iter(re.search(sentence, text).groups())
    for plan in (("1", "1"), ("1", "2"), ("2", "1")):
        for phase in ("prefill", "decode"):
            found = errors[(*plan, phase)]
            for value in (statistics.median(found), max(found)):
                assert rounds_to(value, next(shown)), (plan, phase, value)
