import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from extproc.cli import main
from extproc.scheduling import registry
from extproc.server import tls
from tests.support.config_text import HEAD

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


def test_check_describes_a_file(tmp_path, capsys):
    """The report has endpoints, the resolved profile with weights, signals, limits and ports."""
    path = tmp_path / "pool.yaml"
    path.write_text(CONFIG)
    assert main.main(["check", str(path)]) == 0
    output = capsys.readouterr().out
    for fact in (
        "pool.yaml is in order",
        "ext_proc on 9002 (self-signed)",
        "3 listed of pool llama",
        "[fd00::1]:8000  b  zone=east",
        "engine.example:8000  (every address of this name)",
        "profile     custom",
        "max-waiting (max_waiting_requests=7.0), reads waiting",
        "queue-scorer (min_span_requests=1.0), reads waiting, weight 2",
        "prefix-cache-scorer (matchLengthWeight=0.0, matchLengthScaleTokens=8192), reads prefix",
        "picker    weighted-random-picker",
        "2 further endpoints",
        "signals     prefix, waiting",
        "models      listed every 30 s; one that no endpoint lists goes to all",
        "model_adapter names are read as adapters",
        "bodies 32 MiB",
    ):
        assert fact in output
    assert "warning" not in output


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_TRACES_SAMPLER", "foo"),
        ("OTEL_TRACES_SAMPLER_ARG", "7"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
    ],
)
def test_check_refuses_an_environment_of_traces_that_serve_refuses(
    variable, value, monkeypatch, capsys
):
    """The error names the variable; without a receiver no variable is read."""
    command = ["check", "--strict", "--endpoints", "127.0.0.1:8000"]
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, value)
    assert main.main(command) == 0
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert main.main(command) == 2
    assert variable in capsys.readouterr().err


def test_check_takes_the_flags_of_serve(capsys):
    """The arguments of a Deployment can be checked as they stand."""
    words = ["--endpoints", "10.0.0.1:8000", "--strategy=round-robin", "--secure-serving=false"]
    assert main.main(["check", *words, "--logtostderr", "--conformance-testing"]) == 0
    output = capsys.readouterr().out
    assert "profile     round-robin" in output
    assert "without TLS" in output
    assert "warning: --logtostderr has no effect" in output
    assert "warning: conformance is on" in output


def test_check_names_the_transport_where_it_is_not_the_default(capsys):
    """It stands beside the port that it serves."""
    assert main.main(["check", "--endpoints", "10.0.0.1:8000", "--transport", "grpcio"]) == 0
    assert "ext_proc on 9002 (self-signed, grpcio transport)" in capsys.readouterr().out


def test_check_refuses_cipher_suites_that_openssl_does_not_know(monkeypatch, capsys):
    """Unless TLS is off, or grpcio reads them."""
    words = ["check", "--endpoints", "10.0.0.1:8000"]
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")
    assert main.main(words) == 0
    monkeypatch.setenv("GRPC_SSL_CIPHER_SUITES", "none-of-these")
    assert main.main([*words, "--secure-serving=false"]) == 0
    assert main.main([*words, "--transport", "grpcio"]) == 0
    capsys.readouterr()
    assert main.main(words) == 2
    assert "correct it, or unset it" in capsys.readouterr().err


def test_a_clean_file_of_upstream_passes_with_its_pool(tmp_path, capsys):
    """The command of the guide names the pool, which the file cannot contain."""
    path = tmp_path / "epp-config.yaml"
    path.write_text(
        "{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig, plugins: [{type: queue-scorer}],"
        " schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]}"
    )
    page = (Path(__file__).parents[2] / "docs/getting-started/from-llm-d.md").read_text()
    (words,) = re.findall("`extproc (check epp-config.yaml .*?)`", page)
    assert main.main(words.replace(path.name, str(path)).split()) == 0
    assert "warning" not in capsys.readouterr().out


def test_check_and_serve_warn_of_an_expired_certificate(tmp_path, monkeypatch, capsys):
    """The server serves it, and clients that verify it refuse it."""
    monkeypatch.setattr(tls, "_VALID_DAYS", -0.5)
    for name, data in zip(("tls.key", "tls.crt"), tls.self_signed_pair(), strict=True):
        (tmp_path / name).write_bytes(data)
    words = ["check", "--endpoints", "10.0.0.1:1", "--cert-path", str(tmp_path)]
    assert main.main(words) == 0
    assert "warning: --cert-path: a certificate of tls.crt in" in capsys.readouterr().out
    broken = tmp_path / "extproc.yaml"  # so that the start ends with an error
    broken.write_text(
        "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, "
        f"server: {{admin_token_file: {tmp_path}/none}}}}"
    )
    assert main.main(["serve", "--config-file", str(broken), *words[1:]]) == 2
    assert "warning: --cert-path: a certificate of tls.crt in" in capsys.readouterr().err


def test_check_without_scraping(capsys):
    """A configuration that scrapes nothing says so."""
    text = (
        "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {enabled: false}, "
        "scheduling: {strategy: random}, limits: {max_message_bytes: 1000}}"
    )
    assert main.main(["check", "--config-text", text]) == 0
    output = capsys.readouterr().out
    assert "scrape      off" in output
    assert "models      not listed: every endpoint counts as serving every model" in output
    assert "messages 1000 bytes" in output
    assert "signals     none" in output


def test_check_describes_bodies_that_are_not_parsed(capsys):
    """No prompt is matched then."""
    text = "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, parse_bodies: false}"
    assert main.main(["check", "--config-text", text, "--endpoints", "10.0.0.1:8000"]) == 0
    output = capsys.readouterr().out
    assert "bodies      not parsed: requests are routed by headers and load" in output
    assert "prompts are matched" not in output


def test_check_describes_stages(capsys):
    """Each has the plugins of its profile, and all signals that decisions read are listed."""
    text = """apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  profile: {name: decode, filters: [{kind: decode-filter}]}
  disaggregation:
    prefill:
      profile: {filters: [{kind: prefill-filter}], scorers: [{kind: queue-depth, weight: 2}]}
      decider: {kind: always-disagg-pd-decider}
    encode: {profile: {filters: [{kind: encode-filter}], cost: {kind: estimated-time}}}
  kv_cache_source: {min_cached_token_delta: 64}
"""
    assert main.main(["check", "--config-text", text]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [line[:12].rstrip() for line in lines]
    at = starts.index("prefill")
    assert starts[at : at + 9] == [
        *("prefill", "  filter", "  scorer", "  picker"),
        *("encode", "  filter", "  cost", "  picker", "kv-cache"),
    ]
    assert "prefill-filter" in lines[at + 1]
    assert lines[at + 2].endswith("reads waiting, weight 2")
    assert lines[at + 8] == (
        "kv-cache    names an endpoint with at least 64 more cached prompt tokens, reads prefix"
    )
    (signals,) = [line for line in lines if line.startswith("signals")]
    listed = signals.removeprefix("signals").strip().split(", ")
    assert {"prefix", "waiting"} <= set(listed)
    assert main.main(["check", "--json", "--config-text", text]) == 0
    assert json.loads(capsys.readouterr().out)["signals"] == listed


def test_check_describes_unknown_models(capsys):
    """The report says where requests for unlisted models go, and how names are read."""
    text = (
        "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, scrape: {models_interval_s: 5}, "
        "scheduling: {unknown_model: reject, kubeai_names: false}}"
    )
    assert main.main(["check", "--config-text", text]) == 0
    output = capsys.readouterr().out
    assert "listed every 5 s; one that no endpoint lists is refused with 404" in output
    assert "model_adapter" not in output


@pytest.mark.parametrize(
    "text", ["nonsense", CONFIG + "limit: {}", CONFIG.replace("queue-depth", "queue-dept")]
)
def test_check_refuses_a_broken_file(text, tmp_path, capsys):
    """A broken configuration is status 2, one line, with the file's name."""
    path = tmp_path / "pool.yaml"
    path.write_text(text)
    assert main.main(["check", str(path)]) == 2
    output = capsys.readouterr()
    assert str(path) in output.err
    assert output.err.count("\n") == 1
    assert not output.out


def test_check_file_is_named_once(capsys):
    """The file stands in one place."""
    assert main.main(["check", "a", "--config-file", "b"]) == 2
    assert "name it once" in capsys.readouterr().err


def test_plugins_are_not_listed_as_json(capsys):
    """Rather than text that no program can read."""
    assert main.main(["check", "--plugins", "--json"]) == 2
    output = capsys.readouterr()
    assert "--plugins: expected no --json" in output.err
    assert not output.out


def test_plugins_are_listed(capsys):
    """Every strategy and plugin kind is listed."""
    assert main.main(["check", "--plugins"]) == 0
    words = capsys.readouterr().out.split()
    kinds = {*registry.FILTERS, *registry.SCORERS, *registry.COSTS, *registry.PICKERS}
    for name in (*registry.profiles(), *kinds):
        assert any(word.strip(",") == name for word in words)


@pytest.mark.parametrize("rules", ["strategy: nonsense", "plugin_files: [missing.py]"])
def test_check_refuses_wrong_rules_of_a_pool(tmp_path, capsys, rules):
    """The error names the file and the pool."""
    file = tmp_path / "c.yaml"
    pools = (
        "{name: a, endpoints: ['10.0.0.1:1']}, {name: b, endpoints: ['10.0.0.2:1'], scheduling: "
    )
    file.write_text(
        f"apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\npools: [{pools}{{{rules}}}}}]\n"
    )
    assert main.main(["check", str(file)]) == 2
    place = rules.partition(":")[0]
    assert f"{file}: pools[1].scheduling.{place}" in capsys.readouterr().err


def checked(text, capsys, *words):
    """Status, and standard output and error, of a check of a text."""
    status = main.main(["check", "--config-text", HEAD + text, *words])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("decisions: {decisions: 7}", "decisions.decisions  7 (default 1000)"),
        ("responses: {feedback: false}", "responses.feedback  false (default true)"),
        ("flow_control: {enabled: true}", "flow_control.enabled  true (default false)"),
        ("health: {failures: 9}", "health.failures  9 (default 3)"),
        ("log: {level: debug}", 'log.level  "debug" (default "info")'),
        ("peer_sync: {url: 'redis://:secret@h:1'}", 'peer_sync.url  (not shown) (default "")'),
        ("autoscaling: {peers: ['h:1']}", 'autoscaling.peers  ["h:1"] (default [])'),
        ("pools: [{name: a, endpoints: ['10.0.0.1:1']}]", "pools[a].endpoints"),
    ],
)
def test_check_names_every_field_that_is_changed(text, line, capsys):
    """No section of a file passes without a line."""
    status, out, err = checked(text, capsys)
    assert (status, err) == (0, "")
    assert line in re.sub(r" {2,}", "  ", out)
    assert "secret" not in out


def test_check_shows_all_errors_at_once(capsys):
    """An error does not hide the next one, and places are those of the file."""
    text = (
        "pool: {endpoints: ['http://10.0.0.1:80', '10.0.0.1', '10.0.0.2:80']}\n"
        "server: {grpc_port: '1'}\n"
        "limit: {}\n"
        "scheduling: {profile: {scorers: [{kind: a}, {kind: queue-depth, weight: x}, {kind: b}]}}"
    )
    status, out, err = checked(text, capsys)
    assert (status, out) == (2, "")
    places = [line.removeprefix("extproc: --config-text: ") for line in err.splitlines()]
    assert sorted(location.partition(":")[0] for location in places) == [
        "limit",
        "pool.endpoints[0]",
        "pool.endpoints[1]",
        "scheduling.profile.scorers[0].kind",
        "scheduling.profile.scorers[1].weight",
        "scheduling.profile.scorers[2].kind",
        "server.grpc_port",
    ]
    assert "leave out http:// and write 10.0.0.1:80" in err


@pytest.mark.parametrize("command", ["check", "serve"])
def test_missing_extras_and_files_are_refused_before_serving(
    command, tmp_path, monkeypatch, capsys
):
    """Extras and files are looked at by `check` and `serve` alike, all of them."""
    monkeypatch.setitem(sys.modules, "redis", None)
    text = HEAD + (
        f"server: {{cert_path: {tmp_path}, admin_token_file: {tmp_path}/token}}\n"
        "peer_sync: {url: 'redis://127.0.0.1:6379'}\n"
    )
    words = ["--endpoints", "10.0.0.1:1", "--config-text", text]
    assert main.main([command, *words]) == 2
    err = capsys.readouterr().err
    for fact in ("pip install 'extproc-epp[redis]'", "tls.crt and tls.key", "admin_token_file"):
        assert fact in err


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_certificate_chain_that_openssl_refuses_is_refused_before_serving(
    command, tmp_path, capsys
):
    """Also where the certificate of the server, the first one, is whole; grpcio takes it."""
    private, public = tls.self_signed_pair()
    (tmp_path / "tls.key").write_bytes(private)
    broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    (tmp_path / "tls.crt").write_bytes(public + broken)
    words = ["--endpoints", "10.0.0.1:1", "--cert-path", str(tmp_path)]
    assert main.main([command, *words]) == 2
    assert "--cert-path: expected a certificate chain and a key" in capsys.readouterr().err
    assert main.main(["check", *words, "--transport", "grpcio"]) == 0


def test_an_unreadable_address_of_a_peer_is_refused(capsys):
    """With the name of the setting, and before anything listens."""
    text = HEAD + "peer_sync: {peers: [extproc-peers]}\n"
    assert main.main(["check", "--endpoints", "10.0.0.1:1", "--config-text", text]) == 2
    assert "peer_sync.peers: expected host:port" in capsys.readouterr().err


def test_check_reports_a_port_in_use(capsys):
    """It may be free where the file is for, so it is no error."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = f"server: {{host: 127.0.0.1, metrics_port: {port}}}"
        status, out, _ = checked(text, capsys)
    assert status == 0
    assert f"note: --metrics-port: something on this machine listens on port {port}" in out


def test_check_reports_a_recording_that_cannot_be_written(tmp_path, capsys):
    """Nor is this an error: the volume may be where the file is for."""
    file = tmp_path / "gone" / "d.jsonl"
    status, out, _ = checked(f"decisions: {{record: {{file: {file}}}}}", capsys)
    assert status == 0
    assert (
        f"note: decisions.record.file: the folder {file.parent} is missing or not writable" in out
    )
    file.parent.mkdir()
    _, out, _ = checked(f"decisions: {{record: {{file: {file}}}}}", capsys)
    assert "decisions.record.file: " not in out


def test_check_prints_json(capsys):
    """Programs read the same report."""
    status, out, _ = checked("log: {level: debug}", capsys, "--json")
    report = json.loads(out)
    assert (status, report["ok"], report["errors"]) == (0, True, [])
    assert report["changed"] == [{"path": "log.level", "default": '"info"', "value": '"debug"'}]
    assert report["profile"] == "adaptive"
    status, out, _ = checked("log: {level: loud}", capsys, "--json")
    (error,) = json.loads(out)["errors"]
    assert (status, error["where"]) == (2, "--config-text: log.level")
    assert main.main(["check", "no-such-file", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0]["where"] == "no-such-file"


@pytest.mark.parametrize(
    "words",
    [
        ["--pool-name", "p", "--poolNamespace", "y"],
        ["--config-file", "epp.yaml", "--poolNamespace", "y"],
    ],
)
def test_an_unknown_flag_is_named_where_its_value_stands_for_the_file(words, capsys):
    """The value of an unknown flag looks like FILE; the error is about the flag."""
    assert main.main(["check", *words]) == 2
    error = capsys.readouterr().err
    assert "--poolNamespace: expected a flag of this command" in error
    assert "did you mean --pool-namespace?" in error
    assert "readable" not in error


@pytest.mark.parametrize("flag", ["--log_file", "-log-dir", "--vmodule"])
def test_the_value_of_a_log_flag_is_not_the_file(flag, tmp_path, capsys):
    """It belongs to its flag, beside FILE and without one."""
    file = tmp_path / "f.yaml"
    file.write_text(HEAD)
    for words in ([flag, "missing"], [str(file), flag, "missing"], [flag, "missing", str(file)]):
        assert main.main(["check", *words]) == 0
        assert f"{flag} has no effect" in capsys.readouterr().out


def test_a_file_may_follow_a_log_flag_without_a_value(tmp_path, capsys):
    """Flags of Go that are on or off take no word that follows."""
    assert main.main(["check", "--logtostderr", str(tmp_path / "missing")]) == 2
    assert "expected a readable file" in capsys.readouterr().err
