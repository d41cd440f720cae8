from __future__ import annotations

import pytest

from extproc.cli import main


@pytest.mark.parametrize("name", ["charts.jpg", "charts.pdf", "charts"])
def test_plots_have_a_known_format(tmp_path, capsys, name):
    """The name is refused before the demo, whose results an error at its end would take."""
    assert main.main(["demo-scale", "--plot", str(tmp_path / name)]) == 2
    output = capsys.readouterr()
    assert "--plot: expected a name that ends in .svg or .png" in output.err
    assert not output.out
