"""A checksum inside the file that it covers; its own bytes count as blank."""

import hashlib

from pt2e_quant.core.errors import ArtifactError

_MARK = b"pt2e_quant.sha256:"
_DIGITS = 64

BLANK = (_MARK + b"0" * _DIGITS).decode("ascii")
"""The placeholder that a file's writer puts where the checksum goes."""


def write_sum(data: bytes) -> bytes:
    """The bytes of a file with its checksum in place of `BLANK`, which they hold once."""
    before, blank, after = data.partition(BLANK.encode("ascii"))
    if not blank or _MARK in after:
        raise ValueError("the file has no one place for its checksum")
    return b"".join((before, _MARK, _digest(before, after), after))


def renew_sum(data: bytes) -> bytes:
    """The bytes of a file whose other parts have changed, with a checksum that fits again."""
    before, mark, rest = data.partition(_MARK)
    after = rest[_DIGITS:]
    return b"".join((before, mark, _digest(before, after), after))


def has_sum(data: bytes) -> bool:
    """True if a file has a place for a checksum."""
    return _MARK in data


def check_sum(data: bytes, path: object) -> None:
    """Refuse a file that is not what was written, before anything in it is read.

    Raises:
        ArtifactError: it holds no checksum, or another one.
    """
    before, _, rest = data.partition(_MARK)
    if rest[:_DIGITS] != _digest(before, rest[_DIGITS:]):
        raise ArtifactError(
            f'"{path}" is damaged: its checksum does not match',
            fix="copy it again, or lower the model again",
        )


def _digest(before: bytes, after: bytes) -> bytes:
    found = hashlib.sha256(before)
    found.update(BLANK.encode("ascii"))
    found.update(after)
    return found.hexdigest().encode("ascii")
