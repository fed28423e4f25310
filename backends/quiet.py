"""Silence the warnings and log lines of other packages in a call or an import."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

_AT_IMPORT = ("torchao", "torch.utils._pytree")
"""Loggers that speak of extensions that do not load and of classes that torchao registers."""


@contextmanager
def without_remarks(*loggers: str) -> Iterator[None]:
    """Without Python's warnings, and without log lines below errors of these loggers.

    For a call of another package whose remarks are about its own code: a user can change nothing.
    """
    levels = {name: logging.getLogger(name).level for name in loggers}
    with ExitStack() as restore:
        restore.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for name, level in levels.items():
            restore.callback(logging.getLogger(name).setLevel, level)
            logging.getLogger(name).setLevel(logging.ERROR)
        yield


def quiet_imports() -> AbstractContextManager[None]:
    """Around the import of a module that imports packages which print something when imported."""
    return without_remarks(*_AT_IMPORT)


@contextmanager
def without_stderr() -> Iterator[None]:
    """Without what C code of this process writes to its standard error.

    For short calls alone: other threads are not heard either.
    """
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
