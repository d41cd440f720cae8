"""A picker where nothing can be written, as in a container with a read-only root file system."""

import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

#: Becomes the program after which no byte can be written to any file.
_NO_WRITES = """\
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
os.execv(sys.executable, [sys.executable, "-m", "extproc", *sys.argv[1:]])
"""

_SERVE = (
    *("serve", "--host", "127.0.0.1", "--endpoints", "127.0.0.1:9"),
    *("--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"),
    *("--drain-timeout", "0s"),
)

_READY = re.compile(r"extproc is listening: .* metrics on (\d+)")


@pytest.fixture
def empty(tmp_path):
    """The only folder a program could think of writing to."""
    return tmp_path


@pytest.fixture
def picker(empty):
    """A running picker without a home, in an empty folder."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(empty),
    }
    command = [sys.executable, "-c", _NO_WRITES, *_SERVE]
    with subprocess.Popen(
        command,
        cwd=empty,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def pages(process):
    """The port of its pages, once it is ready."""
    text = []
    for line in process.stdout:
        text.append(line)
        result = _READY.search(line)
        if result:
            return int(result[1])
    raise AssertionError("".join(text))


def test_process_serves_and_ends_on_a_read_only_file_system(picker, empty):
    """It makes its certificate, serves its pages and drains, and leaves no file behind."""
    port = pages(picker)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
        assert b"extproc_info" in answer.read()
    picker.send_signal(signal.SIGTERM)
    assert picker.wait(timeout=300) == 0
    assert list(empty.iterdir()) == []


def test_the_write_limit_applies_to_other_programs(empty):
    """The same limit stops a program that writes."""
    writing = "import pathlib; pathlib.Path('file').write_text('x')"
    program = _NO_WRITES.replace('"-m", "extproc"', f'"-c", "{writing}"')
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=empty, capture_output=True, timeout=300, check=False
    )
    assert done.returncode != 0
    assert b"File too large" in done.stderr
