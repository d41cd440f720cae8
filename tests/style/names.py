"""Names and docstrings that a check can hold: `python -m tests.style.names`.

`make check` runs it. It prints a line for each name that is not allowed, and fails if there is any.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]

#: Folders that are checked. Class names are unique among all of them.
FOLDERS: Final = ("extproc", "bench", "tests")

#: Words that name nothing: as an identifier they hide what a value is.
BANNED: Final = frozenset(
    [
        "told",
        "said",
        "asked",
        "given",
        "made",
        "found",
        "kept",
        "meant",
        "seen",
        "one",
        "each",
        "who",
        "whom",
        "whoever",
        "nobody",
        "somebody",
        "whole",
        "of",
    ]
)

#: Words that begin a question. A docstring begins with its subject or its verb.
QUESTIONS: Final = frozenset(
    ["who", "whom", "whose", "what", "which", "where", "whether", "why", "how"]
)

#: Other names that imports may give: conventions of their libraries, and packages called `v3`.
CONVENTIONS: Final = frozenset({"dt", "mpl", "np", "pb", "plt"})


def sources(root: Path) -> Iterator[Path]:
    """Files of the package, without generated ones."""
    return (path for path in sorted(root.rglob("*.py")) if "pb" not in path.parts)


def check(texts: Sequence[tuple[str, str]]) -> list[str]:
    """Find names that are not allowed.

    Args:
        texts: Path relative to the repository, and text, of each module.

    Returns:
        A line for each, as `path:line: reason`.
    """
    problems: list[str] = []
    classes: dict[str, list[str]] = defaultdict(list)
    for path, text in texts:
        nodes = list(ast.walk(ast.parse(text)))
        foreign = _foreign_names(nodes)
        for node in nodes:
            location = f"{path}:{getattr(node, 'lineno', 1)}"
            problems += [
                f"{location}: `{name}` does not say what it names"
                for name in _identifiers(node)
                if name.strip("_").lower() in BANNED and name not in foreign
            ]
            problems += [f"{location}: {problem}" for problem in _docstring(node)]
            problems += [f"{location}: {problem}" for problem in _imports(node)]
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(location)
    return problems + [
        f"{place}: there are {len(places)} classes `{name}`; add what tells them apart"
        for name, places in classes.items()
        if len(places) > 1
        for place in places
    ]


def _identifiers(node: ast.AST) -> list[str]:
    """Names that a node binds or uses."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.keyword(arg=str(name)):
            return [name]
        case ast.alias(name=name, asname=asname):
            return [asname or name.rpartition(".")[2]]
    return []


def _foreign_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that other projects gave, such as `given` of hypothesis."""
    foreign: set[str] = set()
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(FOLDERS):
            foreign.update(alias.name for alias in node.names if not alias.asname)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names if not alias.name.startswith(FOLDERS))
    for node in nodes:
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                foreign.add(name)
    return foreign


def _docstring(node: ast.AST) -> Iterator[str]:
    if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return
    text = ast.get_docstring(node) or ""
    first = text.split(maxsplit=1)[0].strip(",.:`") if text else ""
    if first.lower() in QUESTIONS:
        yield f"docstring begins with `{first}`; begin with the subject or the verb"


def _imports(node: ast.AST) -> Iterator[str]:
    """Modules and names of this repository that an import calls otherwise."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        return
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        other = alias.asname
        if other in {None, alias.name} or other in CONVENTIONS:
            continue
        if f"{module}.{alias.name}".lstrip(".").startswith(FOLDERS):
            yield f"`{alias.name}` is imported as `{other}`; rename it where it is defined"


def main() -> int:
    """Print what is wrong in `FOLDERS`; the exit status."""
    paths = [path for folder in FOLDERS for path in sources(ROOT / folder)]
    problems = check([(str(path.relative_to(ROOT)), path.read_text()) for path in paths])
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
