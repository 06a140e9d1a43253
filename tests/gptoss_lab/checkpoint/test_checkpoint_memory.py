"""Memory of a conversion: bounded by pieces, so it does not grow with the number of layers. Linux counts it exactly."""
import subprocess
import sys
from dataclasses import replace

import pytest
from checkpoint_helpers import SMALL

from gptoss_lab.checkpoint.manifest import layer_of, manifest, total_bytes
from gptoss_lab.checkpoint.synth import synth

CHILD = """
import sys
from pathlib import Path
import torch
from gptoss_lab.checkpoint.convert import convert

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

before = status("VmRSS")
convert(sys.argv[1], sys.argv[2], workers=2)
print(status("VmHWM") - before)
"""
WIDE = replace(SMALL, name="wide", hidden_size=1440, intermediate_size=1440, num_experts=8)


def peak_above_start(layers, folder):
    source = synth(WIDE, folder / f"source-{layers}", layers=layers)
    command = [sys.executable, "-c", CHILD, str(source), str(folder / f"target-{layers}")]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_peak_memory_does_not_grow_with_layers(tmp_path):
    layer = total_bytes(spec for spec in manifest(WIDE, "fp8") if layer_of(spec.name) == 0)
    few, many = peak_above_start(2, tmp_path), peak_above_start(5, tmp_path)
    assert many < few + layer / 2
    assert max(few, many) < 3 * layer
