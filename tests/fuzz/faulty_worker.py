"""A process that dies or hangs when asked to."""

import os
import time
from typing import Any

from tests.fuzz.processes import serve


def handle(request: dict[str, Any]) -> dict[str, Any]:
    if request["do"] == "abort":
        os.abort()
    if request["do"] == "hang":
        time.sleep(600)
    if request["do"] == "wait":
        time.sleep(1.5)
    return {"done": request["do"]}


if __name__ == "__main__":
    serve(handle)
