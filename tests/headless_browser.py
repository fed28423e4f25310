"""Chromium without a window: opens a page, and tells what it shows and what it complains of."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium to open pages with")


@dataclass(frozen=True)
class Opened:
    """A page after its scripts have run.

    Args:
        dom: its HTML.
        complaints: lines of the console.
    """

    dom: str
    complaints: list[str]


FRAME = """<!doctype html><body><iframe src="{name}" width="{width}" height="{height}"></iframe>
<script>
onmessage = (told) => {{ document.body.dataset.found = JSON.stringify(told.data); }};
</script>
"""


def ask_page(path, folder, *, width, height, script):
    """What a script returns that runs in a page when all of it has been shown.

    The page is in a frame, whose width can be a phone's: a window of Chromium cannot.
    """
    asked = path.with_name("asked.html")
    told = f"<script>parent.postMessage((() => {{ {script} }})(), '*')</script>"
    asked.write_text(path.read_text().replace("</body>", f"{told}</body>"))
    frame = path.with_name("frame.html")
    frame.write_text(FRAME.format(name=asked.name, width=width, height=height))
    found = open_page(frame, folder, width=width + 50, height=height + 50)
    assert found.complaints == []
    return json.loads(html.unescape(re.search(r'data-found="([^"]*)"', found.dom)[1]))


def open_page(path, folder, *, width, height=2400, dark=False):
    """Open a page; the browser's clock runs ahead until all is drawn."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "--dump-dom"]
    command += ["--virtual-time-budget=60000", path.as_uri()]
    if dark:
        command.insert(1, "--blink-settings=preferredColorScheme=0")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return Opened(done.stdout, re.findall(r".*CONSOLE.*", done.stderr))
