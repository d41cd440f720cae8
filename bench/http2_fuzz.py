"""Sends damaged frames to the HTTP/2 core until it breaks a rule, or for so many frames.

python -m bench.http2_fuzz [--frames 1000000] [--seed 1]

Every exception that is not part of the protocol, every answer that a client could not understand, and
memory beyond the limits ends the search with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from tests.support import http2_fuzzing

#: Frames for one seed: what must be run again to repeat a failure.
SEED_FRAMES = 20_000


def main() -> int:
    """Search; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames to send")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    began, sent, seed = time.monotonic(), 0, options.seed
    while sent < options.frames:
        try:
            sent += http2_fuzzing.fuzz(random.Random(seed), SEED_FRAMES, counts)
        except Exception:
            print(f"failed: --seed {seed} --frames {SEED_FRAMES}", flush=True)
            raise
        seed += 1
        if seed % 10 == 0:
            print(f"{sent:,} frames, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{sent:,} frames, seeds {options.seed} to {seed - 1}: no undeclared error")
    for limit, count in counts.most_common():
        print(f"{count:9,} {limit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
