"""The all-reduce kernels compile for sm_90a: flags with release and acquire at system scope, wide loads, no spills."""
from __future__ import annotations

import os
import re

import pytest

ahead = pytest.importorskip("gptoss_kernels.comm.ahead")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.more_forms) for n in (3, 4, 8))])
@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
def test_compile_forms(form, world):
    made = ahead.compile_form(form, world)
    meetings = 1 if form == "one_shot" else 2
    assert len(re.findall(r"atom(?:\.global)?\.release\.sys|atom(?:\.global)?\.sys\.release|release\.sys\.exch",
                          made.ptx)) >= meetings
    assert len(re.findall(r"acquire\.sys|\.sys\.acquire", made.ptx)) >= meetings
    assert "multimem" not in made.ptx
    # Every peer's row is read 16 bytes at a time.
    assert len(re.findall(r"ld\.global[\w.]*\.v4\.b32", made.ptx)) >= world
    assert made.stack == 0
    # All programs must be resident at once: 128 on 132 multiprocessors, so one each is enough.
    assert made.registers * made.threads <= 65536


@pytest.mark.more_forms
@pytest.mark.parametrize("form", ["one_shot", "two_shot"])
@pytest.mark.parametrize(("copy", "norm"), [(True, True), (True, False), (False, False)])
def test_compile_with_a_part_from_elsewhere_and_without_a_norm(form, copy, norm):
    made = ahead.compile_form(form, 2, copy=copy, norm=norm)
    assert made.stack == 0 and made.registers * made.threads <= 65536
    assert ("rsqrt" in made.ptx) == norm


def test_two_rows_on_their_way_at_once():
    made = ahead.compile_form("one_shot", 2, rows=2)
    # Of the own part, the peer's and the residual: 2 rows of 4096 lanes, 256 threads of 8 elements a load.
    assert len(re.findall(r"ld\.global[\w.]*\.v4\.b32", made.ptx)) >= 3 * 2 * 2
    assert made.stack == 0 and made.registers * made.threads <= 65536


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.more_forms) for n in (3, 4, 8))])
def test_sums_of_own_rows(world, norm):
    made = ahead.compile_sum_rows(world, norm=norm)
    print("sum_rows", world, norm, made)
    assert len(re.findall(r"acquire\.sys|\.sys\.acquire", made.ptx)) >= (2 if norm else 1)
    assert made.stack == 0
    # Two programs share a multiprocessor, so that all of them are there at once: 256 on 132.
    assert 2 * made.registers * made.threads <= 65536 and 2 * made.shared <= 100_000
    if world == 2:
        # Of the own part, the peer's and the residual: 3 chunks of 2 rows of 1024, 256 threads of 8 elements a load.
        assert len(re.findall(r"ld\.global[\w.]*\.v4\.b32", made.ptx)) >= 3 * 3
        # Codes go to either rank 8 at a time.
        assert not norm or len(re.findall(r"st\.global[\w.]*\.v2\.b32", made.ptx)) >= 3 * 2


@pytest.mark.parametrize("world", [2, 8])
def test_handing_out(world):
    made = ahead.compile_hand_out(world)
    assert re.search(r"acquire\.sys|\.sys\.acquire", made.ptx)
    assert made.stack == 0 and 2 * made.registers * made.threads <= 65536
