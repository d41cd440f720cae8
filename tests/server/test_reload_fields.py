"""Every live field, changed while a picker runs: it then does what a new picker does."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from extproc.config import load, reloading
from extproc.decision import Decision, Rejection
from extproc.discovery.found import Found
from extproc.endpoint import Endpoint, Load, Models
from extproc.errors import ConfigError
from extproc.pool.condition import Verdict
from extproc.protocol.events import BodyMode, Event, Kind, Modes
from extproc.request import RawRequest
from extproc.server import app, reload
from extproc.server import stream as streams

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\nseed: 1\n"
ADDRESSES = ("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")

PLUGIN = """
import msgspec
from typing import ClassVar
class First(msgspec.Struct, frozen=True):
    kind: ClassVar[str] = "first"
    needs: ClassVar[frozenset] = frozenset()
    def pick(self, turn, candidates, totals, *, count):
        return [0]
"""


#: Rules that split prefill from decode.
SPLIT = (
    "scheduling: {allow_unsupported: true, plugins: [{type: disagg-profile-handler}], "
    "schedulingProfiles: [{name: prefill}, {name: decode}]}"
)


def read(text):
    return load.settings(load.parse(HEAD + text, where="c.yaml"))


class Scene:
    """A picker with three endpoints at one moment."""

    def __init__(self, settings):
        self.now = 100.0
        self.started = settings
        self.picker = app.Picker(settings, clock=lambda: self.now)
        for site in self.picker.sites.by_name.values():
            site.parts.fleet.replace([Endpoint(one) for one in ADDRESSES], self.now)

    def read_again(self, settings):
        self.picker.adopt(reloading.in_force(self.started, settings))

    @property
    def site(self):
        return next(iter(self.picker.sites.by_name.values()))

    @property
    def fleet(self):
        return self.site.parts.fleet

    @property
    def shared(self):
        return self.picker.servicer.shared

    @property
    def gate(self):
        return self.picker.sites.gates[""]

    def raw(self, model="m", subset=None, **headers):
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        all_headers = {":method": "POST", ":path": "/v1/completions", **named}
        return RawRequest(all_headers, body, subset=subset)

    def route(self, **request):
        return self.picker.sites.switchboard.route(self.raw(**request), self.now)

    def decision(self, **request):
        return self.route(**request).outcome

    def prepared(self, **request):
        return self.site.parts.dispatcher.prepare(self.raw(**request))

    def list_models(self, *models, adapters=()):
        for member in self.fleet.pool.members:
            listed = Models(bases=frozenset(models), adapters=frozenset(adapters))
            self.fleet.observe_models(member.endpoint, listed)

    def observe(self, waiting):
        for member in self.fleet.pool.members:
            seen = Load(at=self.now, engine="vllm", waiting=waiting, running=1.0, kv_usage=0.5)
            self.fleet.observe(self.fleet.begin_scrape(member.endpoint), seen, self.now)

    def answers(self, body=b'{"model":"m","prompt":"x"}'):
        """What a stream answers to a request."""
        stream = streams.opened(self.shared)
        headers = {":method": "POST", ":path": "/v1/completions"}
        modes = Modes(BodyMode.FULL_DUPLEX_STREAMED, BodyMode.NONE)
        list(stream.turn(Event(Kind.REQUEST_HEADERS, headers, modes=modes)))
        replies = list(stream.turn(Event(Kind.REQUEST_BODY, body=body, end_of_stream=True)))
        stream.finish()
        return [(type(one).__name__, getattr(one, "status", None)) for one in replies]

    def fail(self, times):
        """Whether one endpoint is left out after so many failures in a row."""
        endpoint = self.fleet.pool.members[0].endpoint
        for _ in range(times):
            self.fleet.told(endpoint, Verdict.FAILED, sent_at=self.now, now=self.now)
        return self.fleet.pool.members[0].condition.state.name

    def held(self, **request):
        """A request that waits, or why it may not."""
        prepared = self.prepared(**request)
        return self.gate.hold(prepared, Rejection(429, "busy", reason="x", waits_s=1.0), self.now)


def stale(scene):
    scene.observe(7.0)
    scene.now += 8.0
    return scene.decision().candidates[0].load.waiting


def busy(scene):
    for member in scene.fleet.pool.members:
        for _ in range(3):
            member.account.open("m", 50_000, cached_tokens=0, now=scene.now)
    return type(scene.decision()).__name__


def unlisted(scene):
    scene.list_models("other")
    return type(scene.decision()).__name__


def kubeai(scene):
    scene.list_models("base", adapters=("lora",))
    made = scene.decision(model="base_lora")
    return made.request.model, made.request.adapter


def deadline(scene, status=429, **request):
    prepared = scene.prepared(**request)
    held = scene.gate.hold(prepared, Rejection(status, "busy", reason="x", waits_s=1.0), scene.now)
    return held.waiter.deadline - scene.now


def holds(scene, count):
    found = [scene.held() for _ in range(count)]
    return [isinstance(one, Rejection) for one in found]


def models_page(scene):
    scene.list_models("m")
    raw = RawRequest({":method": "GET", ":path": "/v1/models"})
    return type(scene.picker.sites.switchboard.route(raw, scene.now).outcome).__name__


def picker_of(scene):
    made = scene.decision()
    return made.profile, made.picker


def health(name):
    """The value itself: `Health` reads it at every use."""
    return lambda scene: getattr(scene.fleet.health.settings, name)


def claim_of_brought(scene):
    """What a pool that Kubernetes brings, before or after, claims by its annotations."""
    sites = scene.picker.sites
    pool = Found((Endpoint("10.0.0.1:1"),), annotations={"extproc/hosts": "a"})
    if "n/p" not in sites.by_name:
        sites.take({"n/p": pool}, ())
    return sites.by_name["n/p"].claim.hosts, sites.by_name["n/p"].claim_state


HOLDING = "holding: {enabled: true, %s}\n"

SEVERAL_PROFILES = """scheduling:
  plugins: [{type: rendezvous}, {type: queue-depth}]
  schedulingProfiles: [{name: p, plugins: [{pluginRef: rendezvous}]}]"""

#: Field to the file before, the file after, and what is looked at.
LIVE = {
    "conformance": (
        "conformance: false",
        "conformance: true",
        lambda scene: scene.shared.exchange_settings.conformance,
    ),
    "pool.objectives": (
        "pool: {objectives: {gold: 1}}",
        "pool: {objectives: {gold: 5}}",
        lambda scene: scene.decision(x_llm_d_inference_objective="gold").request.priority,
    ),
    "pool.rewrites": (
        "pool: {}",
        "pool: {rewrites: [{targets: [{model: tiny}]}]}",
        lambda scene: scene.decision().model_rewrite,
    ),
    "cluster.claims": (
        "cluster: {every_pool: cluster}",
        "cluster: {every_pool: cluster, claims: [{pools: ['n/*']}]}",
        claim_of_brought,
    ),
    "pools.match": (
        "pools: [{name: a, endpoints: ['10.0.0.1:1']}]",
        "pools: [{name: a, endpoints: ['10.0.0.1:1'], match: {hosts: [b]}}]",
        lambda scene: type(scene.decision(**{":authority": "c"})).__name__,
    ),
    "pools.scheduling": (
        "pools: [{name: a, endpoints: ['10.0.0.1:1']}]",
        "pools: [{name: a, endpoints: ['10.0.0.1:1'], scheduling: {strategy: random}}]",
        picker_of,
    ),
    "pools.objectives": (
        "pools: [{name: a, endpoints: ['10.0.0.1:1']}]",
        "pools: [{name: a, endpoints: ['10.0.0.1:1'], objectives: {gold: 5}}]",
        lambda scene: scene.decision(x_llm_d_inference_objective="gold").request.priority,
    ),
    "pools.rewrites": (
        "pools: [{name: a, endpoints: ['10.0.0.1:1']}]",
        "pools: [{name: a, endpoints: ['10.0.0.1:1'], rewrites: [{targets: [{model: t}]}]}]",
        lambda scene: scene.decision().model_rewrite,
    ),
    "scrape.stale_after_s": (
        "scrape: {stale_after_s: 6}",
        "scrape: {stale_after_s: 60}",
        stale,
    ),
    "health.failures": (
        "health: {failures: 3}",
        "health: {failures: 1}",
        lambda scene: scene.fail(1),
    ),
    **{
        f"health.{name}": (f"health: {{{name}: 0.25}}", f"health: {{{name}: 0.75}}", health(name))
        for name in (
            "failure_share",
            "window_s",
            "base_s",
            "cap_s",
            "most_share",
            "hang_s",
            "slow_start_s",
            "slow_start_floor",
        )
    },
    "scheduling.strategy": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: round-robin}",
        picker_of,
    ),
    "scheduling.profile": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: random, profile: {picker: {kind: rendezvous}}}",
        picker_of,
    ),
    "scheduling.plugins": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: random, plugins: [{type: rendezvous}]}",
        picker_of,
    ),
    "scheduling.scheduling_profiles": (
        "scheduling: {plugins: [{type: rendezvous}, {type: queue-depth}]}",
        SEVERAL_PROFILES,
        lambda scene: [one.name for one in scene.decision().scores],
    ),
    "scheduling.models": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: random, models: {m: {strategy: round-robin}}}",
        picker_of,
    ),
    "scheduling.fallbacks": (
        "scheduling: {fallbacks: 0}",
        "scheduling: {fallbacks: 2}",
        lambda scene: len(scene.decision().endpoints),
    ),
    "scheduling.honour_subset": (
        "scheduling: {honour_subset: true}",
        "scheduling: {honour_subset: false}",
        lambda scene: len(scene.decision(subset=("10.0.0.2:8000",)).candidates),
    ),
    "scheduling.unknown_model": (
        "scheduling: {unknown_model: pass}",
        "scheduling: {unknown_model: reject}",
        unlisted,
    ),
    "scheduling.kubeai_names": (
        "scheduling: {kubeai_names: true}",
        "scheduling: {kubeai_names: false}",
        kubeai,
    ),
    "scheduling.plugin_files": (
        "scheduling: {profile: {picker: {kind: random}}}",
        "scheduling: {plugin_files: [FILE], profile: {picker: {kind: first}}}",
        picker_of,
    ),
    "scheduling.plugin_budget_ms": (
        "scheduling: {plugin_files: [FILE], profile: {picker: {kind: first}}}",
        "scheduling: {plugin_files: [FILE], plugin_budget_ms: 9, profile: {picker: {kind: first}}}",
        lambda scene: scene.site.parts.dispatcher.routing.profile.picker._guards.limits.budget_s,
    ),
    "scheduling.allow_unsupported": (
        "scheduling: {profile: {picker: {kind: random}}}",
        SPLIT,
        picker_of,
    ),
    "limits.max_body_bytes": (
        "limits: {max_body_bytes: 1000}",
        "limits: {max_body_bytes: 20}",
        Scene.answers,
    ),
    "limits.max_streams": (
        "limits: {max_streams: 7}",
        "limits: {max_streams: 8}",
        lambda scene: scene.shared.crowded.message,
    ),
    "limits.body_idle_s": (
        "limits: {body_idle_s: 7}",
        "limits: {body_idle_s: 8}",
        lambda scene: scene.shared.settings.body_idle_s,
    ),
    "holding.timeout_s": (HOLDING % "timeout_s: 5", HOLDING % "timeout_s: 9", deadline),
    "holding.empty_timeout_s": (
        HOLDING % "empty_timeout_s: 5",
        HOLDING % "empty_timeout_s: 9",
        lambda scene: deadline(scene, status=503),
    ),
    "holding.most_timeout_s": (
        HOLDING % "most_timeout_s: 5",
        HOLDING % "most_timeout_s: 9",
        lambda scene: deadline(scene, x_extproc_hold_ms="20000"),
    ),
    "holding.by_objective": (
        "pool: {objectives: {gold: 1}}\n" + HOLDING % "timeout_s: 5",
        "pool: {objectives: {gold: 1}}\n" + HOLDING % "timeout_s: 5, by_objective: {gold: 2}",
        lambda scene: deadline(scene, x_llm_d_inference_objective="gold"),
    ),
    "holding.timeout_header": (
        HOLDING % "timeout_s: 5",
        HOLDING % "timeout_s: 5, timeout_header: x-wait",
        lambda scene: deadline(scene, x_wait="2000"),
    ),
    "holding.busy_s": (HOLDING % "busy_s: 0.001", HOLDING % "busy_s: 1.0e+6", busy),
    "holding.max_requests": (
        HOLDING % "max_requests: 1",
        HOLDING % "max_requests: 2",
        lambda scene: holds(scene, 2),
    ),
    "holding.max_bytes": (
        HOLDING % "max_bytes: 30",
        HOLDING % "max_bytes: 300",
        lambda scene: holds(scene, 2),
    ),
    "holding.tenant_header": (
        HOLDING % "tenant_header: x-team",
        HOLDING % "tenant_header: x-unit",
        lambda scene: scene.gate.tenant(scene.prepared(x_team="a", x_unit="b")),
    ),
    "holding.by_adapter": (
        HOLDING % "by_adapter: false",
        HOLDING % "by_adapter: true",
        lambda scene: scene.gate.tenant(scene.prepared()),
    ),
    "holding.limit": (
        HOLDING % "timeout_s: 5",
        HOLDING % "timeout_s: 5, limit: {requests_per_s: 0}",
        lambda scene: [
            type(scene.gate.reserve(scene.prepared(), scene.now)).__name__ for _ in range(3)
        ],
    ),
    "holding.limits": (
        HOLDING % "tenant_header: x-team",
        HOLDING % "tenant_header: x-team, limits: {a: {requests_per_s: 0}}",
        lambda scene: [
            type(scene.gate.reserve(scene.prepared(x_team="a"), scene.now)).__name__
            for _ in range(3)
        ],
    ),
    "answers.marker": (
        "answers: {marker: true}",
        "answers: {marker: false}",
        lambda scene: scene.shared.exchange_settings.response_marker,
    ),
    "answers.feedback": (
        "answers: {feedback: true}",
        "answers: {feedback: false}",
        lambda scene: scene.shared.exchange_settings.feedback,
    ),
    "answers.stream_share": (
        "answers: {stream_share: 0}",
        "answers: {stream_share: 1}",
        lambda scene: scene.shared.settings.stream_share,
    ),
    "answers.restore_model": (
        "answers: {restore_model: true}",
        "answers: {restore_model: false}",
        lambda scene: scene.shared.exchange_settings.restore_model,
    ),
    "answers.request_cost": (
        "answers: {}",
        "answers: {request_cost: {prompt: 1}}",
        lambda scene: scene.shared.settings.request_cost,
    ),
    "answers.list_models": (
        "answers: {list_models: false}",
        "answers: {list_models: true}",
        models_page,
    ),
    "explain.decisions": (
        "explain: {decisions: 5}",
        "explain: {decisions: 0}",
        lambda scene: (scene.answers(), len(scene.picker.ring)),
    ),
    "explain.header": (
        "explain: {header: false}",
        "explain: {header: true}",
        lambda scene: scene.shared.settings.explain_header,
    ),
    "explain.scores": (
        "explain: {scores: false}",
        "explain: {scores: true}",
        lambda scene: scene.shared.exchange_settings.scores,
    ),
    "log.level": (
        "log: {level: info}",
        "log: {level: error}",
        lambda _: logging.getLogger("extproc").level,
    ),
}


@pytest.fixture(autouse=True)
def level():
    """A reload sets the level of our logger, which is the process's."""
    ours = logging.getLogger("extproc")
    before = ours.level
    ours.setLevel(logging.INFO)
    yield
    ours.setLevel(before)


def test_every_live_field_is_looked_at():
    """A live field without a probe here does not land."""
    listed = {f"{row.section}.{name}".lstrip(".") for row in reloading.TABLE for name in row.live}
    assert set(LIVE) == listed


@pytest.mark.parametrize("field", LIVE)
def test_a_live_field_is_in_force_at_once(field, tmp_path):
    """What is read again does what a picker does that was started with it, and not what was."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)
    before, after = (read(text.replace("FILE", str(file)) + "\n") for text in LIVE[field][:2])
    look = LIVE[field][2]

    async def scenario():
        old = look(Scene(before))
        reloaded = Scene(before)
        reloaded.read_again(after)
        seen = look(reloaded)
        fresh = Scene(after)
        fresh.picker.adopt(after)  # sets the level, as `run` does
        assert seen == look(fresh)
        assert seen != old

    asyncio.run(scenario())


BUSY = "pool: {endpoints: ['10.0.0.1:8000']}\nholding: {enabled: %s}\n"


def test_holding_is_switched_by_a_restart_alone():
    """Busy engines get requests as before: without queues nobody is refused, and with them held."""

    async def scenario():
        for started, wanted in (("false", "true"), ("true", "false")):
            untouched, reloaded = (Scene(read(BUSY % started)) for _ in range(2))
            reloaded.read_again(read(BUSY % wanted))
            assert busy(reloaded) == busy(untouched)
            assert list(reloaded.picker.sites.gates) == list(untouched.picker.sites.gates)

    asyncio.run(scenario())


def test_what_tenants_attained_fades_as_it_did():
    """A half-life that a restart changes is neither shown nor used before."""

    async def scenario():
        scene = Scene(read(HOLDING % "half_life_s: 60"))
        scene.read_again(read(HOLDING % "half_life_s: 1, order: edf, fairness: none"))
        queue = scene.gate.queue
        assert queue.settings.half_life_s == queue.turns._half_life_s == 60.0
        assert (queue.settings.order, queue.settings.fairness) == ("fcfs", "least-served")

    asyncio.run(scenario())


def test_pools_that_come_later_are_as_the_others():
    """A pool that Kubernetes brings after a reload has live fields as read, and no others."""

    async def scenario():
        scene = Scene(read("cluster: {every_pool: cluster}\nprefix: {capacity_blocks: 7}\n"))
        scene.read_again(
            read(
                "cluster: {every_pool: cluster}\nprefix: {capacity_blocks: 9}\n"
                "holding: {enabled: true}\nscheduling: {strategy: random}\n"
            )
        )
        scene.picker.sites.take({"n/p": Found((Endpoint("10.0.0.1:1"),))}, ())
        site = scene.picker.sites.by_name["n/p"]
        assert site.gate is None
        assert site.profile == "random"
        assert site.parts.settings.prefix.capacity_blocks == 7

    asyncio.run(scenario())


class Following:
    """A reloader over a file, and what it does."""

    def __init__(self, path, text):
        path.write_text(HEAD + text)
        self.path = path
        self.adopted, self.told = [], []
        self.subject = reload.Reloader(
            reload.Source(lambda _: [str(path)], lambda: load.settings(load.read(path))),
            load.settings(load.read(path)),
            adopt=self.adopt,
            on_reload=self.told.append,
        )

    def adopt(self, settings):
        self.adopted.append(settings)

    def write(self, text):
        self.path.write_text(HEAD + text)
        asyncio.run(self.subject.step())
        return self.told[-1]


def test_what_needs_a_restart_is_not_adopted(tmp_path):
    """Live fields are put in force and named; the others are named until they are as they were."""
    scene = Following(tmp_path / "c.yaml", "log: {level: info}\n")
    told = scene.write("log: {level: debug}\nserver: {grpc_port: 5}\nholding: {enabled: true}\n")
    assert told.changed == ("log.level",)
    assert told.restart == ("server.grpc_port", "holding.enabled")
    (adopted,) = scene.adopted
    assert (adopted.log.level, adopted.server.grpc_port) == ("debug", 9002)
    assert not adopted.holding.enabled
    told = scene.write("log: {level: debug}\nserver: {grpc_port: 5}\n\n")
    assert (told.changed, told.restart) == ((), ("server.grpc_port",))
    told = scene.write("log: {level: info}\n\n\n")
    assert (told.changed, told.restart) == (("log.level",), ())


def test_live_fields_that_lean_on_a_restart_are_refused(tmp_path):
    """Nothing is put in force that does not go together with what is running; the error says so."""
    scene = Following(tmp_path / "c.yaml", "limits: {max_assembly_bytes: 6000000000}\n")
    told = scene.write("limits: {max_assembly_bytes: 24000000000, max_body_bytes: 2000000000}\n")
    assert "max_assembly_bytes" in told.error
    assert "only a restart changes limits.max_assembly_bytes" in told.error
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
def test_no_file_ends_what_is_running(tmp_path, text):
    """Whatever is written, it is an error of the reload, and a mended file heals it."""
    scene = Following(tmp_path / "c.yaml", "log: {level: info}\n")
    scene.path.write_bytes((HEAD + text).encode("utf-8", "surrogatepass"))
    asyncio.run(scene.subject.step())
    assert scene.told[-1].error
    assert "\n" not in scene.told[-1].error
    with pytest.raises(ConfigError):
        load.settings(load.read(scene.path))
    assert scene.write("log: {level: debug}\n").changed == ("log.level",)


def test_a_plugin_file_without_a_possible_name_is_refused():
    """A NUL in a name is a mistake in the configuration, not a bug of ours."""
    with pytest.raises(ConfigError, match="a readable Python file"):
        Scene(read('scheduling: {plugin_files: ["a\\0b"]}'))


def test_a_reader_that_raises_is_an_error_of_the_reload(tmp_path, monkeypatch):
    """Also what nobody thought of: its place is told, not what it said."""
    scene = Following(tmp_path / "c.yaml", "log: {level: info}\n")

    def raising(_):
        raise MemoryError("a secret")

    monkeypatch.setattr(load, "read", raising)
    told = scene.write("log: {level: debug}\n")
    assert told.error.startswith("reading it raised MemoryError at ")
    assert "secret" not in told.error


SESSIONS = """
log: {level: %s}
scheduling:
  plugin_files: [FILE]
  profile:
    filters: [{kind: session-affinity-filter, params: {strategy: session_id}}]
    picker: {kind: %s}
  models: {other: {strategy: round-robin}}
"""


def test_memory_survives_a_reload_whose_rules_are_equal(tmp_path):
    """Sessions, turns and means of plugins are those of before; other rules begin anew."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)

    def settings(level, picker):
        return read((SESSIONS % (level, picker)).replace("FILE", str(file)))

    scene = Scene(settings("info", "random"))
    dispatcher = scene.site.parts.dispatcher

    def asks():
        chosen = []
        for name in range(40):
            made = scene.decision(x_session_id=f"s{name}")
            assert isinstance(made, Decision)
            dispatcher.complete(dispatcher.commit(made, scene.now), scene.now)
            chosen.append(made.endpoints[0].address)
        return chosen

    first = asks()
    profiles = dispatcher.routing.profile, dispatcher.routing.by_model["other"]
    scene.read_again(settings("debug", "random"))
    assert asks() == first
    file.write_text(PLUGIN + "# not named by any rule\n")
    scene.read_again(settings("info", "random"))
    assert asks() == first
    assert (dispatcher.routing.profile, dispatcher.routing.by_model["other"]) == profiles
    assert dispatcher.routing.profile is profiles[0]
    scene.read_again(settings("info", "rendezvous"))
    assert dispatcher.routing.profile is not profiles[0]
    assert dispatcher.routing.by_model["other"] is profiles[1]


def test_an_edited_plugin_begins_anew(tmp_path):
    """Rules that name a plugin whose file is another one are other rules."""
    file = tmp_path / "first.py"
    file.write_text(PLUGIN)
    settings = read(
        f"scheduling: {{plugin_files: ['{file}'], profile: {{picker: {{kind: first}}}}}}"
    )
    scene = Scene(settings)
    before = scene.site.parts.dispatcher.routing.profile
    scene.read_again(settings)
    assert scene.site.parts.dispatcher.routing.profile is before
    file.write_text(PLUGIN.replace("[0]", "[1]"))
    scene.read_again(settings)
    assert scene.site.parts.dispatcher.routing.profile is not before
    assert scene.decision().endpoints[0].address == ADDRESSES[1]


def test_learnt_rates_survive_every_reload():
    """What is learnt of endpoints belongs to the fleet, whatever the rules are."""
    scene = Scene(read("scheduling: {strategy: adaptive}"))
    rates = [member.rates for member in scene.fleet.pool.members]
    scene.observe(3.0)
    members = scene.fleet.pool.members
    scene.read_again(read("scheduling: {strategy: random}"))
    assert scene.fleet.pool.members is members
    assert len(rates) == len(members)
