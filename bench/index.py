"""Measures bytes per block of the prefix index while blocks come and go (bar: 100 bytes).

    python -m bench.index [--blocks 1000000] [--endpoints 8] [--write]

Indexes of so many blocks are filled, and then everything in them is replaced once more. All chains
share 32 blocks; the rest is their own: 24 blocks, as a prompt of 24 KiB has, and 4, as one of a few
sentences behind a system prompt. Each index lives in a process of its own, and bytes are what that
process grew by.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from time import perf_counter_ns

from bench import rig
from extproc.prefix_cache.index import PrefixIndex

SHARED = 32
OWN = (24, 4)


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def churn(blocks: int, endpoints: int, own: int) -> dict[str, object]:
    """Fill an index, replace all of it, and look at the process."""
    rng = Random(1)
    index = PrefixIndex(blocks // endpoints)
    keys = [(f"10.0.0.{number}:8000", 0) for number in range(endpoints)]
    shared = [rng.getrandbits(60) for _ in range(SHARED)]
    gc.collect()
    before = resident_bytes()
    took = []
    for _ in range(2 * blocks // own):
        chain = shared + [rng.getrandbits(60) for _ in range(own)]
        began = perf_counter_ns()
        index.record(rng.choice(keys), chain)
        took.append((perf_counter_ns() - began) // 100)
    held = index.blocks_total
    # Most of these are small numbers that exist once; the list itself is not the index's.
    grown = resident_bytes() - before - sys.getsizeof(took)
    took.sort()
    return {
        "own_blocks": own,
        "held": held,
        "bytes_per_block": round(grown / held, 1),
        "estimated_bytes_per_block": round(index.bytes_estimate() / held, 1),
        "record_us_p50": took[len(took) // 2] / 10,
    }


def apart(args: argparse.Namespace, own: int) -> dict[str, object]:
    """`churn` in a process of its own, which nothing was freed in before."""
    words = (f"--blocks={args.blocks}", f"--endpoints={args.endpoints}", f"--own={own}")
    done = subprocess.run(
        [sys.executable, "-m", "bench.index", *words],
        cwd=rig.ROOT,
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--endpoints", type=int, default=8)
    parser.add_argument("--own", type=int, help="only chains with so many blocks of their own")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    if args.own is not None:
        print(json.dumps(churn(args.blocks, args.endpoints, args.own)))
        return
    runs = [apart(args, own) for own in OWN]
    for run in runs:
        print(json.dumps(run))
    if args.write:
        rig.write("index", "python -m bench.index --write", {"churn": runs})


if __name__ == "__main__":
    main()
