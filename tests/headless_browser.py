"""Chromium without a window: opens a page, and tells what it shows and what it complains of."""

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


def open_page(path, folder, *, width, height=2400, dark=False):
    """Open a page; the browser's clock runs ahead until all is drawn."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder}", f"--window-size={width},{height}", "--dump-dom"]
    command += ["--virtual-time-budget=60000", path.as_uri()]
    if dark:
        command.insert(1, "--blink-settings=preferredColorScheme=0")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return Opened(done.stdout, re.findall(r".*CONSOLE.*", done.stderr))
