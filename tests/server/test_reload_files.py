"""Files that are read again: what is refused, and what is remembered across a reload."""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import signal
import subprocess
import sys

import pytest

from extproc.cli import flags, serve
from extproc.config import loader
from extproc.config.settings import Settings
from extproc.decision import Decision
from extproc.errors import ConfigError
from extproc.server import admin_access, reload
from extproc.telemetry.counters import ProcessCounters
from tests.support.reloading import ADDRESSES, HEAD, PLUGIN, ReloadingScene, read

pytestmark = pytest.mark.usefixtures("level")


#: A picker whose configuration is read without end.
HANGING = """
import threading
from extproc.config import loader
from extproc.server import lifecycle, reload
text = '''%s
server: {grpc_port: 0, grpc_health_port: 0, metrics_port: 0}
pool: {endpoints: ["127.0.0.1:9"]}
'''
def read():
    print("reads", flush=True)
    threading.Event().wait()
lifecycle._THREADS_END_S = 0.01
settings = loader.settings(loader.parse(text, where="text"))
lifecycle.run(settings, reload.ConfigSource(lambda _: [], read))
"""


class ReloadedFile:
    """A reloader over a file, and what it does; `on_start` is called after the first read."""

    def __init__(self, path, text, on_start=lambda: None):
        path.write_text(HEAD + text)
        self.path = path
        self.adopted, self.results = [], []
        parser = argparse.ArgumentParser()
        flags.add(parser)
        args = parser.parse_args(["--config-file", str(path)])
        stamps = serve.stamp_config_file(args)
        resolved = flags.resolve(args)
        on_start()
        self.subject = reload.Reloader(
            serve.build_source(args, resolved, stamps),
            resolved.settings,
            apply_settings=self.adopt,
            on_reload=self.results.append,
        )

    def adopt(self, settings):
        admin_access.read_token(settings.server.admin_token_file)
        self.adopted.append(settings)

    def write(self, text):
        self.path.write_text(HEAD + text)
        return self.look()

    def look(self, times=1):
        """The last result, after so many looks at the files."""
        for _ in range(times):
            asyncio.run(self.subject.step())
        return self.results[-1]


def test_restart_fields_are_not_applied(tmp_path):
    """Live fields are put in force and named; the others are named until they are as they were."""
    scene = ReloadedFile(tmp_path / "c.yaml", "log: {level: info}\n")
    result = scene.write(
        "log: {level: debug}\nserver: {grpc_port: 5}\nflow_control: {enabled: true}\n"
    )
    assert result.changed == ("log.level",)
    assert result.restart == ("server.grpc_port", "flow_control.enabled")
    (adopted,) = scene.adopted
    assert (adopted.log.level, adopted.server.grpc_port) == ("debug", 9002)
    assert not adopted.flow_control.enabled
    result = scene.write("log: {level: debug}\nserver: {grpc_port: 5}\n\n")
    assert (result.changed, result.restart) == ((), ("server.grpc_port",))
    result = scene.write("log: {level: info}\n\n\n")
    assert (result.changed, result.restart) == (("log.level",), ())


def test_live_fields_that_depend_on_a_restart_are_refused(tmp_path):
    """Nothing is put in force that does not go together with what is running; the error says so."""
    scene = ReloadedFile(tmp_path / "c.yaml", "limits: {max_assembly_bytes: 6000000000}\n")
    result = scene.write("limits: {max_assembly_bytes: 24000000000, max_body_bytes: 2000000000}\n")
    assert "max_assembly_bytes" in result.error
    assert "only a restart changes limits.max_assembly_bytes" in result.error
    assert scene.adopted == []


NONSENSE = [
    "log: {level: \0}\n",
    'x: !!int ""\n',
    'x: !!timestamp "x"\n',
    'x: !!float ""\n',
    "x: !!bool maybe\n",
    "x: 2001-99-99\n",
    "x: !!binary é\n",
    "? {a: b}\n: c\n",
    "x: *nobody\n",
    "x: &x [*x]\n",
    "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}' if n else '*a'] * 9)}]\n" for n in range(9)),
    "[" * 5000,
    "\ud800",
]


@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_no_file_ends_the_process(tmp_path, text):
    """Whatever is written, it is an error of the reload, and a mended file heals it."""
    scene = ReloadedFile(tmp_path / "c.yaml", "log: {level: info}\n")
    scene.path.write_bytes((HEAD + text).encode("utf-8", "surrogatepass"))
    asyncio.run(scene.subject.step())
    assert scene.results[-1].error
    assert "\n" not in scene.results[-1].error
    with pytest.raises(ConfigError):
        loader.settings(loader.read(scene.path))
    assert scene.write("log: {level: debug}\n").changed == ("log.level",)


def test_a_pipe_in_place_of_the_file_is_refused(tmp_path):
    """Nobody writes to it, so that its reader would wait for ever, and with it every later reload."""
    scene = ReloadedFile(tmp_path / "c.yaml", "log: {level: info}\n")
    scene.path.unlink()
    os.mkfifo(scene.path)
    asyncio.run(scene.subject.step())
    assert "a readable file, got a pipe, which is no regular file" in scene.results[-1].error
    scene.path.unlink()
    (tmp_path / "linked.yaml").write_text(HEAD + "log: {level: debug}\n")
    scene.path.symlink_to("linked.yaml")
    asyncio.run(scene.subject.step())
    assert scene.results[-1].changed == ("log.level",)


def test_a_read_that_hangs_does_not_keep_the_process():
    """A file of a mount that stalls: a signal ends the process with status 0, and a line says why."""
    command = [sys.executable, "-c", HANGING % HEAD]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert any("listening" in line for line in process.stdout)
            process.send_signal(signal.SIGHUP)
            assert any("reads" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=300) == 0
            assert "ends without a thread that hangs" in process.stderr.read()
        finally:
            process.kill()


def test_a_renamed_pool_keeps_the_rules_last_in_force(tmp_path):
    """Rules of a pool that the file does not have are those of the last reload, not of the start."""
    pool = "pools: [{name: %s, endpoints: ['10.0.0.1:1'], objectives: {gold: %s}}]\n"
    scene = ReloadedFile(tmp_path / "c.yaml", pool % ("a", 1))
    scene.write(pool % ("a", 22))
    result = scene.write(pool % ("b", 22))
    assert (result.changed, result.restart) == ((), ("pools",))
    assert result.settings.pools[0].objectives == {"gold": 22}


def test_a_plugin_file_that_is_a_pipe_is_refused(tmp_path):
    """Plugin files are read at every reload."""
    os.mkfifo(tmp_path / "plugin.py")
    with pytest.raises(ConfigError, match=r"a readable Python file, got .* a pipe"):
        ReloadingScene(read(f"scheduling: {{plugin_files: [{tmp_path}/plugin.py]}}\n"))


def test_a_plugin_file_without_a_possible_name_is_refused():
    """A NUL in a name is a mistake in the configuration, not a bug of ours."""
    with pytest.raises(ConfigError, match="a readable Python file"):
        ReloadingScene(read('scheduling: {plugin_files: ["a\\0b"]}'))


def test_a_reader_that_raises_is_an_error_of_the_reload(tmp_path, monkeypatch):
    """An unexpected exception is reported with its location and without its message."""
    scene = ReloadedFile(tmp_path / "c.yaml", "log: {level: info}\n")

    def raising(*_, **__):
        raise MemoryError("a secret")

    monkeypatch.setattr(loader, "read", raising)
    result = scene.write("log: {level: debug}\n")
    assert result.error.startswith("reading it raised MemoryError at ")
    assert "secret" not in result.error


SESSIONS = """
log: {level: %s}
scheduling:
  plugin_files: [FILE]
  profile:
    filters: [{kind: session-affinity-filter, params: {strategy: session_id}}]
    picker: {kind: %s}
  models: {other: {strategy: round-robin}}
"""


def test_plugin_state_survives_a_reload_with_equal_rules(tmp_path):
    """Sessions, turns and means of plugins are those of before; other rules begin anew."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)

    def settings(level, picker):
        return read((SESSIONS % (level, picker)).replace("FILE", str(file)))

    scene = ReloadingScene(settings("info", "random"))
    director = scene.runtime.parts.director

    def asks():
        chosen = []
        for name in range(40):
            decision = scene.decision(x_session_id=f"s{name}")
            assert isinstance(decision, Decision)
            director.release(director.reserve(decision, scene.now), scene.now)
            chosen.append(decision.endpoints[0].address)
        return chosen

    first = asks()
    profiles = director.routing.profile, director.routing.by_model["other"]
    scene.read_again(settings("debug", "random"))
    assert asks() == first
    file.write_text(PLUGIN + "# not named by any rule\n")
    scene.read_again(settings("info", "random"))
    assert asks() == first
    assert (director.routing.profile, director.routing.by_model["other"]) == profiles
    assert director.routing.profile is profiles[0]
    scene.read_again(settings("info", "rendezvous"))
    assert director.routing.profile is not profiles[0]
    assert director.routing.by_model["other"] is profiles[1]


def test_an_edited_plugin_starts_with_new_state(tmp_path):
    """Rules that name a plugin whose file is another one are other rules."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)
    settings = read(
        f"scheduling: {{plugin_files: ['{file}'], profile: {{picker: {{kind: first}}}}}}"
    )
    scene = ReloadingScene(settings)
    before = scene.runtime.parts.director.routing.profile
    scene.read_again(settings)
    assert scene.runtime.parts.director.routing.profile is before
    file.write_text(PLUGIN.replace("[0]", "[1]"))
    scene.read_again(settings)
    assert scene.runtime.parts.director.routing.profile is not before
    assert scene.decision().endpoints[0].address == ADDRESSES[1]


def test_an_edited_plugin_file_is_named(tmp_path):
    """The result names the field when only the content of a plugin file changed."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)
    scene = ReloadedFile(tmp_path / "c.yaml", f"scheduling: {{plugin_files: ['{file}']}}\n")
    file.write_text(f"{PLUGIN}# edited\n")
    asyncio.run(scene.subject.step())
    assert scene.results[-1].changed == ("scheduling.plugin_files",)
    scene.subject.request_reload()
    asyncio.run(scene.subject.step())
    assert scene.results[-1].changed == ()


def test_an_edited_plugin_file_of_a_pool_is_named(tmp_path):
    """Plugin files of pools are relative to the configuration too, and watched."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)
    pool = "{name: a, endpoints: ['10.0.0.1:1'], scheduling: {plugin_files: [first.py]}}"
    scene = ReloadedFile(tmp_path / "c.yaml", f"pools: [{pool}]\n")
    file.write_text(f"{PLUGIN}# edited\n")
    asyncio.run(scene.subject.step())
    assert scene.results[-1].changed == ("pools[a].scheduling.plugin_files",)


def test_an_edited_plugin_file_is_named_after_a_refusal(tmp_path):
    """The edit counts from the reload that was accepted last."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)
    text = "scheduling: {plugin_files: [first.py]}\n"
    scene = ReloadedFile(tmp_path / "c.yaml", text)
    file.write_text(f"{PLUGIN}# edited\n")
    assert scene.write("nonsense: 1\n").error
    assert scene.write(text).changed == ("scheduling.plugin_files",)
    assert scene.write(f"{text}\n").changed == ()


def test_an_edit_during_the_start_is_read(tmp_path):
    """The file is compared with what it was before the start read it."""
    path = tmp_path / "c.yaml"
    scene = ReloadedFile(
        path,
        "log: {level: info}\n",
        on_start=lambda: path.write_text(f"{HEAD}log: {{level: debug}}\n"),
    )
    assert scene.look().changed == ("log.level",)


def test_a_pipe_is_not_compared_with_its_state_before_the_read(tmp_path):
    """Writing to a pipe changes its times, which is no edit."""
    os.mkfifo(tmp_path / "pipe")
    args = argparse.Namespace(config_file=str(tmp_path / "pipe"))
    assert serve.stamp_config_file(args) == {}


@pytest.mark.parametrize(
    ("section", "late"),
    [
        ("scheduling: {plugin_files: [FILE], profile: {picker: {kind: first}}}\n", PLUGIN),
        ("server: {admin_token_file: FILE}\n", "secret"),
        (
            "pools: [{name: a, endpoints: ['10.0.0.1:1'], scheduling: {plugin_files: [FILE]}}]\n",
            PLUGIN,
        ),
    ],
)
def test_a_refused_reload_is_tried_again(tmp_path, section, late):
    """A missing plugin or token may come later; a refusal is reported once."""
    file = tmp_path / "late"
    scene = ReloadedFile(tmp_path / "c.yaml", "log: {level: info}\n")
    assert scene.write(section.replace("FILE", str(file))).error
    scene.look(100)
    assert len(scene.results) == 1
    file.write_text(late)
    assert not scene.look(reload._RETRY_LOOKS).error
    assert len(scene.results) == 2


def test_a_transient_read_error_is_tried_again(tmp_path, monkeypatch):
    """A process may have no descriptor left while its file changes."""
    scene = ReloadedFile(tmp_path / "c.yaml", "log: {level: info}\n")
    with monkeypatch.context() as patch:
        patch.setattr(loader, "open_regular", exhausted)
        assert "Too many open files" in scene.write("log: {level: debug}\n").error
    assert scene.look(reload._RETRY_LOOKS).changed == ("log.level",)


def exhausted(*_):
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_configuration_that_could_not_start_is_refused(tmp_path):
    """Fields for the restart are judged as the start would, where any of them changed."""
    scene = ReloadedFile(tmp_path / "c.yaml", "log: {level: info}\n")
    result = scene.write("peer_sync: {peers: [no-port]}\nlog: {level: debug}\n")
    assert "expected host:port" in result.error
    assert "only a restart changes peer_sync.peers" in result.error
    assert not scene.adopted


def test_new_warnings_are_logged_once(tmp_path, caplog):
    """A reload warns of what the start would warn of."""
    text = "pool: {endpoints: ['10.0.0.1:1']}\nscheduling: {respect_subset: %s}\n"
    scene = ReloadedFile(tmp_path / "c.yaml", text % "true")
    history = reload.ReloadHistory(Settings(), lambda: 1.0, ProcessCounters())
    result = scene.write(text % "false")
    assert len(result.warnings) == 1
    history.add(result)
    assert "scheduling.respect_subset is false" in caplog.records[-1].fields["warning"]
    assert scene.write(text % "false" + "\n").warnings == ()
    assert scene.write("nonsense: 1\n").warnings == ()


def test_learned_rates_survive_every_reload():
    """Learned values of endpoints stay in the store across reloads."""
    scene = ReloadingScene(read("scheduling: {strategy: adaptive}"))
    rates = [member.rates for member in scene.store.pool.members]
    scene.observe(3.0)
    members = scene.store.pool.members
    scene.read_again(read("scheduling: {strategy: random}"))
    assert scene.store.pool.members is members
    assert len(rates) == len(members)
