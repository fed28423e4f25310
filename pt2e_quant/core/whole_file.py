"""Write a file as a whole: a reader never sees a part of it."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A stream to a temporary file beside `path`, which takes its place when all is written.

    Raises:
        OSError: the folder cannot be written; what was at `path` is as it was.
    """
    # Opened by name and not by tempfile, whose files only their owner can read.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
