"""The vocabulary: rebuilt offline, checked, cached, and the errors when it cannot be had (P21)."""

import ast
import base64
import hashlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import openai_harmony
import pytest

from gptoss_lab.harmony import (
    VOCABULARY_SIZE,
    TokenIdError,
    VocabularyError,
    decode,
    encode,
    load_encoding,
    token_bytes,
    vocabulary,
)
from gptoss_lab.harmony.vocabulary import FILE_NAME, SHA256, vocabulary_file

USE = "from gptoss_lab.harmony import encode; print(encode('hello world'))"
LIBRARY_ALONE = "import openai_harmony; openai_harmony.load_harmony_encoding('HarmonyGptOss')"
OPEN_BY_PYTHON = "import socket; socket.socket()"
OPEN_BY_CALL = "import ctypes; ctypes.CDLL(None).socket(2, 1, 0); print('opened')"


def run_without_sockets(code: str, home: Path, **settings: str) -> subprocess.CompletedProcess:
    """Run `code` in a fresh process with an empty home and no socket."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT") if name in os.environ}
    environment = {**kept, "HOME": str(home), "TMPDIR": str(home), "PYTHONDONTWRITEBYTECODE": "1", **settings}
    block = Path(__file__).with_name("no_sockets.py")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(code)
        command = [sys.executable, str(block), str(program)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """An empty cache and no setting of the user's; returns the cache folder."""
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    monkeypatch.setenv("GPTOSS_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_fresh_process_encodes_without_a_socket(tmp_path):
    done = run_without_sockets(USE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == str([24912, 2375])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in files] == [FILE_NAME]


def test_the_cache_setting_says_where(tmp_path):
    done = run_without_sockets(USE, tmp_path / "home", GPTOSS_LAB_CACHE=str(tmp_path / "here"), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "vocabulary" / FILE_NAME).stat().st_size == 3_613_922
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("code", [OPEN_BY_PYTHON, OPEN_BY_CALL, LIBRARY_ALONE])
def test_the_block_bites(tmp_path, code):
    """What opens a socket fails under the block, and the library without our file is of that kind."""
    done = run_without_sockets(code, tmp_path)
    if code is not OPEN_BY_PYTHON and "not blocked" in done.stdout:
        pytest.skip("this system cannot block the system call")
    assert done.returncode == (1 if code is OPEN_BY_PYTHON else -signal.SIGSYS)
    assert "opened" not in done.stdout


def test_rebuilt_file_is_the_one_the_library_asks_for(clean):
    data = vocabulary_file().read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert (data.count(b"\n"), len(data)) == (199_998, 3_613_922)


def test_nothing_but_the_file_is_left_in_the_cache(clean):
    vocabulary_file()
    assert [path.name for path in clean.rglob("*") if path.is_file()] == [FILE_NAME]


def test_a_cache_that_was_altered_is_rebuilt(clean):
    file = vocabulary_file()
    file.write_bytes(file.read_bytes()[:-1])
    assert hashlib.sha256(vocabulary_file().read_bytes()).hexdigest() == SHA256


def test_a_good_cache_is_not_written_again(clean):
    before = vocabulary_file().stat()
    after = vocabulary_file().stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_users_folder_is_honoured(clean, monkeypatch, tmp_path):
    data = vocabulary_file().read_bytes()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / FILE_NAME).write_bytes(data)
    monkeypatch.setenv("GPTOSS_LAB_CACHE", str(tmp_path / "unused"))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(theirs))
    assert vocabulary_file() == theirs / FILE_NAME
    assert not (tmp_path / "unused").exists()


def test_the_users_folder_without_the_file(clean, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path / "absent"))
    with pytest.raises(VocabularyError) as error:
        vocabulary_file()
    text = one_line(error)
    assert str(tmp_path / "absent" / FILE_NAME) in text and "TIKTOKEN_ENCODINGS_BASE" in text


def test_the_users_file_with_one_byte_changed(clean, monkeypatch, tmp_path):
    data = bytearray(vocabulary_file().read_bytes())
    data[1000] ^= 1
    (tmp_path / FILE_NAME).write_bytes(data)
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(VocabularyError) as error:
        vocabulary_file()
    text = one_line(error)
    assert "altered" in text and str(tmp_path / FILE_NAME) in text and "TIKTOKEN_ENCODINGS_BASE" in text


def test_the_error_reaches_the_user_of_the_package(tmp_path):
    done = run_without_sockets(USE, tmp_path, TIKTOKEN_ENCODINGS_BASE=str(tmp_path))
    assert done.returncode == 1
    assert "VocabularyError" in done.stderr.splitlines()[-1] and FILE_NAME in done.stderr.splitlines()[-1]


def test_no_package_no_file(clean, monkeypatch):
    monkeypatch.setattr(vocabulary, "PACKAGE", "no-such-distribution")
    with pytest.raises(VocabularyError) as error:
        vocabulary_file()
    text = one_line(error)
    assert FILE_NAME in text and "no-such-distribution" in text and "TIKTOKEN_ENCODINGS_BASE" in text


def test_package_without_its_data(clean, monkeypatch):
    monkeypatch.setattr(vocabulary, "PACKAGE_FILE", "quicktok/data/absent.vocab")
    with pytest.raises(VocabularyError, match="absent.vocab"):
        vocabulary_file()


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "reordered"])
def test_damaged_package_data(clean, monkeypatch, tmp_path, damage):
    data = vocabulary.packaged_vocabulary().read_bytes()
    changed = bytearray(data)
    changed[6] ^= 1
    damaged = {"cut": data[:-7], "changed": bytes(changed), "empty": b"", "reordered": data[:4] + data[4:][::-1]}
    source = tmp_path / "o200k.vocab"
    source.write_bytes(damaged[damage])
    monkeypatch.setattr(vocabulary, "packaged_vocabulary", lambda: source)
    with pytest.raises(VocabularyError) as error:
        vocabulary_file()
    assert str(source) in one_line(error)
    assert not list(clean.rglob("*.tiktoken*"))


def test_binary_form_is_read_as_described(tmp_path, monkeypatch):
    tokens = {1: b"bc", 0: b"\xff\x00"}
    data = struct.pack("<I", 2) + b"".join(
        struct.pack("<H", len(t)) + t + struct.pack("<I", r) for r, t in tokens.items()
    )
    (tmp_path / "two").write_bytes(data)
    expected = base64.b64encode(b"\xff\x00") + b" 0\n" + base64.b64encode(b"bc") + b" 1\n"
    monkeypatch.setattr(vocabulary, "SHA256", hashlib.sha256(expected).hexdigest())
    assert vocabulary.rebuild(tmp_path / "two") == expected


def test_cache_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.delenv("TIKTOKEN_ENCODINGS_BASE", raising=False)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("GPTOSS_LAB_CACHE", str(tmp_path / "file"))
    with pytest.raises(VocabularyError) as error:
        vocabulary_file()
    text = one_line(error)
    assert "GPTOSS_LAB_CACHE" in text and str(tmp_path / "file") in text


def test_a_write_that_fails_leaves_nothing(clean, monkeypatch):
    def no_space(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(VocabularyError, match="No space left"):
        vocabulary_file()
    assert not [path for path in clean.rglob("*") if path.is_file()]


def test_the_encoding_is_loaded_once():
    assert load_encoding() is load_encoding()


@pytest.mark.parametrize("token_id", [201088, 201089, -1, 2**40, 1.5, "5", None])
def test_ids_that_the_model_does_not_have(token_id):
    with pytest.raises(TokenIdError) as error:
        decode([token_id])
    assert "0..201087" in one_line(error)
    with pytest.raises(TokenIdError):
        token_bytes(token_id)


def test_the_last_id_exists_and_the_one_after_it_cannot_be_spelled():
    assert decode([VOCABULARY_SIZE - 1]) == "<|reserved_201087|>"
    assert load_encoding().encode("<|reserved_201088|>", allowed_special="all") == [201088]  # the trap
    with pytest.raises(TokenIdError, match="201088"):
        encode("<|reserved_201088|>", special=True)


def test_ids_of_spec():
    words = {"user": 1428, "assistant": 173781, "system": 17360, "developer": 77944, "tool": 17952, "final": 17196}
    assert {word: encode(word) for word in words} == {word: [token_id] for word, token_id in words.items()}
    assert (encode("commentary"), encode(" to="), encode("json")) == ([12606, 815], [316, 28], [4108])


def test_spelled_markers_are_plain_text_unless_asked_for():
    assert all(token_id < 199998 for token_id in encode("<|start|>system<|end|>"))
    assert encode("<|start|>system<|end|>", special=True) == [200006, 17360, 200007]


def test_token_bytes_are_the_files():
    lines = vocabulary_file().read_bytes().splitlines()
    for rank in [*range(300), 4827, 43120, 199_997]:
        token, written = lines[rank].split()
        assert (token_bytes(rank), rank) == (base64.b64decode(token), int(written))


def test_the_package_needs_no_torch(tmp_path):
    code = "import sys, gptoss_lab.harmony as h; h.encode('x'); print({'torch', 'quicktok'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "set()", done.stderr
    for file in Path(vocabulary.__file__).parent.glob("*.py"):
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & {"torch", "numpy", "transformers"}, file.name


def test_library_version_that_these_tests_describe():
    assert openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS == "HarmonyGptOss"
    assert sorted(load_encoding().stop_tokens_for_assistant_actions()) == [200002, 200012]
