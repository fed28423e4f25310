"""Verdicts on this machine's integer products, kept in a file of the user's cache folder."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from pt2e_quant.core.whole_file import whole_file
from pt2e_quant.kernels.onednn.speed import cpu_slug
from pt2e_quant.kernels.product_trial.product import Product
from pt2e_quant.kernels.product_trial.run_in_child import (
    COMMAND,
    TIME_COMMAND,
    TrialError,
    run_in_child,
)
from pt2e_quant.kernels.product_trial.time_product import Times, read_times

CACHE_VARIABLE = "PT2E_QUANT_CACHE"
"""Environment variable: the folder to keep verdicts in, instead of the user's cache folder."""
TRIALS_VARIABLE = "PT2E_QUANT_TRIALS"
"""Environment variable: "0" lowers products untried, and untimed."""
_TIMED = "time "
"""The prefix of the keys under which times of products are kept."""
_FORM = 1
"""Changes where a product is tried otherwise, so that what was found before does not count."""


def are_tried() -> bool:
    """True if the environment leaves trials on."""
    return os.environ.get(TRIALS_VARIABLE, "1") not in ("0", "off", "false")


def cache_file() -> Path:
    """Return the path of this machine's verdicts, by its CPU, torch and what oneDNN may use."""
    name = hashlib.sha256(json.dumps(_machine()).encode()).hexdigest()[:16]
    return _cache_folder() / f"onednn_products_{name}.json"


def verdicts_of(products: Iterable[Product]) -> tuple[Mapping[Product, str], str]:
    """The fault of each product on this machine, "" for none; unknown ones are tried and kept.

    Returns:
        Reasons by product, and why nothing could be tried, "" if it could.
    """
    try:
        return _known(products, COMMAND, "", is_whole=True), ""
    except TrialError as error:
        return _known(products, COMMAND, "", is_whole=False), str(error)


def times_of(products: Iterable[Product]) -> Mapping[Product, Times]:
    """Return the time of each product here; without those that could not be timed."""
    try:
        found = _known(products, TIME_COMMAND, _TIMED, is_whole=True)
    except TrialError:
        found = _known(products, TIME_COMMAND, _TIMED, is_whole=False)
    times = {product: read_times(text) for product, text in found.items()}
    return {product: time for product, time in times.items() if time is not None}


def _known(
    products: Iterable[Product], command: Sequence[str], prefix: str, *, is_whole: bool
) -> dict[Product, str]:
    """The reports on products, from the file or else from a child process, and then kept.

    Args:
        products: of which.
        command: of the child.
        prefix: of the file's keys.
        is_whole: ask for those that the file does not have; else they have "".
    """
    wanted = {prefix + product.key: product for product in products}
    known = _read(cache_file())
    unknown = [product for key, product in wanted.items() if key not in known]
    if unknown and is_whole:
        found = run_in_child(unknown, command=command)
        added = {prefix + product.key: text for product, text in found.items()}
        known |= added
        _add(added)
    return {product: known.get(key, "") for key, product in wanted.items()}


@cache
def _machine() -> list[str]:
    caps = [os.environ.get(name, "") for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")]
    cores = str(os.cpu_count())
    return [
        str(_FORM),
        torch.__version__,
        platform.machine(),
        _cpu_name(),
        cpu_slug(),
        cores,
        *caps,
    ]


def _cpu_name() -> str:
    """The model of the CPU, as Linux has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    parts = ("model name", "cpu family", "model\t", "stepping")
    return "; ".join(sorted({line for line in lines if line.startswith(parts)}))


def _cache_folder() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "pt2e_quant"


def _read(path: Path) -> dict[str, str]:
    """The contents of a file; empty if it is missing or damaged: products are tried again."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(k, str) and isinstance(v, str)}


def _add(verdicts: Mapping[str, str]) -> None:
    """Keep verdicts beside those that others have written meanwhile."""
    path = cache_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as stream:
            stream.write(json.dumps(_read(path) | dict(verdicts), indent=0).encode())
    except OSError:
        return  # nothing to keep them in: they are tried again next time
