"""Commands that the documentation shows do what it shows."""

import pytest

from tests.docs import console

PAGES = {str(path.relative_to(console.ROOT)): path.read_text() for path in console.pages()}


def shown():
    """Pages with blocks that run, slow blocks apart."""
    for name, text in PAGES.items():
        blocks = [block for block in console.blocks(text) if block.is_run]
        if any(block.note != "slow" for block in blocks):
            yield pytest.param(name, False, id=name)
        if any(block.note == "slow" for block in blocks):
            yield pytest.param(name, True, id=f"{name}, slow", marks=pytest.mark.proof)


@pytest.mark.parametrize(("name", "slow"), list(shown()))
def test_console_blocks_print_the_shown_output(name, slow, tmp_path):
    """Every command of a page prints the lines below it."""
    environment = console.prepare(tmp_path, PAGES[name])
    for block in console.blocks(PAGES[name]):
        if block.is_run and (block.note == "slow") is slow:
            for step in console.steps(block):
                printed = console.run(step, tmp_path, environment)
                assert console.is_match(step.output, printed), "\n".join([step.command, *printed])


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_in_console_blocks(name):
    """A block of commands has its label, and one that does not run says why."""
    for block in console.blocks(PAGES[name]):
        if block.language in ("", "sh", "bash", "shell", "text"):
            assert not console.has_commands(block), f"label it console: {block.text}"
        if block.language == "console":
            assert list(console.steps(block)), block.text
            assert block.is_run or len(block.note) > len("not run: "), block.text


def test_an_ellipsis_matches_any_text():
    """A line of three dots is any lines, and three dots in a line any text."""
    assert console.is_match(("a", "...", "c ... e"), ["a", "x", "y", "c d e"])
    assert console.is_match(("...",), [])
    assert not console.is_match(("a", "c"), ["a", "b", "c"])
