"""Compare with what is recorded: `python -m tests.digests.compare [PART_OF_A_KEY]…`.

Prints each key of which something changed, and what. Ends with status 1 if anything did.
"""

import argparse
import sys
from collections.abc import Iterable

from tests.digests.digest_case import Digest, digest_corpus
from tests.digests.recorded import here, read_recorded


def changed_parts(recorded: Digest, found: Digest) -> list[str]:
    """The names of the parts that differ; one that is not recorded is not compared."""
    before, after = recorded.parts(), found.parts()
    names = dict.fromkeys((*before, "refused"))
    return [name for name in names if before.get(name) != after.get(name)]


def compare(wanted: Iterable[str]) -> int:
    """Print what changed; returns the number of changed keys."""
    made_with, recorded = read_recorded()
    if made_with != here():
        print(f"recorded with {made_with}, this is {here()}: only forms are compared")
    checked, changed = 0, 0
    for part in wanted:
        found = dict(digest_corpus(part))
        gone = [key for key in recorded if part in key and key not in found]
        for key in gone:
            print(f"{key}: is recorded, and was not made")
        changed += len(gone)
        for key, digest in found.items():
            parts = changed_parts(recorded[key], digest) if key in recorded else ["not recorded"]
            if made_with != here():
                parts = [name for name in parts if name in ("form", "not recorded")]
            checked, changed = checked + 1, changed + bool(parts)
            if parts:
                print(f"{key}: {', '.join(parts)} {digest.refused}".rstrip(), flush=True)
    print(f"{changed} of {checked} digests changed")
    return changed


def main() -> None:
    """Compare, and say by the exit status whether anything changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="*", default=[""], help="only keys that hold this text")
    sys.exit(min(1, compare(parser.parse_args().wanted)))


if __name__ == "__main__":
    main()
