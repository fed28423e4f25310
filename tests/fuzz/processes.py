"""Python processes that answer requests, one line of JSON each, and may die or hang.

A child's own standard output is sent to its log: runtimes print there.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Answerer", "Died", "Hung", "serve"]

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 4
"""So many times its limit a process may take in wall-clock time: others use the machine too."""


class Died(Exception):
    """The process ended while it worked on a request; the text is the end of its log."""


class Hung(Exception):
    """The process did not answer in time, and was ended."""


class Answerer:
    """A process that runs a module of `serve`; started with the first request, and after a death.

    Args:
        module: its name.
        retire_after: a fresh process after so many requests.
    """

    def __init__(self, module: str, retire_after: int = 10_000) -> None:
        self.module = module
        self.retire_after = retire_after
        self.process: subprocess.Popen[bytes] | None = None
        self.answered = 0

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            request: what to do.
            limit_s: seconds of CPU time that it may take, and PATIENCE times as many altogether.

        Raises:
            Died: the process ended.
            Hung: it took longer.
        """
        if self.process is None or self.answered >= self.retire_after:
            self.close()
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # It died between two requests: reading says so.
        line = self._read(limit_s)
        self.answered += 1
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process and what it started."""
        if self.process is None:
            return
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # It has ended by itself.
        self.process.wait()
        self.process = None
        self.log.close()

    def _start(self) -> None:
        self.log = tempfile.TemporaryFile()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
        self.answered = 0

    def _read(self, limit_s: float) -> bytes:
        assert self.process is not None
        assert self.process.stdout is not None
        most, ready = _cpu_seconds(self.process.pid) + 0.9 * limit_s, False
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            for _ in range(PATIENCE):
                # An answer is written in one piece, and is less than a pipe holds.
                ready = bool(selector.select(limit_s))
                if ready or _cpu_seconds(self.process.pid) > most:
                    break
        if not ready:
            self.close()
            raise Hung(f"no answer within {limit_s:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            code = self.process.returncode
            text = self._end_of_log()
            self.close()
            raise Died(f"exit status {code}: {text}")
        return line

    def _end_of_log(self) -> str:
        self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, self.log.tell() - 1500))
        return self.log.read().decode(errors="replace")


def _cpu_seconds(pid: int) -> float:
    """What a process has used so far; inf where the system does not say it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("inf")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests of standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        answer = json.dumps(handle(json.loads(line))).encode()
        answers.write(answer + b"\n")
        answers.flush()
