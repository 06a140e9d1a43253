"""The vocabulary without a network: rebuilt from an installed package, checked, cached.

What: `load_encoding()` gives the openai-harmony encoding, whose merges stand in a file of 3.6 MB that the library
would download on its first use. How: the package quicktok-v1 ships the same 199,998 merges in a binary form of its own
(u32 count, then for each token u16 length, bytes, u32 rank; little endian). They are written out as the text file
`o200k_base.tiktoken` (base64 of the bytes, a space, the rank; in rank order), whose sha256 has to be the one that
openai-harmony asks for, into a cache folder, and TIKTOKEN_ENCODINGS_BASE is pointed at that folder before the library
looks. A TIKTOKEN_ENCODINGS_BASE that the user has set is honoured and its file checked.
Why this way: the bytes are proven equal by their checksum, so no tokenizer is written here and none is trusted.
What is lost: the first start takes about a second more; a cache that was altered is rebuilt.

Settings: TIKTOKEN_ENCODINGS_BASE, a folder holding o200k_base.tiktoken; GPTOSS_LAB_CACHE, the folder for what this
project caches (default: the platform's folder for a user's caches).
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import os
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path

import openai_harmony

from gptoss_lab.cache import SETTING as CACHE_SETTING
from gptoss_lab.cache import cache_folder
from gptoss_lab.harmony.errors import VocabularyError
from gptoss_lab.harmony.ids import check_id

FILE_NAME = "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
SETTING = "TIKTOKEN_ENCODINGS_BASE"
PACKAGE, PACKAGE_FILE = "quicktok-v1", "quicktok/data/o200k.vocab"


@functools.cache
def load_encoding() -> openai_harmony.HarmonyEncoding:
    """Return the o200k_harmony encoding; loaded once in a process, never from the network.

    Sets TIKTOKEN_ENCODINGS_BASE in this process unless the user has. Raises `VocabularyError`.
    """
    os.environ[SETTING] = str(vocabulary_file().parent)
    return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def vocabulary_file() -> Path:
    """Return the path of a checked `o200k_base.tiktoken`, rebuilding it in the cache where the user names none.

    Raises `VocabularyError`, one line naming the file and the setting, when it cannot be had or is altered.
    """
    cached = cache_folder() / "vocabulary" / FILE_NAME
    named = os.environ.get(SETTING)
    if named and Path(named) != cached.parent:
        return _check_named(Path(named) / FILE_NAME)
    if not (cached.is_file() and _is_expected(cached.read_bytes())):
        _write_whole(cached, rebuild(packaged_vocabulary()))
    return cached


def packaged_vocabulary() -> Path:
    """Return where quicktok-v1 has its merges. The package is looked up, not imported."""
    try:
        path = Path(importlib.metadata.distribution(PACKAGE).locate_file(PACKAGE_FILE))
    except importlib.metadata.PackageNotFoundError:
        raise VocabularyError(_advice(f"package {PACKAGE}, from which {FILE_NAME} is rebuilt, is absent")) from None
    if not path.is_file():
        raise VocabularyError(_advice(f"package {PACKAGE} lacks {path}, from which {FILE_NAME} is rebuilt"))
    return path


def rebuild(source: Path) -> bytes:
    """Return the text of `o200k_base.tiktoken` from the binary merges in `source`; its sha256 is checked."""
    data = source.read_bytes()
    try:
        lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in sorted(_read_merges(data))]
    except struct.error:
        raise VocabularyError(_advice(f"{source} is cut short, so {FILE_NAME} cannot be rebuilt from it")) from None
    text = b"".join(lines)
    if not _is_expected(text):
        raise VocabularyError(_advice(f"{FILE_NAME} rebuilt from {source} does not have sha256 {SHA256}"))
    return text


def _read_merges(data: bytes) -> Iterable[tuple[int, bytes]]:
    """Yield (rank, bytes of the token) from the binary form: u32 count, then u16 length, bytes, u32 rank."""
    (count,) = struct.unpack_from("<I", data, 0)
    offset = 4
    for _ in range(count):
        (length,) = struct.unpack_from("<H", data, offset)
        token = data[offset + 2 : offset + 2 + length]
        (rank,) = struct.unpack_from("<I", data, offset + 2 + length)
        yield rank, token
        offset += 6 + length


def _check_named(file: Path) -> Path:
    """Return `file`, the one that the user's setting names, when it is the expected vocabulary."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise VocabularyError(
            f"{file}, named by {SETTING}, cannot be read ({error.strerror}); "
            f"put {FILE_NAME} there or unset {SETTING} to have it rebuilt"
        ) from None
    if not _is_expected(data):
        raise VocabularyError(
            f"{file}, named by {SETTING}, is altered: sha256 {hashlib.sha256(data).hexdigest()}, expected {SHA256}; "
            f"replace it or unset {SETTING} to have it rebuilt"
        )
    return file


def _is_expected(data: bytes) -> bool:
    return hashlib.sha256(data).hexdigest() == SHA256


def _write_whole(file: Path, data: bytes) -> None:
    """Write `file` so that no reader ever sees a part of it: under a temporary name first, then renamed."""
    temporary = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=FILE_NAME, delete=False) as handle:
            temporary = handle.name
            handle.write(data)
        os.replace(temporary, file)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise VocabularyError(
            _advice(f"{file} cannot be written ({error.strerror}); set {CACHE_SETTING} to a writable folder")
        ) from None


def _advice(what: str) -> str:
    return f"{what}; or set {SETTING} to a folder that holds {FILE_NAME}"


def encode(text: str, *, special: bool = False) -> list[int]:
    """Return the ids of `text`.

    special: False (default) takes everything as ordinary text, so "<|end|>" becomes plain pieces; True turns spelled
        special tokens into their ids, for examples and tests, never for what a user wrote.
    Raises `TokenIdError` for "<|reserved_201088|>" with `special=True`: the model has no such row.
    """
    if special:
        return [check_id(i) for i in load_encoding().encode(text, allowed_special="all")]
    return load_encoding().encode(text, disallowed_special=())


def decode(ids: Iterable[int]) -> str:
    """Return the text of `ids`, special tokens spelled out, bytes that are not UTF-8 shown as U+FFFD.

    Raises `TokenIdError` for an id outside 0..201087.
    """
    return load_encoding().decode([check_id(i) for i in ids])


@functools.cache
def token_bytes(token_id: int) -> bytes:
    """Return the bytes of one token; a character may be spread over several. `TokenIdError` outside 0..201087."""
    text = load_encoding().decode([check_id(token_id)], errors="surrogateescape")
    return text.encode("utf-8", "surrogateescape")
