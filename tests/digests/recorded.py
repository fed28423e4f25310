"""The file of recorded digests: what it was recorded with, and one line for each digest."""

import json
from pathlib import Path

import torch

from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.kernels.onednn.speed import cpu_slug
from tests.digests.digest_case import Digest

__all__ = ["RECORDED", "here", "read_recorded", "record_one"]

RECORDED = Path(__file__).parent / "recorded.json"


def here() -> dict[str, str]:
    """What results to the last bit depend on."""
    return {"torch": torch.__version__.split("+")[0], "cpu": cpu_slug()}


def read_recorded() -> tuple[dict[str, str], dict[str, Digest]]:
    """What the digests were recorded with, and the digests by key."""
    stored = json.loads(RECORDED.read_text())
    return stored["made_with"], {k: Digest(**parts) for k, parts in stored["digests"].items()}


def record_one(key: str, digest: Digest | None) -> None:
    """Set one line of the file, or take it out."""
    digests = read_recorded()[1] if RECORDED.exists() else {}
    digests.pop(key, None)
    digests |= {} if digest is None else {key: digest}
    lines = [f"    {json.dumps(k)}: {json.dumps(d.parts())}" for k, d in sorted(digests.items())]
    body = ",\n".join(lines)
    head = json.dumps(here())
    text = f'{{\n  "made_with": {head},\n  "digests": {{\n{body}\n  }}\n}}\n'
    with whole_file(RECORDED) as stream:
        stream.write(text.encode())
