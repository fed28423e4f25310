"""The generated parts of pages are those of the tables and results that they are made from."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pages_when_generated_then_up_to_date():
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run python docs/generate.py: {done.stdout}{done.stderr[-2000:]}"
