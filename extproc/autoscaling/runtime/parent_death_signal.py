"""Starts children that die with their parent, also when the parent is killed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

#: Has the kernel kill the process with its parent, then becomes the program. A program of its own,
#: because Python code between fork and exec can hang where other threads hold locks (gRPC's do).
_LEASH = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def with_parent_death_signal(argv: Sequence[str]) -> Sequence[str]:
    """Wrap a command line so that it dies with this process, on Linux only."""
    if sys.platform != "linux":
        return argv
    return (sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), *argv)
