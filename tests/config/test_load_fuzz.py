import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.config import factory, loader
from extproc.errors import ConfigError
from tests.support.seeded import examples

KEYS = st.sampled_from(
    [
        "apiVersion",
        "kind",
        "server",
        "pool",
        "scrape",
        "scheduling",
        "prefix",
        "limits",
        "endpoints",
        "address",
        "labels",
        "profile",
        "scorers",
        "filters",
        "picker",
        "params",
        "weight",
        "schedule",
        "grpc_port",
        "path",
        "seed",
        "level",
        "format",
        "requests",
        "log",
        "wrong",
    ]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70000)
    | st.floats()
    | st.sampled_from(["default", "10.0.0.1:8000", "queue-depth", "ExtProcConfig", ""])
)
TREES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=12,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(KEYS, TREES, max_size=5))
def test_any_tree_is_settings_or_a_config_error(tree):
    """Whatever a file holds, it is a configuration or a declared error."""
    head = {"apiVersion": "extproc/v1alpha1", "kind": "ExtProcConfig"}
    with contextlib.suppress(ConfigError):
        factory.build(loader.settings(loader.ConfigDocument("f", {**tree, **head})))


@settings(max_examples=examples(100), deadline=None)
@given(st.text(alphabet="{}[]:-,&*!|>'\"%@`# \n\tab1.", max_size=40))
def test_any_text_is_a_tree_or_a_config_error(text):
    """Whatever the text is, reading it gives a mapping or a declared error."""
    with contextlib.suppress(ConfigError):
        loader.parse(text, where="f")
