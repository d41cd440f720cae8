import pytest

from extproc.errors import ConfigError
from extproc.scrape import engines


def test_selector_forms_are_read():
    """name, name{label=value} and name[label] are read; quotes and spaces do not matter."""
    plain, filtered, labelled = engines.series("a:b", 'c{d=e, f="g"}', "h[i]")
    assert (plain.name, plain.where, plain.label) == (b"a:b", (), b"")
    assert (filtered.name, filtered.where) == (b"c", ((b"d", b"e"), (b"f", b"g")))
    assert (labelled.name, labelled.label) == (b"h", b"i")


@pytest.mark.parametrize("form", ["", "1a", "a{b}", "a{b=c", "a b", "a{b=c}{d=e}", "a[0]"])
def test_other_selectors_are_refused(form):
    """A form that is none of the three is a configuration error."""
    with pytest.raises(ConfigError, match="metric series: expected name"):
        engines.series(form)
