"""Sends damaged frames to the HTTP/2 core until it breaks a rule, or for so many frames.

python -m bench.http2_fuzz [--frames 1000000] [--seed 1] [--jobs 1]

Every exception that is not part of the protocol, every answer that a client could not understand, and
memory beyond the limits ends the search with the seed that repeats it.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import sys
import time
from collections import Counter

import msgspec

from tests.support import http2_fuzzing

#: Frames for one seed: what must be run again to repeat a failure.
SEED_FRAMES = 20_000


class SearchResult(msgspec.Struct):
    """Part of a search.

    Attributes:
        num_frames: Frames that were sent (count).
        counts: Limits and violations that ended streams and connections, by name.
    """

    num_frames: int
    counts: Counter[str]


def search(seed: int) -> SearchResult:
    """Run the sessions of one seed."""
    counts: Counter[str] = Counter()
    try:
        return SearchResult(http2_fuzzing.fuzz(random.Random(seed), SEED_FRAMES, counts), counts)
    except Exception:
        print(f"failed: --seed {seed} --frames {SEED_FRAMES}", flush=True)
        raise


def main() -> int:
    """Search; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=1_000_000, help="frames to send")
    parser.add_argument("--seed", type=int, default=1, help="first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    began, sent = time.monotonic(), 0
    seeds = range(options.seed, options.seed + math.ceil(options.frames / SEED_FRAMES))
    with multiprocessing.Pool(options.jobs) as pool:
        for number, result in enumerate(pool.imap_unordered(search, seeds), 1):
            sent += result.num_frames
            counts += result.counts
            if number % 10 == 0:
                print(f"{sent:,} frames, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{sent:,} frames, seeds {seeds[0]} to {seeds[-1]}: no undeclared error")
    for limit, count in counts.most_common():
        print(f"{count:9,} {limit}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
