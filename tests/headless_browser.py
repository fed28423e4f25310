"""Chromium without a window: opens a page, and tells what it shows and what it complains of."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest


def starts():
    """Whether Qt's Chromium is here, with the system's libraries that it loads."""
    if importlib.util.find_spec("PySide6") is None:
        return False
    command = [sys.executable, "-c", "import PySide6.QtWebEngineWidgets"]
    return subprocess.run(command, capture_output=True).returncode == 0


needs_browser = pytest.mark.skipif(
    not starts(), reason="no Chromium to open pages with: pip install 'pt2e-quant[browser]'"
)


@dataclass(frozen=True)
class Opened:
    """A page after its scripts have run.

    Args:
        dom: its HTML.
        complaints: lines of the console.
        answer: what the script returned that it was asked.
    """

    dom: str
    complaints: list[str]
    answer: object


def open_page(path, *, width, height=2400, dark=False, script="", picture=None):
    """Open a page in a view of this size (CSS pixels), and run a script when all is drawn.

    Args:
        script: the body of a JavaScript function; what it returns is the answer.
        picture: where to write what the view shows, as a PNG.
    """
    order = dict(url=path.as_uri(), width=width, height=height, script=script)
    if picture is not None:
        order["picture"] = str(picture)
    flags = "--no-sandbox --disable-gpu"
    if dark:
        flags += " --blink-settings=preferredColorScheme=0"
    env = {**os.environ, "QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_CHROMIUM_FLAGS": flags}
    command = [sys.executable, "-m", "tests.open_in_browser", json.dumps(order)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    return Opened(**json.loads(done.stdout))
