"""Try products in a child process, which may hang or crash in place of this one."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from pt2e_quant.kernels.product_trial.product import Product

_LOOP = "from pt2e_quant.kernels.product_trial.run_here import {0}; {0}()"
COMMAND = (sys.executable, "-c", _LOOP.format("serve"))
"""The child's command: products on its standard input, reports on its standard output."""
TIME_COMMAND = (sys.executable, "-c", _LOOP.format("serve_times"))
"""The child's command to time products: it reports `Times.text`."""

_START_S = 180.0
"""Importing torch takes seconds, on a busy machine many."""
_EACH_S = 20.0
"""A product and its reference take milliseconds, the largest a second or two."""


class TrialError(Exception):
    """The child could not start, so that nothing is known of any product."""


@dataclass(slots=True)
class _Progress:
    """The progress of one child process.

    Args:
        done: reasons by place in its list.
        at: the place of the product that it was trying when it ended, None between two.
        ending: how it ended, "" where it did as asked.
    """

    done: dict[int, str]
    at: int | None
    ending: str


def run_in_child(
    products: Sequence[Product],
    *,
    command: Sequence[str] = COMMAND,
    start_s: float = _START_S,
    each_s: float = _EACH_S,
) -> Mapping[Product, str]:
    """The fault of each product, "" for none.

    One child tries them all. Where it ends or takes too long, the product that it was trying is at
    fault, and another child tries the rest.

    Args:
        products: what to try.
        command: of the child.
        start_s: how long it may take until the first product.
        each_s: how long each product may take.

    Raises:
        TrialError: the child reports nothing.
    """
    found: dict[Product, str] = {}
    left = list(products)
    while left:
        progress = _run(left, command, start_s, each_s)
        found |= {left[index]: reason for index, reason in progress.done.items()}
        if progress.at is not None:
            found[left[progress.at]] = f"oneDNN {progress.ending}"
        elif not progress.done:
            raise TrialError(f"the process that tries them {progress.ending or 'says nothing'}")
        left = [product for product in left if product not in found]
    return found


def _run(
    products: Sequence[Product], command: Sequence[str], start_s: float, each_s: float
) -> _Progress:
    # The child finds this package where this process has it, also in a checkout.
    package = find_spec("pt2e_quant")
    found = [] if package is None or package.origin is None else [Path(package.origin).parents[1]]
    paths = [*map(str, found), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    except OSError as error:
        return _Progress({}, None, f"does not start ({error})")
    assert child.stdin is not None
    assert child.stdout is not None
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
    threading.Thread(target=_write, args=(child.stdin, products), daemon=True).start()
    try:
        return _follow(child, lines, start_s, each_s)
    finally:
        child.kill()
        child.wait()


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _write(stream: IO[str], products: Sequence[Product]) -> None:
    try:
        with stream:
            stream.writelines(f"{product.key}\n" for product in products)
    except OSError:
        return  # the child has ended, which `_follow` sees


def _follow(
    child: subprocess.Popen[str], lines: queue.Queue[str | None], start_s: float, each_s: float
) -> _Progress:
    progress, wait_s = _Progress({}, None, ""), start_s
    while True:
        try:
            line = lines.get(timeout=wait_s)
        except queue.Empty:
            progress.ending = f"takes more than {wait_s:.0f} s here"
            return progress
        if line is None:
            code = child.wait()
            progress.ending = f"ends the process here (code {code})"
            return progress
        report = json.loads(line)
        wait_s = each_s
        if "start" in report:
            progress.at = report["start"]
        else:
            progress.done[report["end"]] = report["reason"]
            progress.at = None
