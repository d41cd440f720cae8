"""The `extproc explain` example of the documentation, from `docs/examples`.

    python -m tests.docs.explain_example [--write]

prints the block, or rewrites it in every page that shows it; a test compares them.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from extproc.cli import main

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "docs/guides/explain-a-decision.md")
BEGIN, END = "<!-- explain -->\n", "\n<!-- /explain -->"
WORDS = ("explain", "--state", "docs/examples/pool.yaml", "docs/examples/request.json")


def render() -> str:
    """The block with its markers: the command and what it prints."""
    words = [str(ROOT / word) if "/" in word else word for word in WORDS]
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main.main(words)
    lines = [line.rstrip() for line in output.getvalue().rstrip().splitlines()]
    text = "\n".join(["```console", f"$ extproc {' '.join(WORDS)}", *lines, "```"])
    return BEGIN + text + END


def rewrite() -> None:
    """Write the block into every page."""
    block = render()
    for path in PAGES:
        head, _, rest = path.read_text().partition(BEGIN)
        path.write_text(head + block + rest.partition(END)[2])


if __name__ == "__main__":
    if "--write" in sys.argv:
        rewrite()
    else:
        print(render())
