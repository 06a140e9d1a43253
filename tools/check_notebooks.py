"""Check the committed notebooks against the rules (tools/rules.py).

    python -m tools.check_notebooks [FILE ...]

Prints one line per violation and ends with 1 if there was one.
"""
from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import nbformat

from tools.notebooks import find
from tools.rules import problems


def check(path: Path) -> list[str]:
    """What is wrong with one file; a file that is no notebook is one problem."""
    try:
        notebook = nbformat.reads(path.read_text(encoding="utf-8"), as_version=4)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, nbformat.reader.NotJSONError, AttributeError) as error:
        return [f"cannot be read as a notebook: {type(error).__name__}"]
    return problems(notebook)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="check the committed notebooks")
    parser.add_argument("files", nargs="*", type=Path)
    paths = parser.parse_args(arguments).files or find([])
    found = [f"{path.name}: {line}" for path in paths for line in check(path)]
    print("\n".join(found) or f"{len(paths)} notebooks keep every rule")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
