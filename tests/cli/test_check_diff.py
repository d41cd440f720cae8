from extproc.cli import main
from tests.support.config_text import HEAD


def diffed(tmp_path, old, new, *flags):
    paths = [tmp_path / "old.yaml", tmp_path / "new.yaml"]
    for path, text in zip(paths, (old, new), strict=True):
        path.write_text(HEAD + text)
    return main.main(["check", str(paths[1]), "--diff", str(paths[0]), *flags])


def test_diff_separates_live_fields_from_restart_fields(tmp_path, capsys):
    """Every field that differs is listed with both values and when it takes effect."""
    old = "log: {level: info}\nserver: {grpc_port: 9002}\n"
    new = "log: {level: debug}\nserver: {grpc_port: 9009}\nscheduling: {strategy: random}\n"
    assert diffed(tmp_path, old, new) == 0
    output = capsys.readouterr().out.splitlines()
    at = output.index(f"compared with {tmp_path}/old.yaml, as if that was running")
    assert output[at + 1 :] == [
        "  needs a restart  server.grpc_port     9002 -> 9009",
        '  live             scheduling.strategy  "adaptive" -> "random"',
        '  live             log.level            "info" -> "debug"',
        "2 fields in force once the file is read again, 1 field after a restart",
    ]


def test_diff_of_equal_files_is_empty(tmp_path, capsys):
    """Also where flags make them equal, which beat both files."""
    assert diffed(tmp_path, "seed: 1\n", "seed: 1\n") == 0
    assert "nothing differs" in capsys.readouterr().out
    ports = ("server: {grpc_port: 1}\n", "server: {grpc_port: 2}\n")
    assert diffed(tmp_path, *ports, "--grpc-port", "3") == 0
    assert "nothing differs" in capsys.readouterr().out


def test_diff_reports_what_a_reload_would_refuse(tmp_path, capsys):
    """A rule that needs what only a restart switches on cannot be read again before it."""
    old = "scrape: {enabled: false}\nscheduling: {strategy: random}\n"
    new = "scheduling: {profile: {scorers: [{kind: queue-depth, weight: 1}]}}\n"
    assert diffed(tmp_path, old, new) == 1
    output = capsys.readouterr().out
    assert "needs a restart  scrape.enabled" in output
    assert "refused until the restart, if it is read again: " in output
    assert "waiting" in output


def test_diff_judges_the_profiles_that_pools_use(tmp_path, capsys):
    """Rules of each pool count, and those of the top level only where a pool uses them."""
    text = (
        "pools: [{name: a, endpoints: ['10.0.0.1:1'], scheduling: {strategy: %s}}]\n"
        "scrape: {enabled: %s}\nscheduling: {strategy: %s}\n"
    )
    old = text % ("random", "false", "random")
    assert diffed(tmp_path, old, text % ("least-queue", "true", "random")) == 1
    assert "what is running: pools[0]: scheduling" in capsys.readouterr().out
    assert diffed(tmp_path, old, text % ("random", "true", "least-queue")) == 0
    discovering = "cluster: {discover_pools: namespace}\n"
    new = text % ("random", "true", "least-queue")
    assert diffed(tmp_path, discovering + old, discovering + new) == 1


def test_diff_validates_the_other_file(tmp_path, capsys):
    """A mistake in it is reported as one of the file itself."""
    assert diffed(tmp_path, "nonsense: 1\n", "seed: 1\n") == 2
    assert "old.yaml" in capsys.readouterr().err
