"""The documentation site, built strictly: a broken link or anchor fails.

    python -m tests.docs.runtime [FOLDER]

Links to files outside of docs/ lead to the repository, or are text while `repo_url` is not set.
The build runs on a copy, in FOLDER/source (`build/docs/source` by default), and writes FOLDER/html:
Zensical keeps a cache in `.cache` beside its configuration and empties that folder on demand, and
in the tree `.cache` holds programs that tests need.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def stage(folder: Path) -> Path:
    """Copy the pages and their configuration; returns where."""
    source = folder / "source"
    if source.exists():
        shutil.rmtree(source)
    shutil.copytree(ROOT / "docs", source / "docs")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (source / "mkdocs.yml").write_text(text, encoding="utf-8")
    repository = re.search(r"^repo_url: *(\S+)$", text, re.MULTILINE)
    for page in (source / "docs").rglob("*.md"):
        folder = ROOT / "docs" / page.parent.relative_to(source / "docs")
        written = page.read_text(encoding="utf-8")
        page.write_text(
            replace_tree_links(written, folder, repository[1] if repository else ""),
            encoding="utf-8",
        )
    return source


def replace_tree_links(text: str, folder: Path, repository: str) -> str:
    """Point links to files outside of docs/ at the repository; without its URL they become text.

    Args:
        text: A page.
        folder: Where it stands.
        repository: URL of the repository; empty while the configuration names none.
    """

    def replace(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[2].partition("#")[0]))
        if "://" in match[2] or path.is_relative_to(ROOT / "docs"):
            return match[0]
        return (
            f"[{match[1]}]({repository}/blob/main/{path.relative_to(ROOT)})"
            if repository
            else match[1]
        )

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)\s]+)\)", replace, text)


def build(folder: Path) -> tuple[int, str]:
    """Build the site of the tree; returns the exit status and what was printed, without colors."""
    source = stage(folder)
    done = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict"],
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    printed = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).partition("Traceback")[0]
    if done.returncode == 0:
        html = folder / "html"
        if html.exists():
            shutil.rmtree(html)
        (source / "site").rename(html)
    return done.returncode, printed


def main() -> int:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "docs").resolve()
    status, printed = build(folder)
    print(printed.strip())
    if status == 0:
        print(f"built {folder / 'html' / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
