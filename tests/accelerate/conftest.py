"""The test of a patch of ExecuTorch is skipped where it is missing."""

from importlib.util import find_spec

_EXECUTORCH = ["test_share_constants.py"]
collect_ignore = [] if find_spec("executorch") else _EXECUTORCH
