import pytest

from extproc.cli import main
from extproc.scheduling import catalogue, defaults

CONFIG = """
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
pool:
  name: llama
  endpoints:
    - 10.0.0.1:8000
    - {address: "[fd00::1]:8000", name: b, labels: {zone: east}}
    - engine.example:8000
scheduling:
  fallbacks: 2
  profile:
    filters: [{kind: max-waiting, params: {max_waiting_requests: 7}}]
    scorers: [{kind: queue-depth, weight: 2}, {kind: prefix-cache, weight: 3}]
    picker: {kind: weighted-random}
"""


def test_check_tells_what_a_file_means(tmp_path, capsys):
    """Endpoints, the resolved profile with weights, signals, limits and ports are told."""
    path = tmp_path / "pool.yaml"
    path.write_text(CONFIG)
    assert main.main(["check", str(path)]) == 0
    told = capsys.readouterr().out
    for fact in (
        "pool.yaml is in order",
        "ext_proc on 9002 (self-signed)",
        "3 listed of pool llama",
        "[fd00::1]:8000  b  zone=east",
        "engine.example:8000  (every address of this name)",
        "profile     custom",
        "max-waiting (max_waiting_requests=7.0), reads waiting",
        "queue-depth (min_span_requests=1.0), reads waiting, weight 2",
        "prefix-cache, reads prefix, weight 3",
        "picker    weighted-random",
        "2 further endpoints",
        "signals     prefix, waiting",
        "models      asked for every 30 s; one nobody lists goes to all",
        "model_adapter names are read as adapters",
        "bodies 32 MiB",
    ):
        assert fact in told
    assert "warning" not in told


def test_check_takes_the_flags_of_serve(capsys):
    """The arguments of a Deployment can be checked as they stand."""
    words = ["--endpoints", "10.0.0.1:8000", "--strategy=round-robin", "--secure-serving=false"]
    assert main.main(["check", *words, "--zap-devel", "--conformance-testing"]) == 0
    told = capsys.readouterr().out
    assert "profile     round-robin" in told
    assert "without TLS" in told
    assert "warning: --zap-devel has no effect" in told
    assert "warning: conformance is on" in told


def test_check_warns_of_no_endpoints(capsys):
    """The defaults are in order, and of no use alone."""
    assert main.main(["check"]) == 0
    assert "warning: there are no endpoints" in capsys.readouterr().out


def test_check_without_scraping(capsys):
    """A configuration that scrapes nothing says so."""
    text = (
        "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, "
        "scheduling: {strategy: random}, limits: {max_message_bytes: 1000}}"
    )
    assert main.main(["check", "--config-text", text]) == 0
    told = capsys.readouterr().out
    assert "scrape      off" in told
    assert "models      not asked for: every endpoint counts as serving every model" in told
    assert "messages 1000 bytes" in told
    assert "signals     none" in told


def test_check_tells_of_unknown_models(capsys):
    """What becomes of a model nobody lists is told, and how names are read."""
    text = (
        "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {models_interval_s: 5}, "
        "scheduling: {unknown_model: reject, kubeai_names: false}}"
    )
    assert main.main(["check", "--config-text", text]) == 0
    told = capsys.readouterr().out
    assert "asked for every 5 s; one nobody lists is refused with 404" in told
    assert "model_adapter" not in told


def test_check_reads_the_endpoints_file(tmp_path, capsys):
    """An endpoints file is read and its endpoints told."""
    path = tmp_path / "endpoints.yaml"
    path.write_text("endpoints: [{host: 10.0.0.7, port: 8000, name: seven}]")
    assert main.main(["check", "--endpoints-file", str(path)]) == 0
    told = capsys.readouterr().out
    assert f"1 in {path}, watched" in told
    assert "10.0.0.7:8000  seven" in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("endpoints: [{host: 10.0.0.7}]", "port"),
        ("endpoint: []", "did you mean `endpoints`?"),
        ("[", "YAML or JSON"),
    ],
)
def test_check_refuses_a_broken_endpoints_file(text, said, tmp_path, capsys):
    """A broken endpoints file is status 2, with the place."""
    path = tmp_path / "endpoints.yaml"
    path.write_text(text)
    assert main.main(["check", "--endpoints-file", str(path)]) == 2
    told = capsys.readouterr().err
    assert str(path) in told
    assert said in told


@pytest.mark.parametrize(
    "text", ["nonsense", CONFIG + "limit: {}", CONFIG.replace("queue-depth", "queue-dept")]
)
def test_check_refuses_a_broken_file(text, tmp_path, capsys):
    """A broken configuration is status 2, one line, with the file's name."""
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    assert main.main(["check", str(path)]) == 2
    told = capsys.readouterr()
    assert str(path) in told.err
    assert told.err.count("\n") == 1
    assert not told.out


def test_check_file_is_named_once(capsys):
    """The file stands in one place."""
    assert main.main(["check", "a", "--config-file", "b"]) == 2
    assert "name it once" in capsys.readouterr().err


def test_plugins_are_listed(capsys):
    """Every strategy and plugin kind is listed."""
    assert main.main(["check", "--plugins"]) == 0
    words = capsys.readouterr().out.split()
    kinds = {*catalogue.FILTERS, *catalogue.SCORERS, *catalogue.COSTS, *catalogue.PICKERS}
    for name in (*defaults.profiles(), *kinds):
        assert any(word.strip(",") == name for word in words)


HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\npool: {endpoints: ['10.0.0.1:8000']}\n"


def diffed(tmp_path, old, new, *flags):
    paths = [tmp_path / "old.yaml", tmp_path / "new.yaml"]
    for path, text in zip(paths, (old, new), strict=True):
        path.write_text(HEAD + text)
    return main.main(["check", str(paths[1]), "--diff", str(paths[0]), *flags])


def test_diff_says_what_is_live_and_what_needs_a_restart(tmp_path, capsys):
    """Every field that differs is told with both values and when it takes effect."""
    old = "log: {level: info}\nserver: {grpc_port: 9002}\n"
    new = "log: {level: debug}\nserver: {grpc_port: 9009}\nscheduling: {strategy: random}\n"
    assert diffed(tmp_path, old, new) == 0
    told = capsys.readouterr().out.splitlines()
    at = told.index(f"compared with {tmp_path}/old.yaml, as if that was running")
    assert told[at + 1 :] == [
        "  needs a restart  server.grpc_port     9002 -> 9009",
        '  live             scheduling.strategy  "adaptive" -> "random"',
        '  live             log.level            "info" -> "debug"',
        "2 fields in force once the file is read again, 1 field after a restart",
    ]


def test_diff_of_equal_files_says_so(tmp_path, capsys):
    """Also where flags make them equal, which beat both files."""
    assert diffed(tmp_path, "seed: 1\n", "seed: 1\n") == 0
    assert "nothing differs" in capsys.readouterr().out
    ports = ("server: {grpc_port: 1}\n", "server: {grpc_port: 2}\n")
    assert diffed(tmp_path, *ports, "--grpc-port", "3") == 0
    assert "nothing differs" in capsys.readouterr().out


def test_diff_says_what_a_reload_would_refuse(tmp_path, capsys):
    """A rule that needs what only a restart switches on cannot be read again before it."""
    old = "scrape: {enabled: false}\nscheduling: {strategy: random}\n"
    new = "scheduling: {profile: {scorers: [{kind: queue-depth, weight: 1}]}}\n"
    assert diffed(tmp_path, old, new) == 1
    told = capsys.readouterr().out
    assert "needs a restart  scrape.enabled" in told
    assert "refused until the restart, if it is read again: " in told
    assert "waiting" in told


def test_diff_reads_the_other_file_as_strictly(tmp_path, capsys):
    """A mistake in it is told as one of the file itself."""
    assert diffed(tmp_path, "nonsense: 1\n", "seed: 1\n") == 2
    assert "old.yaml" in capsys.readouterr().err
