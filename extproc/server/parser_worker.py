"""Worker process that parses large bodies: jobs on stdin, results on stdout.

A job is its length, the length of its body, itself and the body; a result is its length and itself.
Of the prompt a result has only what is hashed, and for another model name its place, which saves a
search through the body.

It ends with its input, so also with the picker, however that ends. Signals to a group of processes
are not for it: a picker that drains still needs it. A body that takes more time or memory than any may
ends it, and the picker goes on with another one.

    python -m extproc.server.parser_worker
"""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from extproc.decision import Rejection
from extproc.parsing import envelope, model_edit, surfaces
from extproc.request import HttpRequest, InferenceRequest

#: Lengths of a job and of its body; length of a result.
JOB_HEAD: Final = struct.Struct("<QQ")
RESULT_HEAD: Final = struct.Struct("<Q")

#: CPU seconds for any body, and for each MiB of it: several times what the most hostile one takes.
_CPU_S: Final = 2.0
CPU_S_PER_MIB: Final = 0.2

#: Memory for any body (bytes), and for each byte of it: twice what the most hostile one takes.
_MEMORY_BYTES: Final = 64 * 1024 * 1024
MEMORY_PER_BYTE: Final = 8


class ParseJob(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A request without its body."""

    headers: Mapping[str, str]
    truncated: bool
    subset: tuple[str, ...] | None
    max_prompt_bytes: int


def describe_job(raw: HttpRequest, *, max_prompt_bytes: int) -> ParseJob:
    """The job of parsing a request's body; arguments as of `ParseJob`."""
    return ParseJob(raw.headers, raw.truncated, raw.subset, max_prompt_bytes)


def parse_body(job: ParseJob, body: bytes) -> surfaces.ParseResult:
    """Parse a body.

    Returns:
        The request or its rejection, with the prompt cut to what is hashed of it, and the place of
        the model.
    """
    raw = HttpRequest(job.headers, body, job.truncated, job.subset)
    place = model_edit.find_place(raw)
    outcome = surfaces.parse(raw)
    if isinstance(outcome, InferenceRequest):
        return surfaces.ParseResult(_cut_prompt(outcome, job.max_prompt_bytes), None, None, place)
    supplied = surfaces.parse_supplied(raw, "supplied") if outcome == envelope.NO_MODEL else None
    if supplied is None or isinstance(supplied, Rejection):
        return surfaces.ParseResult(None, outcome, None, place)
    return surfaces.ParseResult(None, outcome, _cut_prompt(supplied, job.max_prompt_bytes), place)


def _cut_prompt(request: InferenceRequest, max_prompt_bytes: int) -> InferenceRequest:
    """Cut the prompt where hashing ends, unless a conversation starts after that."""
    if len(request.prompt) <= max_prompt_bytes:
        return request
    cut = msgspec.structs.replace(request, prompt=request.prompt[:max_prompt_bytes])
    return (
        cut if surfaces.first_user_message(cut) == surfaces.first_user_message(request) else request
    )


_DECODER = msgspec.msgpack.Decoder(ParseJob)
_encode = msgspec.msgpack.Encoder().encode


def serve(jobs: BinaryIO, results: BinaryIO) -> None:
    """Process jobs until the input ends."""
    while len(head := jobs.read(JOB_HEAD.size)) == JOB_HEAD.size:
        job_bytes, body_bytes = JOB_HEAD.unpack(head)
        job = jobs.read(job_bytes)
        limit(body_bytes)
        body = jobs.read(body_bytes)
        if len(body) < body_bytes:
            return
        result = _encode(parse_body(_DECODER.decode(job), body))
        del body
        results.write(RESULT_HEAD.pack(len(result)))
        results.write(result)
        results.flush()
        del result


def limit(body_bytes: int) -> None:
    """Limit CPU time and memory of this process for a body."""
    mib = body_bytes / (1 << 20)
    signal.setitimer(signal.ITIMER_PROF, _CPU_S + CPU_S_PER_MIB * mib)
    with contextlib.suppress(OSError, ValueError):  # no such file elsewhere, or a lower hard limit
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        most = pages * resource.getpagesize() + _MEMORY_BYTES + MEMORY_PER_BYTE * body_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> None:
    """Serve standard input; an endpoint picker that ended is no error."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
