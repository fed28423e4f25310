"""Record digests: `python -m tests.digests.record [PART_OF_A_KEY] [--texts FOLDER]`.

Digests with other keys stay as they are recorded. Each is written as soon as it is made.
"""

import argparse
from pathlib import Path

from tests.digests.digest_case import digest_corpus
from tests.digests.recorded import RECORDED, read_recorded, record_one


def main() -> None:
    """Write `recorded.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wanted", nargs="?", default="", help="only keys that hold this text")
    parser.add_argument("--texts", type=Path, help="a folder for the converted graphs as text")
    options = parser.parse_args()
    if options.texts:
        options.texts.mkdir(parents=True, exist_ok=True)
    before = read_recorded()[1] if RECORDED.exists() else {}
    left = {key for key in before if options.wanted in key}
    for key, digest in digest_corpus(options.wanted, options.texts):
        print(key, digest.refused, flush=True)
        record_one(key, digest)
        left.discard(key)
    for key in left:
        record_one(key, None)


if __name__ == "__main__":
    main()
