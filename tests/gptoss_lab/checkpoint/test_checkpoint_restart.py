"""A run that is killed leaves nothing that loads; the next one keeps what was finished, after checking it."""
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from checkpoint_helpers import TINY, same_bits
from safetensors.torch import load_file

from gptoss_lab.checkpoint.convert import convert
from gptoss_lab.checkpoint.errors import CheckpointError
from gptoss_lab.checkpoint.reader import open_checkpoint

CHILD = """
import sys, time
from gptoss_lab.checkpoint.convert import convert

def progress(done, total, name):
    print(name, flush=True)
    time.sleep(0.02)

convert(sys.argv[1], sys.argv[2], progress=progress)
"""


def start(target):
    command = [sys.executable, "-c", CHILD, str(TINY / "hf"), str(target)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run_until(process, prefix):
    for line in process.stdout:
        if line.startswith(prefix):
            return
    pytest.fail(f"the conversion ended before {prefix}")


@pytest.fixture(scope="module")
def leftovers(tmp_path_factory):
    """What is left of a conversion that was killed while it wrote its third file of five."""
    target = tmp_path_factory.mktemp("killed") / "target"
    process = start(target)
    run_until(process, "model.layers.1.mlp.experts.gate_up_proj")
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.stdout.close()
    assert [path.name for path in target.parent.iterdir()] == ["target.partial"]
    return target.with_name("target.partial")


@pytest.fixture
def killed(leftovers, tmp_path):
    """The target of the killed conversion, in a folder of the test's own."""
    shutil.copytree(leftovers, tmp_path / "target.partial")
    return tmp_path / "target"


def nothing_loads(folder):
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir() or path.suffix == ".safetensors":
            with pytest.raises(CheckpointError) as error:
                open_checkpoint(path)
            assert "\n" not in str(error.value)


def whole(target, reused):
    result = convert(TINY / "hf", target)
    assert result.reused == reused and not target.with_name("target.partial").exists()
    fresh = convert(TINY / "hf", target.with_name("fresh"))
    assert [row["sha256"] for row in result.rows] == [row["sha256"] for row in fresh.rows]
    files = sorted(path.name for path in target.iterdir())
    assert files == sorted(path.name for path in fresh.path.iterdir())
    for name in files:
        if name.endswith(".safetensors"):
            ours, theirs = load_file(target / name), load_file(fresh.path / name)
            assert set(ours) == set(theirs) and all(same_bits(ours[t], theirs[t]) for t in ours)
    open_checkpoint(target)


def test_killed_and_finished(killed):
    assert not killed.exists()
    nothing_loads(killed.with_name("target.partial"))
    whole(killed, reused=2)


def test_killed_just_before_the_rename(killed):
    """Even with every file there, config included, the unfinished folder does not load."""
    folder = killed.with_name("target.partial") / "checkpoint"
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((TINY / "hf" / name).read_bytes())
    with pytest.raises(CheckpointError, match="unfinished conversion; run the same conversion again"):
        open_checkpoint(folder)


def test_finished_files_are_checked(killed):
    """One byte of a finished file changed: that file is made again, the other is kept."""
    file = killed.with_name("target.partial") / "checkpoint" / "model-00002-of-00005.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    whole(killed, reused=1)


@pytest.mark.parametrize("damage", ["truncate", "remove", "record"])
def test_damaged_leftovers_are_made_again(killed, damage):
    partial = killed.with_name("target.partial")
    file = partial / "checkpoint" / "model-00001-of-00005.safetensors"
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "remove":
        file.unlink()
    else:
        (partial / "done" / f"{file.name}.json").write_text('{"rows": [')
    whole(killed, reused=1)


def test_another_conversion_does_not_take_over(killed):
    with pytest.raises(CheckpointError, match="target.partial is left from another conversion"):
        convert(TINY / "hf", killed, scales="amax")
    with pytest.raises(CheckpointError, match="another conversion"):
        convert(TINY / "original", killed)
    whole(killed, reused=2)


def test_a_changed_source_is_another_conversion(killed, tmp_path):
    plan = killed.with_name("target.partial") / "plan.json"
    content = json.loads(plan.read_text())
    content["source"][1][0][2] += 1
    plan.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="another conversion"):
        convert(TINY / "hf", killed)


def test_killed_again_and_again(tmp_path):
    target = tmp_path / "target"
    for layer in (0, 2):
        process = start(target)
        run_until(process, f"model.layers.{layer}.mlp")
        process.kill()
        process.wait()
        process.stdout.close()
        assert not target.exists()
    whole(target, reused=3)


@pytest.mark.skipif(os.name != "posix", reason="files are locked by flock")
def test_two_runs_at_once(tmp_path):
    target = tmp_path / "target"
    process = start(target)
    try:
        run_until(process, "model.layers.0")
        with pytest.raises(CheckpointError, match="in use: another run"):
            convert(TINY / "hf", target)
    finally:
        process.wait()
        process.stdout.close()
    assert process.returncode == 0 and open_checkpoint(target).layout == "fp8"
