"""The Dockerfile, read as far as the tests need it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "manifests/Dockerfile"
IGNORED = ROOT / "manifests/Dockerfile.dockerignore"


class Instruction(msgspec.Struct, frozen=True):
    """One instruction, continuation lines joined."""

    word: str
    rest: str

    @property
    def words(self) -> Sequence[str]:
        """Its arguments, of the JSON form too."""
        if self.rest.startswith("["):
            result: list[str] = json.loads(self.rest)
            return result
        return self.rest.split()


def instructions() -> Sequence[Instruction]:
    """All of the file, in order."""
    lines = [
        line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    split = (item.split(None, 1) for item in joined.splitlines() if item.strip())
    return [Instruction(word.upper(), " ".join(rest.split())) for word, rest in split]


def last(word: str) -> Instruction:
    """The instruction of this kind that counts."""
    return [instruction for instruction in instructions() if instruction.word == word][-1]


def sources() -> Sequence[str]:
    """Files that are copied from the repository."""
    return [
        source
        for instruction in instructions()
        if instruction.word == "COPY" and not instruction.rest.startswith("--from")
        for source in instruction.words[:-1]
    ]


def context(folder: Path) -> Path:
    """A build context with what the Dockerfile copies, and itself."""
    for name in sources():
        if (ROOT / name).is_dir():
            leave = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=leave)
        else:
            shutil.copy(ROOT / name, folder / name)
    shutil.copy(DOCKERFILE, folder / "Dockerfile")
    return folder
