"""Write results as JSON."""

import json
import math
from collections.abc import Mapping
from typing import Any


def json_text(data: Mapping[str, Any]) -> str:
    """Write data as JSON; infinity and NaN, which JSON lacks, are null.

    >>> print(json_text({"sqnr_db": float("inf"), "nodes": ("a", 1.5)}))
    {
     "sqnr_db": null,
     "nodes": [
      "a",
      1.5
     ]
    }
    """
    return json.dumps(_finite(data), indent=1)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
