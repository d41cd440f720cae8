"""h2spec against the native server: RFC 9113 and RFC 7541, every case.

h2spec knows neither gRPC nor a smaller table of header fields than 4096 bytes, so the server of
these tests answers any request, and announces such a table.
"""

from __future__ import annotations

import asyncio
import re

import pytest

from extproc.http2 import request_head
from extproc.server import tls
from extproc.server.http2_protocol import ServerCall
from tests.http2 import go_tools
from tests.support import http2_serving

#: Seconds that h2spec waits for an answer: no case ends by it while the server answers.
ANSWER_S = 20

#: Streams that the server announces (count). A case opens one more than these without reading what is
#: answered: 20,000 of them take as long as all other cases together, and fill the socket buffers.
MAX_STREAMS = 1_000

#: A case of the report: section, name, and the tag of its result where it did not pass.
_CASE = re.compile(
    r'<testcase package="([^"]*)" classname="(.*)" time="[^"]*">\s*(<failure|<skipped|<error|)'
)

#: Cases that h2spec has for a server.
CASES = 140


class GreetingCall(ServerCall):
    """Answers a request with a message once it is complete."""

    def on_message(self, message: bytes) -> None:
        """Drop it."""

    def on_half_close(self) -> None:
        """Answer."""
        self.send((b"hello, h2spec" * 10,))
        self.end()

    def on_terminated(self) -> None:
        """Nothing is open."""


@pytest.fixture
def any_request(monkeypatch):
    """Serve requests that are not gRPC too: h2spec sends GET and POST without a content type."""
    monkeypatch.setattr(request_head, "_find_rejection", lambda _, **__: None)


@pytest.mark.usefixtures("any_request")
@pytest.mark.parametrize("with_tls", [False, True], ids=["plaintext", "tls"])
async def test_every_case_of_h2spec_passes(with_tls, tmp_path):
    h2spec = go_tools.need("h2spec")
    report = tmp_path / "report.xml"
    pair = tls.self_signed_pair() if with_tls else None
    async with http2_serving.serve_native(
        {"/": GreetingCall}, pair=pair, header_table_bytes=4096, max_streams=MAX_STREAMS
    ) as (_, port):
        flags = ["-h", http2_serving.LOCAL, "-p", str(port), "-o", str(ANSWER_S), "-j", str(report)]
        process = await asyncio.create_subprocess_exec(
            h2spec,
            *flags,
            *(["-t", "-k"] if with_tls else []),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
    # The report is XML whose texts are not escaped.
    cases = _CASE.findall(report.read_text())
    failed = [f"{package}: {name}" for package, name, result in cases if result]
    assert failed == [], output.decode()[-3000:]
    assert len(cases) >= CASES
