"""A JupyterLab on loopback with a copy of one notebook, and a headless Chromium that looks at it.

The copy lies in a temporary folder, with settings of its own: no news, no update check, all cells rendered at once.
"""
from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

TOKEN = "only-on-loopback"
FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},
}


def chromium() -> str | None:
    """The system's Chromium or Chrome, None if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@contextmanager
def lab(notebook: Path, folder: Path) -> Iterator[str]:
    """The address under which JupyterLab shows a copy of `notebook`; the server ends with the block."""
    shutil.copy(notebook, folder / notebook.name)
    for name, values in SETTINGS.items():
        file = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    port = _free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1",
               f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}", "--ServerApp.port_retries=0"]
    own = {f"JUPYTER_{name}_DIR": str(folder / name.lower()) for name in ("CONFIG", "RUNTIME", "DATA")}
    places = {**os.environ, **own, "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
              "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "IPYTHONDIR": str(folder / "ipython")}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=places, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        _wait_for(f"http://127.0.0.1:{port}/api?token={TOKEN}", server, folder / "server.log")
        yield f"http://127.0.0.1:{port}/lab/tree/{notebook.name}?token={TOKEN}&reset"
    finally:
        server.terminate()
        server.wait(timeout=30)


@contextmanager
def page(errors: list[str]) -> Iterator[Page]:
    """A page of a headless Chromium; what goes wrong in it is added to `errors`."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        shown = browser.new_page(viewport={"width": 1400, "height": 1000})
        shown.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        shown.on("pageerror", lambda error: errors.append(str(error)))
        try:
            yield shown
        finally:
            browser.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(address: str, server: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start: {log.read_text()[-2000:]}")
