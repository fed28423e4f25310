"""Every kernel in Triton's interpreter: the tests of `interpreted/`, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [str(path) for path in sorted((HERE / "interpreted").glob("test_*.py"))]
PARTS = 14
"""So many processes, of half a minute each: one would be the last that all others wait for."""


@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_when_run_in_the_interpreter_then_their_tests_pass(part):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *FILES[part::PARTS]],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
