"""A process that draws models and runs them."""

from dataclasses import asdict
from typing import Any

from tests.fuzz.processes import Answerer, serve
from tests.fuzz.trial import run_trial

LOADER = Answerer("tests.fuzz.loader", retire_after=60)


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Run the file `source`."""
    return asdict(run_trial(request["source"], LOADER))


if __name__ == "__main__":
    serve(handle)
