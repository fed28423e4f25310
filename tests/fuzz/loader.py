"""A process that loads artifacts which another one saved, and runs them on given calls."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import torch

import pt2e_quant as pq
from tests.fuzz.processes import serve


def load_and_run(request: dict[str, Any]) -> dict[str, Any]:
    """Load `artifact` of `backend`, run the pickled `calls`, write their results to `results`."""
    torch.set_num_threads(1)
    stage = "load"
    try:
        artifact = pq.backends.get(request["backend"]).load(request["artifact"])
        calls = pickle.loads(Path(request["calls"]).read_bytes())
        stage = "run loaded"
        with torch.no_grad():
            results = [artifact.run(*args, **kwargs) for args, kwargs in calls]
        Path(request["results"]).write_bytes(pickle.dumps(results))
    except Exception as error:  # The answer is the error.
        text = "".join(traceback.format_exception(error, limit=-3))
        return {"stage": stage, "error": type(error).__name__, "detail": text}
    return {}


if __name__ == "__main__":
    serve(load_and_run)
