"""Files that commands read."""

import pytest

from tests.cli.explain_inputs import BODY, CONFIG, STATE


@pytest.fixture
def files(tmp_path):
    paths = {}
    for name, text in (("body", BODY), ("state", STATE), ("config", CONFIG)):
        path = tmp_path / name
        path.write_text(text)
        paths[name] = str(path)
    return paths
