"""Changes the code in small ways, one at a time, and shows which changes no test notices.

python -m bench.mutants [--count 200] [--seed 1] [--minutes 60] [--only routing/] [--write]

A mutant is one change inside one function of the hot rooms: a comparison, an operator, a constant, an
argument that is left out, a statement that is dropped. First the tests run once, and each function is
noted with the tests that call it. Then a process is forked for each mutant; it puts the changed code
into the live functions and runs those tests, the nearest and fastest first, until one fails. A survivor
is a mutant that all of them pass, so that either a test is missing or the change means nothing.

Fixed parts of modules, classes and signatures are not changed.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import gc
import json
import os
import random
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from bench import rig

ROOT = rig.ROOT
ROOMS = ("protocol", "routing", "pool", "prefix_cache", "parsing", "flow_control", "wire")

#: Tests that may notice. Those of whole installations are left out: they take too long.
SUITES = (*ROOMS, "server", "telemetry", "scheduling")
_LEFT_OUT = (
    "tests/autoscaling/runtime",
    "tests/server/test_redis_peer_channel.py",
    "tests/server/test_tls.py",
)

#: CPU seconds of tests that a mutant has to survive, and seconds until it counts as hanging.
BUDGET_S = 20.0
HANGING_S = 180.0

#: Files without decisions.
_SKIPPED = ("/pb/", "__init__.py")


class Mutant(msgspec.Struct, frozen=True):
    """One change.

    Attributes:
        file: Below the project.
        function: Qualified name of the outermost function around it.
        line: Where it is.
        index: Its number among the changes of the file, in the order of `changes`.
        what: What is changed.
    """

    file: str
    function: str
    line: int
    index: int
    what: str


class CallingTests(msgspec.Struct):
    """Tests that call a function, by `file:function`, and the CPU seconds of each test."""

    tests: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}


# What is changed

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

#: A change of one node, in place.
Change = Callable[[], None]


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, Change]]:
    """Every change of a module, in a fixed order: the node, what is changed, and the change."""
    for node in ast.walk(tree):
        yield from _of_expression(node)
        yield from _of_statements(node)


def _of_expression(node: ast.AST) -> Iterator[tuple[ast.AST, str, Change]]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _COMPARISONS:
            new = _COMPARISONS[type(op)]
            yield node, f"{type(op).__name__} -> {new.__name__}", _set(node, "ops", [new()])
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATORS:
            new_op = _OPERATORS[type(op)]
            yield node, f"{type(op).__name__} -> {new_op.__name__}", _set(node, "op", new_op())
        case ast.BoolOp(op=op):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, f"-> {type(other).__name__}", _set(node, "op", other)
        case ast.UnaryOp(op=ast.Not()):
            yield node, "not left out", _set(node, "op", ast.UAdd())
        case ast.Constant(value=bool(value)):
            yield node, f"{value} -> {not value}", _set(node, "value", not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, f"{value} -> {value + 1}", _set(node, "value", value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in _NAMES:
            new_name = ast.copy_location(ast.Name(_NAMES[name], ast.Load()), node)
            yield node, f"{name} -> {_NAMES[name]}", _set(node, "func", new_name)
        case ast.Call(args=args) if len(args) > 1 and not any(
            isinstance(arg, ast.Starred) for arg in args
        ):
            yield node, "last argument left out", _set(node, "args", args[:-1])
        case ast.If(test=test) | ast.IfExp(test=test):
            negated = ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
            yield node, "condition negated", _set(node, "test", negated)


def _of_statements(node: ast.AST) -> Iterator[tuple[ast.AST, str, Change]]:
    for field in ("body", "orelse", "finalbody"):
        block = getattr(node, field, None)
        if not isinstance(block, list):
            continue
        for at, statement in enumerate(block):
            kind = _dropped(statement)
            if kind:
                yield statement, f"{kind} left out", _drop(block, at)


def _dropped(statement: ast.stmt) -> str:
    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()):
            return "call"
        case ast.AugAssign():
            return "assignment"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            return "assignment"
        case ast.Delete() | ast.Raise() | ast.Continue() | ast.Break():
            return type(statement).__name__.lower()
        case ast.Return(value=ast.expr()):
            return "return"
    return ""


def _set(node: ast.AST, field: str, value: object) -> Change:
    return lambda: setattr(node, field, value)


def _drop(block: list[ast.stmt], at: int) -> Change:
    def change() -> None:
        block[at] = ast.copy_location(ast.Pass(), block[at])

    return change


# Where it may be changed


def files(only: str) -> list[str]:
    """Files of the hot rooms, below the project."""
    paths = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in sorted((ROOT / "extproc" / room).rglob("*.py"))
    ]
    return [name for name in paths if only in name and not any(part in name for part in _SKIPPED)]


def mutants(file: str) -> Iterator[Mutant]:
    """Every mutant of a file that is inside of a function."""
    tree = ast.parse((ROOT / file).read_text())
    spans = sorted(_functions(tree), key=lambda function: function[1])
    for index, (node, what, _) in enumerate(changes(tree)):
        line = getattr(node, "lineno", 0)
        for name, first, last in spans:
            if first <= line <= last:
                yield Mutant(file, name, line, index, what)
                break


def _functions(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Outermost functions with the lines of their bodies."""
    todo: list[tuple[ast.AST, str]] = [(tree, "")]
    while todo:
        node, prefix = todo.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child.body[0].lineno, child.end_lineno or 0
            elif isinstance(child, ast.ClassDef):
                todo.append((child, f"{prefix}{child.name}."))


def put_in(mutant: Mutant) -> int:
    """Change the live functions; how many there were."""
    path = str(ROOT / mutant.file)
    tree = ast.parse(Path(path).read_text())
    _, _, change = next(
        candidate for index, candidate in enumerate(changes(tree)) if index == mutant.index
    )
    change()
    ast.fix_missing_locations(tree)
    new = _code(compile(tree, path, "exec"), mutant.function)
    count = 0
    for item in gc.get_objects():
        if isinstance(item, types.FunctionType):
            old = item.__code__
            if old.co_filename == path and old.co_qualname == mutant.function:
                match = [code for code in new if code.co_firstlineno == old.co_firstlineno]
                for code in match:
                    item.__code__ = code
                    count += 1
    return count


def _code(module: types.CodeType, function: str) -> list[types.CodeType]:
    codes, todo = [], [module]
    while todo:
        for const in todo.pop().co_consts:
            if isinstance(const, types.CodeType):
                if const.co_qualname == function:
                    codes.append(const)
                todo.append(const)
    return codes


# Tests


class _Noting:
    """A plugin that notes which functions of the hot rooms each test calls."""

    def __init__(self) -> None:
        self.calls = CallingTests()
        self._names: dict[types.CodeType, str] = {}
        self._called: set[types.CodeType] = set()
        self._hot = tuple(str(ROOT / "extproc" / room) + os.sep for room in ROOMS)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._called.clear()
        begun = time.process_time()
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.calls.seconds[item.nodeid] = round(time.process_time() - begun, 4)
            for code in self._called:
                key = self._key(code)
                if key:
                    self.calls.tests.setdefault(key, []).append(item.nodeid)

    def _trace(self, frame: types.FrameType, *_: object) -> None:
        self._called.add(frame.f_code)

    def _key(self, code: types.CodeType) -> str:
        if code not in self._names:
            file, name = code.co_filename, code.co_qualname.partition(".<locals>")[0]
            is_hot = file.startswith(self._hot)
            self._names[code] = f"{Path(file).relative_to(ROOT)}:{name}" if is_hot else ""
        return self._names[code]


def _quiet() -> None:
    """Nothing that a test says is of interest."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(null, number)


def _arguments(*tests: str) -> list[str]:
    return ["-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *tests]


def _suites() -> list[str]:
    return [*(f"--ignore={name}" for name in _LEFT_OUT), *(f"tests/{name}" for name in SUITES)]


def noted() -> CallingTests:
    """Run the tests once, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "calls.json"
        child = os.fork()
        if not child:
            _quiet()
            noting = _Noting()
            pytest.main(_arguments(*_suites()), [noting])
            file.write_bytes(msgspec.json.encode(noting.calls))
            os._exit(0)
        os.waitpid(child, 0)
        return msgspec.json.decode(file.read_bytes(), type=CallingTests)


def chosen(mutant: Mutant, calls: CallingTests) -> list[str]:
    """Tests that call the function: those of its room first, then the fastest, within the budget."""
    room = mutant.file.split("/")[1]
    tests = calls.tests.get(f"{mutant.file}:{mutant.function}", [])
    ranked = sorted(
        tests, key=lambda test: (not test.startswith(f"tests/{room}/"), calls.seconds[test])
    )
    picked, spent = [], 0.0
    for test in ranked:
        spent += calls.seconds[test]
        if picked and spent > BUDGET_S:
            break
        picked.append(test)
    return picked


def tried(mutant: Mutant, tests: list[str]) -> str:
    """Outcome of a mutant: `killed`, `hangs`, `survived` or `not put in`."""
    child = os.fork()
    if not child:
        code = 9
        with contextlib.suppress(BaseException):
            _quiet()
            os.setsid()
            signal.alarm(int(HANGING_S))
            code = int(pytest.main(_arguments("-x", *tests))) if put_in(mutant) else 7
        os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return "hangs" if os.WTERMSIG(status) == signal.SIGALRM else "killed"
    return {0: "survived", 7: "not put in"}.get(os.WEXITSTATUS(status), "killed")


def warm() -> None:
    """Import what tests import, so that no child has to."""
    keep = os.dup(1), os.dup(2)
    _quiet()
    pytest.main(["--collect-only", *_arguments(*_suites())])
    for number, saved in zip((1, 2), keep, strict=True):
        os.dup2(saved, number)
    gc.unfreeze()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.mutants")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="", help="part of the names of files")
    parser.add_argument("--calls", default="", help="keep what tests call in this file, or use it")
    parser.add_argument("--write", action="store_true", help="write bench/results/mutants.json")
    wanted = parser.parse_args()
    os.chdir(ROOT)
    calls_path = Path(wanted.calls) if wanted.calls else None
    if calls_path is not None and calls_path.is_file():
        calls = msgspec.json.decode(calls_path.read_bytes(), type=CallingTests)
    else:
        calls = noted()
        if calls_path is not None:
            calls_path.write_bytes(msgspec.json.encode(calls))
    every = [mutant for file in files(wanted.only) for mutant in mutants(file)]
    sample = random.Random(wanted.seed).sample(every, min(wanted.count, len(every)))
    warm()
    print(f"{len(every)} mutants, {len(calls.seconds)} tests; {len(sample)} are tried", flush=True)
    end = time.monotonic() + 60.0 * wanted.minutes
    results: collections.Counter[str] = collections.Counter()
    survivors: list[Mutant] = []
    for mutant in sample:
        if time.monotonic() > end:
            break
        tests = chosen(mutant, calls)
        result = tried(mutant, tests) if tests else "not called"
        results[result] += 1
        if result not in {"killed", "hangs"}:
            survivors.append(mutant)
            where = f"{mutant.file}:{mutant.line}"
            print(f"{result} ({len(tests)} tests): {where} {mutant.function}: {mutant.what}")
            print(f"    {(ROOT / mutant.file).read_text().splitlines()[mutant.line - 1].strip()}")
            sys.stdout.flush()
    print(dict(results))
    if wanted.write:
        rows = [json.loads(msgspec.json.encode(survivor)) for survivor in survivors]
        figures = {"results": dict(results), "survivors": rows}
        rig.write("mutants", "python -m bench.mutants " + " ".join(sys.argv[1:]), figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
