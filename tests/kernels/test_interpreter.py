"""Every kernel in Triton's interpreter: the tests of `interpreted/`, in their own process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_kernels_when_run_in_the_interpreter_then_their_tests_pass():
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", str(HERE / "interpreted")],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
