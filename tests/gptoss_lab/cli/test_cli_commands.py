"""Every command: what it prints, and that each error is one line on stderr with the right exit code."""
import json
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gptoss_lab.cli import main
from gptoss_lab.cli.main import app
from gptoss_lab.results import make_row, write_rows

TINY = Path(__file__).parents[2] / "fixtures" / "tiny"
CONFIG = str(TINY / "hf" / "config.json")
PROGRAM = [sys.executable, "-c", "import sys; from gptoss_lab.cli import main; sys.exit(main())"]


@pytest.fixture
def run(capsys):
    """run(*arguments) -> (exit code, stdout, stderr) of a command in this process."""
    def call(*arguments):
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return code, out, err
    return call


@pytest.fixture
def done(run):
    """done(*arguments) -> stdout of a command that has to succeed without a word on stderr."""
    def call(*arguments):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        return out
    return call


def cli(*arguments, **changes):
    """The command in a process of its own."""
    command = [*PROGRAM, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **changes)


def python(code):
    """What a Python program prints."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


# -- start -------------------------------------------------------------------------------------------------------------
def test_help_lists_every_command_and_loads_nothing_heavy():
    shown = python("import sys; from gptoss_lab.cli import main; main(['--help']); "
                   "print({'torch', 'numpy', 'jsonschema'} & set(sys.modules))")
    assert shown.rstrip().endswith("set()")
    for command in ("capabilities", "inspect", "synth", "convert", "generate", "chat", "results", "bench"):
        assert f" {command} " in shown


def test_help_starts_fast():
    """Under half a second of CPU time, the best of three (measured 0.17 s on the wall when the machine was idle)."""
    code = "import time; from gptoss_lab.cli import main; main(['--help']); print(time.process_time())"
    assert min(float(python(code).split()[-1]) for _ in range(3)) < 0.5


def test_installed_program_and_version():
    program = shutil.which("gptoss-lab", path=Path(sys.executable).parent)
    assert program, "the package is not installed in this environment"
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "0.1.0"


def test_without_a_command_the_help_is_shown(done):
    assert "Usage" in done()


def test_runner_of_typer_finds_the_same_commands():
    shown = CliRunner().invoke(app, ["inspect", "--preset", "nano", "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["config"]["num_experts"] == 16


# -- capabilities ------------------------------------------------------------------------------------------------------
def test_capabilities(done):
    shown = done("capabilities")
    for text in ("notebooks on the nano checkpoint", "own Hopper kernels", "gpt-oss-120b", "mxfp4", "free disk"):
        assert text in shown
    report = json.loads(done("capabilities", "--json"))
    assert {"machine", "abilities", "fits"} == set(report) and report["machine"]["cores"] >= 1


# -- inspect -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "hf", "original", "size", "parameters", "active"), [
    ("gpt-oss-20b", 459, 363, 13_761_264_768, 20_914_757_184, 3_608_307_264),
    ("gpt-oss-120b", 687, 543, 65_248_815_744, 116_829_156_672, 5_132_849_472),
    ("120b", 687, 543, 65_248_815_744, 116_829_156_672, 5_132_849_472),
])
def test_inspect_of_the_released_models(done, name, hf, original, size, parameters, active):
    report = json.loads(done("inspect", "--preset", name, "--json"))
    assert (report["parameters"], report["active_parameters"]) == (parameters, active)
    layouts = report["layouts"]
    assert (layouts["hf"]["tensors"], layouts["original"]["tensors"]) == (hf, original)
    assert layouts["hf"]["bytes"] == layouts["original"]["bytes"] == size
    for layout in layouts.values():
        assert sum(layout["bytes_by_role"].values()) == layout["bytes"]
    assert sum(report["parameters_by_role"].values()) == parameters
    shown = done("inspect", "--preset", name)
    for number in (hf, original, size, parameters, active):
        assert f"{number:,}" in shown


@pytest.mark.parametrize(("layout", "tensors"), [("hf", 3 + 19 * 4), ("original", 3 + 15 * 4)])
def test_inspect_of_a_folder(done, layout, tensors):
    report = json.loads(done("inspect", TINY / layout, "--json"))
    found = report["checkpoint"]
    assert (found["layout"], found["tensors"], found["files"]) == (layout, tensors, 1)
    assert found["bytes"] == report["layouts"][layout]["bytes"]
    assert f"{layout} layout, {tensors} tensors in 1 files, {found['bytes']:,} bytes" in done("inspect", TINY / layout)


def test_inspect_of_a_config_alone(done):
    assert json.loads(done("inspect", CONFIG, "--json"))["config"]["vocab_size"] == 320


# -- synth, convert ----------------------------------------------------------------------------------------------------
def test_synth_then_convert_then_back(done, tmp_path):
    shown = done("synth", tmp_path / "a", "--config", CONFIG, "--layers", 2, "--layout", "original", "--device", "cpu")
    assert f"{3 + 15 * 2} tensors in 1 files" in shown
    shown = done("convert", tmp_path / "a", tmp_path / "b", "--exact", "--device", "cpu")
    assert f"{3 + 15 * 2} tensors" in shown and "exact: all 4 converted weights keep their values, proven in " in shown
    assert json.loads(done("inspect", tmp_path / "b", "--json"))["checkpoint"]["layout"] == "fp8"
    assert "exact: all 4" in done("convert", tmp_path / "b", tmp_path / "c", "--to", "bf16", "--device", "cpu")
    totals = json.loads(done("convert", tmp_path / "a", tmp_path / "d", "--scales", "amax", "--json"))
    assert totals["weights_exact"] < totals["weights_converted"] and totals["max_abs_error"] > 0


def test_convert_reports_rounding_and_exact_refuses_it(run, done, tmp_path):
    done("synth", tmp_path / "a", "--config", CONFIG, "--layers", 1, "--spread", 40)
    assert done("convert", tmp_path / "a", tmp_path / "b").split("\n")[1].startswith("rounded: ")
    code, out, err = run("convert", tmp_path / "a", tmp_path / "c", "--exact")
    assert code == 1 and out == "" and err.startswith("gptoss-lab: ") and "were rounded" in err and err.count("\n") == 1
    with pytest.raises(FileNotFoundError):
        (tmp_path / "c").stat()


# -- generate ----------------------------------------------------------------------------------------------------------
GENERATE = ("generate", "--checkpoint", TINY / "hf", "--dtype", "float32", "--device", "cpu", "--max-tokens", 4)


def test_generate_is_the_engine(done):
    import torch

    from gptoss_lab.engine import Engine, SamplingParams
    from gptoss_lab.model import load_model

    engine = Engine(load_model(TINY / "hf", dtype=torch.float32))
    greedy = engine.complete([[5, 6, 7], [8]], SamplingParams(temperature=0, max_new_tokens=4))
    expected = "".join(",".join(map(str, c.tokens)) + "\n" for c in greedy)
    assert done(*GENERATE, "5,6,7", "8", "--temperature", 0) == expected
    seeded = engine.complete([[5, 6, 7]], SamplingParams(0.8, 50, 0.95, seed=3, max_new_tokens=4))[0].tokens
    options = ("--temperature", 0.8, "--top-k", 50, "--top-p", 0.95, "--seed", 3)
    assert done(*GENERATE, "5,6,7", *options).strip() == ",".join(map(str, seeded))


def test_generate_streams_json_lines(done):
    shown = done(*GENERATE, "5", "6", "--json", "--logprobs", "--no-stop", "--seed", 1)
    lines = [json.loads(line) for line in shown.splitlines()]
    assert [line["sequence"] for line in lines] == [0, 1] * 4
    assert [line["finish"] for line in lines] == [None] * 6 + ["length"] * 2
    assert all(line["logprob"] < 0 and 0 <= line["token"] < 320 for line in lines)


def test_generate_stops_and_reads_stdin(run, monkeypatch):
    import io

    first = run(*GENERATE, "5", "--temperature", 0)[1].split(",")[0]
    monkeypatch.setattr("sys.stdin", io.StringIO("5\n\n5,6\n"))
    code, out, err = run(*GENERATE, "-", "--temperature", 0, "--stop", first, "--stats")
    assert code == 0 and out.splitlines()[0] == first and len(out.splitlines()) == 2
    assert err.startswith("3 prompt tokens in ") and err.endswith(" tokens/s\n") and err.count("\n") == 1


# -- results, bench ----------------------------------------------------------------------------------------------------
def measured(value, **conditions):
    case = ("convert", "mxfp4 to fp8, whole", "torch cpu", "seconds")
    return make_row(*case, [value], "s", statistic="single", **conditions)


def test_results_diff_sets_both_side_by_side(done, tmp_path, monkeypatch):
    write_rows(tmp_path / "recorded" / "convert.jsonl", [measured(4.0, model="gpt-oss-20b")])
    write_rows(tmp_path / "mine" / "x.jsonl", [measured(5.0, model="gpt-oss-20b"), measured(1.0, model="nano")])
    monkeypatch.setattr("gptoss_lab.results.recorded_folder", lambda: tmp_path / "recorded")
    rows = json.loads(done("results", "diff", "--folder", tmp_path / "mine", "--json"))
    assert [(r["recorded"], r["yours"], r["ratio"]) for r in rows] == [(4.0, 5.0, 1.25), (None, 1.0, None)]
    shown = done("results", "diff", "--folder", tmp_path / "mine")
    assert "1.25" in shown and "mxfp4 to fp8, whole" in shown and "torch cpu" in shown


def test_bench_convert_writes_rows_and_says_how_near_the_bound(run, tmp_path):
    out = tmp_path / "rows.jsonl"
    code, shown, err = run("bench", "convert", "--model", "nano", "--layers", 1, "--repetitions", 1, "--device", "cpu",
                           "--scratch", tmp_path, "--out", out)
    assert (code, err) == (0, f"rows added to {out}\n")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["suite"] for row in rows} == {"convert"} and len(rows) == 6
    peak = next(row for row in rows if row["metric"] == "bytes")
    assert f"{peak['bound'] / peak['value']:.1%}" in shown and "plain copy" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_bench_of_kernels_hands_the_chosen_cases_to_the_suite(run, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr("gptoss_lab.bench.attention.run", lambda *given: calls.append(given))
    out = tmp_path / "rows.jsonl"
    shown = run("bench", "attention", "--only", "decode/full/8192", "--repetitions", 5, "--out", out)
    assert shown == (0, "", f"rows added to {out}\n")
    [(path, cases, repetitions)] = calls
    assert (path, repetitions) == (out, 5) and len(cases) >= 1
    assert all("decode/full/8192" in case.name for case in cases)


def test_bench_keeps_the_rows_that_failed_and_says_why(run, monkeypatch, tmp_path):
    made = [
        make_row("prefill", "forward", "reference", "seconds", [4.0], "s", bound=1.0, statistic="single"),
        make_row("prefill", "forward", "reference", "tflops", [50.0], "TFLOP/s", bound=200.0, statistic="single"),
        make_row("prefill", "long", "reference", "seconds", [], "s", failed="out of memory at 9 tokens"),
    ]
    monkeypatch.setattr("gptoss_lab.bench.whole.bench", lambda *_: made)
    code, out, _ = run("bench", "whole", "--model", "nano", "--device", "cpu", "--out", tmp_path / "rows.jsonl")
    assert code == 0 and out.count("25.0%") == 2 and "out of memory at 9 tokens" in out
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 3


def test_bench_of_kernels_without_a_gpu_says_so(run, monkeypatch, tmp_path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run("bench", "attention", "--out", tmp_path / "rows.jsonl")
    assert (code, out) == (1, "")
    assert err == "gptoss-lab: the attention benchmark needs a CUDA GPU and torch sees none\n"
    assert not list(tmp_path.iterdir())


# -- errors ------------------------------------------------------------------------------------------------------------
ERRORS = [
    (["nonsense"], 2, "No such command 'nonsense'."),
    (["--nonsense"], 2, "No such option: --nonsense"),
    (["capabilities", "x"], 2, "unexpected extra argument"),
    (["inspect"], 2, "give either a checkpoint folder or --preset"),
    (["inspect", "x", "--preset", "nano"], 2, "give either a checkpoint folder or --preset"),
    (["inspect", "--preset", "gpt-5"], 2, "no preset is called 'gpt-5'; there are gpt-oss-20b, gpt-oss-120b, nano"),
    (["inspect", "{tmp}/none"], 1, "none does not exist"),
    (["inspect", "{tmp}"], 1, "no config.json"),
    (["inspect", "{tmp}/broken.json"], 1, "is not JSON"),
    (["inspect", "{tmp}/cut"], 1, "model.safetensors"),
    (["synth"], 2, "Missing"),
    (["synth", "{tmp}"], 1, "exists; name a target that does not"),
    (["synth", "{tmp}/new", "--preset", "x"], 2, "no preset is called 'x'"),
    (["synth", "{tmp}/new", "--layers", "0"], 2, "--layers"),
    (["synth", "{tmp}/new", "--layout", "gguf"], 2, "'gguf' is not one of 'hf', 'original'"),
    (["synth", "{tmp}/new", "--spread", "-1"], 1, "spread is -1"),
    (["synth", "{tmp}/new", "--config", "{tmp}/none.json"], 1, "no config.json at"),
    (["convert", "{tmp}/none"], 2, "Missing"),
    (["convert", "{tmp}/none", "{tmp}/new"], 1, "none does not exist"),
    (["convert", "{tiny}/hf", "{tmp}"], 1, "exists"),
    (["convert", "{tiny}/hf", "{tmp}/new", "--to", "mxfp4"], 1, "nothing to convert"),
    (["convert", "{tiny}/hf", "{tmp}/new", "--to", "int4"], 2, "'int4' is not one of"),
    (["convert", "{tiny}/hf", "{tmp}/new", "--to", "bf16", "--attention-fp8"], 1, "attention_fp8 does not belong"),
    (["convert", "{tiny}/hf", "{tmp}/new", "--device", "tpu"], 2, "'tpu' is no device; cpu, cuda"),
    (["convert", "{tiny}/hf", "{tmp}/new", "--device", "cuda:99"], 2, "'cuda:99': torch sees"),
    (["convert", "{tiny}/hf", "{tmp}/new", "--workers", "0"], 2, "--workers"),
    (["generate"], 2, "Missing"),
    (["generate", "1,x"], 2, "'1,x': token ids with commas are expected"),
    (["generate", ""], 2, "no prompt given"),
    (["generate", "5", "--temperature", "-0.5"], 2, "sampling temperature is -0.5"),
    (["generate", "5", "--temperature", "nan"], 2, "sampling temperature is nan"),
    (["generate", "5", "--top-p", "0"], 2, "sampling top_p is 0.0"),
    (["generate", "5", "--top-k", "-2"], 2, "sampling top_k is -2"),
    (["generate", "5", "--max-tokens", "0"], 2, "sampling max_new_tokens is 0"),
    (["generate", "5", "--seed", "-1"], 2, "sampling seed is -1"),
    (["generate", "5", "--dtype", "int8"], 2, "'int8' is not one of"),
    (["generate", "5", "--checkpoint", "{tmp}/none"], 1, "none does not exist"),
    (["generate", "5,320", "--checkpoint", "{tiny}/hf"], 1, "prompt 0: token id 320 at position 1 is out of range"),
    (["generate", "5", "--stop", "320", "--checkpoint", "{tiny}/hf"], 1, "sequence 0: stop id 320 is out of range"),
    (["chat", "--once", "x", "--checkpoint", "{tmp}/none"], 1, "none does not exist"),
    (["chat", "--once", "x", "--checkpoint", "{tiny}/hf"], 1, "is out of range; ids are 0..319"),
    (["chat", "--once", "x", "--reasoning", "extreme"], 2, "'extreme' is not one of 'low', 'medium', 'high'"),
    (["chat", "--once", "x", "--date", "tomorrow"], 1, "date 'tomorrow' is not a date"),
    (["chat", "--once", "x", "--max-tokens", "0"], 2, "sampling max_new_tokens is 0"),
    (["results"], 2, "Missing command."),
    (["results", "diff", "--folder", "{tmp}/none"], 1, "no result rows in"),
    (["results", "diff", "--folder", "{tmp}/bad"], 1, "rows.jsonl, line 1: "),
    (["bench"], 2, "Missing command."),
    (["bench", "convert", "--model", "x"], 2, "no preset is called 'x'"),
    (["bench", "convert", "--model", "nano", "--scratch", "{tmp}/none"], 1, "No such file or directory"),
    (["bench", "attention", "--only", "nothing-like-it"], 2, "no case holds 'nothing-like-it'"),
]


@pytest.fixture
def broken_things(tmp_path):
    (tmp_path / "broken.json").write_text("{")
    shutil.copytree(TINY / "hf", tmp_path / "cut")
    with open(tmp_path / "cut" / "model.safetensors", "r+b") as file:
        file.truncate((tmp_path / "cut" / "model.safetensors").stat().st_size - 1)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rows.jsonl").write_text('{"suite": "cooking"}\n')
    return tmp_path


@pytest.mark.parametrize(("arguments", "code", "text"), ERRORS, ids=[" ".join(arguments) for arguments, *_ in ERRORS])
def test_every_error_is_one_line(run, broken_things, arguments, code, text):
    before = sorted(broken_things.rglob("*"))
    got, out, err = run(*(a.format(tmp=broken_things, tiny=TINY) for a in arguments))
    assert got == code and out == ""
    assert err.startswith("gptoss-lab: ") and err.count("\n") == 1 and err.endswith("\n")
    assert text in err and "Traceback" not in err and "internal error" not in err
    assert sorted(broken_things.rglob("*")) == before, "something half-written was left"


def test_errors_of_the_process_itself(tmp_path):
    shown = cli("inspect", tmp_path / "none")
    assert (shown.returncode, shown.stdout) == (1, "") and shown.stderr.count("\n") == 1
    assert cli("inspect").returncode == 2


def test_an_unexpected_error_is_one_line_and_can_be_seen_in_full(run, monkeypatch):
    def breaks(*_):
        raise KeyError("lost\nkey")
    monkeypatch.setattr("gptoss_lab.capabilities.probe", breaks)
    code, _, err = run("capabilities")
    assert code == 1 and err.count("\n") == 1
    assert err.startswith("gptoss-lab: internal error, KeyError: ") and "GPTOSS_LAB_TRACEBACK=1" in err
    monkeypatch.setenv("GPTOSS_LAB_TRACEBACK", "1")
    with pytest.raises(KeyError):
        main(["capabilities"])


def test_a_full_memory_and_an_unreadable_file_are_said_plainly(run, monkeypatch):
    def raising(error):
        def breaks(*_):
            raise error
        monkeypatch.setattr("gptoss_lab.capabilities.probe", breaks)
        return run("capabilities")[2]
    assert raising(MemoryError()) == "gptoss-lab: not enough memory\n"
    assert raising(PermissionError(13, "Permission denied", "/x/y")) == "gptoss-lab: /x/y: Permission denied\n"


def test_a_reader_that_goes_away_is_no_error():
    command, pipe = [*PROGRAM, "inspect", "--preset", "nano"], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc to see that the chat waits for input")
def test_interrupted_chat_ends_with_130_and_one_line():
    command = [*PROGRAM, "chat", "--checkpoint", str(TINY / "hf"), "--device", "cpu"]
    pipe = subprocess.PIPE
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)     # tests in the background have it ignored
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=listens) as process:
        wait_until_it_waits(Path(f"/proc/{process.pid}"))
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "gptoss-lab: interrupted\n")


def wait_until_it_waits(process):
    """Until the process has mapped its weights and has slept for a second: then it reads from stdin."""
    deadline, calm = time.monotonic() + 90, 0
    while calm < 10:
        assert time.monotonic() < deadline, "the chat never waited for input"
        loaded = "model.safetensors" in (process / "maps").read_text()
        state = (process / "stat").read_text().rsplit(")", 1)[1].split()[0]
        calm = calm + 1 if state == "S" and loaded else 0
        time.sleep(0.1)
