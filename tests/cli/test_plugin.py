import pytest

from extproc.cli.main import main
from extproc.config import factory, loader
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.request import HttpRequest

ROLES = ("cost", "filter", "picker", "scorer")


def template(role, capsys):
    assert main(["plugin", "template", role]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("role", ROLES)
def test_a_template_passes_the_contract(role, tmp_path, capsys):
    """The printed template is a valid plugin file of its role."""
    file = tmp_path / "mine.py"
    file.write_text(template(role, capsys))
    assert main(["plugin", "test", str(file)]) == 0
    output = capsys.readouterr().out
    assert f"{role} my-{role} is in order; " in output
    assert "us for 100 endpoints" in output


@pytest.mark.parametrize("role", ROLES)
def test_the_configuration_in_a_template_routes(role, tmp_path, capsys):
    """The lines of YAML in a template's docstring work as they stand."""
    text = template(role, capsys)
    (tmp_path / f"my_{role}.py").write_text(text)
    lines = text.split("configuration:\n", 1)[1].split("\nand hold", 1)[0]
    config = tmp_path / "extproc.yaml"
    config.write_text(f"apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n{unindented(lines)}")
    parts = factory.build(loader.settings(loader.read(config)))
    parts.store.set_endpoints([Endpoint("10.0.0.1:80")], 1.0)
    outcome = parts.director.route(HttpRequest({":method": "GET", ":path": "/v1/x"}), 2.0)
    assert isinstance(outcome, Decision)
    assert outcome.degraded == ""
    assert f"my-{role}" in {plugin.kind for plugin in parts.profile.plugins}


def test_check_lists_an_external_plugin(tmp_path, capsys):
    """The resolved profile names its kind, parameters and signals like those of a built-in."""
    (tmp_path / "my_cost.py").write_text(template("cost", capsys))
    config = tmp_path / "extproc.yaml"
    config.write_text(
        "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
        "scheduling: {plugin_files: [my_cost.py], profile: {cost: {kind: my-cost}}}\n"
    )
    assert main(["check", str(config)]) == 0
    output = capsys.readouterr().out
    assert "  cost      my-cost (slot_s=0.01), reads in_flight, prefix, queued, rates" in output


def unindented(lines):
    return "".join(f"{line.removeprefix('    ')}\n" for line in lines.splitlines())


def test_an_unknown_role_is_refused(capsys):
    """Roles are listed when the word is none of them."""
    assert main(["plugin", "template", "scorers"]) == 2
    # Python quotes them up to 3.11.
    assert "filter, picker, scorer)" in capsys.readouterr().err.replace("'", "")


def test_a_contract_violation_is_reported(tmp_path, capsys):
    """Each broken plugin is reported, the sound ones as well, and the status is 1."""
    file = tmp_path / "mine.py"
    text = template("scorer", capsys)
    file.write_text(text.replace("soft / (soft + c.estimated_requests)", "c.estimated_requests"))
    assert main(["plugin", "test", str(file)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert f"{file}: scorer my-scorer: my-scorer with 1 endpoints" in output.err
    assert "expected numbers from 0 to 1, got [" in output.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1 / 0", "mine.py:1: expected a Python file that can be imported, got ZeroDivisionError"),
        ("", "expected a class with a kind"),
    ],
)
def test_a_file_that_is_no_plugin_file(tmp_path, capsys, text, expected):
    """The status is 2 and the error the one of a configuration that names the file."""
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert main(["plugin", "test", str(file)]) == 2
    assert expected in capsys.readouterr().err


def test_duplicate_kinds_are_refused(tmp_path, capsys):
    """Files that cannot be used together are refused."""
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(template("scorer", capsys))
    assert main(["plugin", "test", str(tmp_path / "one.py"), str(tmp_path / "two.py")]) == 2
    assert "got my-scorer, which MyScorer of" in capsys.readouterr().err


def test_a_slow_plugin_is_reported(tmp_path, capsys):
    """A plugin that would be bypassed is in order, and its time is called above the budget."""
    file = tmp_path / "mine.py"
    slow = "        if len(candidates) == 100:\n            sum(range(400_000))\n        soft ="
    file.write_text(template("scorer", capsys).replace("        soft =", slow))
    assert main(["plugin", "test", str(file)]) == 0
    assert "endpoints, above the budget of 2 ms" in capsys.readouterr().out


def test_a_slow_generator_is_reported(tmp_path, capsys):
    """A filter that answers with a generator works while its answer is read, which is timed."""
    file = tmp_path / "mine.py"
    text = template("filter", capsys).replace(
        "[c for c in candidates if", "(c for c in work(candidates) if"
    )
    text = text.replace("c.load.kv_usage <= bound]", "c.load.kv_usage <= bound)")
    file.write_text(
        f"{text}\n\ndef work(candidates):\n    sum(range(400_000))\n    yield from candidates\n"
    )
    assert main(["plugin", "test", str(file)]) == 0
    assert "endpoints, above the budget of 2 ms" in capsys.readouterr().out


#: Exits at the tenth call of an instance, which the checks do not reach.
EXITING_LATE = """        self.calls.append(1)
        if len(self.calls) == 10:
            raise SystemExit
        soft ="""
CALLS = """    @functools.cached_property
    def calls(self):
        return []

    def score("""


def test_a_plugin_that_exits_is_reported(tmp_path, capsys):
    """An exit is a breach of the contract, and the plugins after it are tested."""
    text = template("scorer", capsys)
    late = text.replace("my-scorer", "late").replace("import msgspec", "import functools, msgspec")
    late = late.replace("kw_only=True", "dict=True").replace("    def score(", CALLS)
    texts = {
        "early": text.replace("        soft =", "        raise SystemExit(0)\n        soft ="),
        "late": late.replace("        soft =", EXITING_LATE),
        "sound": text.replace("my-scorer", "sound"),
    }
    files = [tmp_path / f"{name}.py" for name in texts]
    for file, content in zip(files, texts.values(), strict=True):
        file.write_text(content)
    assert main(["plugin", "test", *map(str, files)]) == 1
    output = capsys.readouterr()
    early, late = output.err.splitlines()
    assert early.endswith("some of them scraped: expected an answer, got SystemExit: 0")
    assert late.endswith("late with 100 endpoints: expected 51 answers, got SystemExit")
    assert f"{files[-1]}: scorer sound is in order; " in output.out


def test_a_missing_file_is_looked_for_in_the_working_directory(capsys):
    """No configuration file is read."""
    assert main(["plugin", "test", "no-such-plugin.py"]) == 2
    assert "it is relative to the working directory" in capsys.readouterr().err
