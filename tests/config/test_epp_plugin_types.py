import msgspec
import pytest

from extproc.config.epp_plugin_types import TYPES
from extproc.scheduling import registry, upstream

TABLES = {
    "filter": registry.FILTERS,
    "scorer": registry.SCORERS,
    "picker": registry.PICKERS,
    "detector": registry.FILTERS,
}
EACH = [pytest.param(each, id=name) for name, each in TYPES.items()]


@pytest.mark.parametrize("each", EACH)
def test_built_types_are_in_the_catalogue(each):
    """A built type has a class of its role, and the parameters it ignores are no fields of it."""
    if not each.kind:
        assert each.status != "built"
        return
    assert each.status == "deprecated" or each.kind == each.name
    fields = msgspec.structs.fields(TABLES[each.role][each.kind])
    assert not {field.encode_name for field in fields} & set(each.parameters)


@pytest.mark.parametrize("each", EACH)
def test_what_is_not_built_is_explained(each):
    """Whoever writes a type that does nothing, or is old, is told in one sentence."""
    assert bool(each.note) == (each.status != "built")
    assert "\n" not in each.note
    assert not each.note.endswith(".")
    if each.status == "deprecated":
        ours = {**registry.FILTERS, **registry.SCORERS}
        assert each.instead in ours or TYPES[each.instead].status != "deprecated"
        assert each.note.startswith(f"{each.name} is deprecated: ")


@pytest.mark.parametrize("table", [upstream.FILTERS, upstream.SCORERS, upstream.PICKERS])
def test_every_upstream_kind_can_be_written(table):
    """A plugin under an upstream name is a type that files may name."""
    for kind in table:
        assert TYPES[kind].kind == kind
