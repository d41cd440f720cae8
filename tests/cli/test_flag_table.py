import pytest

from extproc.cli import flag_values
from extproc.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("1m30s", 90),
        ("50ms", 0.05),
        ("1.5h", 5400),
        (".5s", 0.5),
        ("250us", 0.00025),
        ("30", 30),
        ("0.2", 0.2),
        ("0", 0),
    ],
)
def test_seconds(text, seconds):
    """Go durations and plain seconds are read."""
    assert flag_values.seconds("--x", text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "1x", "1m 30s", "-1s", "1s2", "inf", "nan", "1e3", "9" * 5000]
)
def test_no_duration(text):
    """Anything else is refused, with examples."""
    with pytest.raises(ConfigError) as raised:
        flag_values.seconds("--x", text)
    assert raised.value.where == "--x"
    assert "1m30s" in raised.value.fix


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("67108864", 67108864), ("64Mi", 67108864), ("64MiB", 67108864), ("4M", 4000000)],
)
def test_size(text, size):
    """Bytes, plain or with a prefix of either kind."""
    assert flag_values.size_bytes("--x", text) == size


@pytest.mark.parametrize("text", ["-1", "4MM", "x", "1.5M", "", "9" * 5000])
def test_no_size(text):
    """A negative or fractional size is refused."""
    with pytest.raises(ConfigError):
        flag_values.size_bytes("--x", text)


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("T", True), ("1", True), ("FALSE", False), ("0", False)]
)
def test_boolean(text, value):
    """The forms of Go's ParseBool are read."""
    assert flag_values.boolean("--x", text) is value


@pytest.mark.parametrize("text", ["", "yes", "tRUE", "2"])
def test_no_boolean(text):
    """Other words are not guessed at."""
    with pytest.raises(ConfigError):
        flag_values.boolean("--x", text)


def test_listed():
    """Words between commas, without blanks and empty ones."""
    assert flag_values.listed("--x", "a:1, b:2,,") == ["a:1", "b:2"]


@pytest.mark.parametrize("text", ["", "x", "1.0", "1_000", "²", "9" * 5000])
def test_no_whole_number(text):
    """Only digits make a whole number."""
    with pytest.raises(ConfigError):
        flag_values.whole_number("--x", text)
