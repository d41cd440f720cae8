"""Console blocks of the documentation: commands that a test runs, and the output it compares.

    python -m tests.docs.console PAGE

prints the page with the output that its commands give now.

A fenced block labeled `console` has commands behind `$ `, continued after a backslash, and below
each its output. In output, a line `...` stands for any lines, and `...` in a line for any text. The
commands of a page run in one folder, which holds the tree's files; a comment in the line before a
block says what is special about it:

- `<!-- not run: REASON -->`: the block is shown only.
- `<!-- slow -->`: the block runs in `make proof`.
- `<!-- file: NAME -->`: a block of another language becomes that file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
#: Programs whose name begins a command.
_PROGRAMS = "extproc|pip|make|envoy|curl|kubectl|helm|docker|git|python3?|redis-cli"
_COMMAND = re.compile(rf"^(\$ |({_PROGRAMS}) +[\w./'-]+)", re.MULTILINE)


class ConsoleStep(msgspec.Struct, frozen=True):
    """One command with its output.

    Attributes:
        command: As it is typed, without the prompt.
        output: Lines that the page shows.
    """

    command: str
    output: tuple[str, ...]


class FencedBlock(msgspec.Struct, frozen=True):
    """One fenced block of a page.

    Attributes:
        language: Its label.
        note: The comment in the line before it; empty without one.
        text: What is inside.
        span: Offsets of `text` in the page.
    """

    language: str
    note: str
    text: str
    span: tuple[int, int]

    @property
    def is_run(self) -> bool:
        """True if its commands are run."""
        return self.language == "console" and not self.note.startswith("not run: ")

    @property
    def file(self) -> str:
        """The file it becomes; empty for none."""
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else ""


def pages() -> Iterator[Path]:
    """All pages that may show commands."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def blocks(text: str) -> Iterator[FencedBlock]:
    """The fenced blocks of a page."""
    for match in _BLOCK.finditer(text):
        yield FencedBlock(match["language"], match["note"] or "", match["text"], match.span("text"))


def has_commands(block: FencedBlock) -> bool:
    """True if a block without a label looks like a console."""
    return bool(_COMMAND.search(block.text))


def steps(block: FencedBlock) -> Iterator[ConsoleStep]:
    """The commands of a console block."""
    command: list[str] = []
    output: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if command:
                yield ConsoleStep("\n".join(command), tuple(output))
            command, output = [line[2:]], []
        elif command and not output and command[-1].endswith("\\"):
            command.append(line)
        else:
            output.append(line.rstrip())
    if command:
        yield ConsoleStep("\n".join(command), tuple(output))


def prepare(folder: Path, text: str) -> dict[str, str]:
    """Fill a folder with what the commands of a page find; returns their environment."""
    for name in ("bench", "docs", "envoy", "manifests"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / ".programs"
    programs.mkdir()
    program = programs / "extproc"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m extproc "$@"\n')
    program.chmod(0o755)
    for block in blocks(text):
        if block.file:
            (folder / block.file).write_text(block.text, encoding="utf-8")
    path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "100"}


def run(step: ConsoleStep, folder: Path, environment: dict[str, str]) -> list[str]:
    """Run a command; returns the lines it printed, those of errors only if it failed."""
    done = subprocess.run(
        ["bash", "-c", step.command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    printed = done.stdout + (done.stderr if done.returncode else "")
    return [line.rstrip() for line in printed.rstrip().splitlines()]


def is_match(expected: tuple[str, ...], printed: list[str]) -> bool:
    """True if output matches the text of a page."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*?") + r"\n"
        for line in "\n".join(expected).rstrip().splitlines()
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


def main() -> None:
    text = Path(sys.argv[1]).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = prepare(folder, text)
        for block in reversed([block for block in blocks(text) if block.is_run]):
            shown = []
            for step in steps(block):
                printed = run(step, folder, environment)
                lines = list(step.output) if is_match(step.output, printed) else printed
                shown += [f"$ {step.command}", *lines]
            text = text[: block.span[0]] + "\n".join(shown) + "\n" + text[block.span[1] :]
    print(text, end="")


if __name__ == "__main__":
    main()
