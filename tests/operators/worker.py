"""A process that runs samples of operators: one that dies does not end the test."""

from typing import Any

from tests.fuzz.processes import serve
from tests.fuzz.worker import remember_operators
from tests.operators.trial import run_operator


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Run the samples of an operator on a backend."""
    return {"outcomes": run_operator(request["name"], request["backend"], request["count"])}


if __name__ == "__main__":
    remember_operators()
    serve(handle)
