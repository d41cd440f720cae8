"""Requests whose prompt or media other endpoints compute than the one that serves them."""

from __future__ import annotations

import msgspec
import pytest

from extproc.config import factory, loader
from extproc.decision import SATURATED, Decision, Deferral
from extproc.endpoint import Endpoint, EngineCounters, Load
from extproc.errors import ConfigError
from extproc.pool.endpoint_health import HealthState, RequestOutcome
from extproc.request import HttpRequest
from extproc.testing import builders
from tests.support import pictures

PREFILL, DECODE = "10.0.0.1:8000", "10.0.0.2:8000"
ENCODE, ENCODE_TOO = "10.0.0.3:8000", "10.0.0.4:8000"
ROLES = {PREFILL: "prefill", DECODE: "decode", ENCODE: "encode", ENCODE_TOO: "encode"}

NATIVE = """apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  profile:
    name: decode
    filters: [{kind: decode-filter}]
    scorers: [{kind: prefix-cache-scorer}]
  disaggregation:
    prefill:
      profile: {filters: [{kind: prefill-filter}]}
      decider: DECIDER
    encode:
      profile:
        filters: [{kind: encode-filter}]
        picker: {kind: max-score-picker, params: {maxNumOfEndpoints: 2}}
"""
EPP = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: encode-filter}
- {type: prefill-filter}
- {type: decode-filter}
- {type: prefix-cache-scorer}
- DECIDER
- {type: always-disagg-multimodal-decider, name: media}
- {type: max-score-picker, name: two, parameters: {maxNumOfEndpoints: 2}}
- HANDLER
schedulingProfiles:
- {name: encode, plugins: [{pluginRef: encode-filter}, {pluginRef: two}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}]}
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: prefix-cache-scorer}]}
"""
HANDLER = """{type: disagg-profile-handler,
    parameters: {deciders: {prefill: by-need, encode: media}}}"""
ESTIMATED = """apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  profile:
    name: decode
    filters: [{kind: decode-filter}]
    cost: {kind: estimated-time}
  disaggregation:
    prefill:
      profile: {filters: [{kind: prefill-filter}], cost: {kind: estimated-time}}
"""

EXTERNAL = """import msgspec


class Last(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind = "last"
    needs = frozenset()
    max_num_of_endpoints: int = 1
    notes: list = msgspec.field(default_factory=list)

    def pick(self, context, candidates, totals, *, count):
        return list(range(len(candidates)))[::-1][:count]

    def on_committed(self, decision, now):
        self.notes.append((decision.profile, decision.endpoints[0].address))
"""


def native(decider="{kind: always-disagg-pd-decider}", text=NATIVE):
    return loader.settings(loader.parse(text.replace("DECIDER", decider), where="x"))


def epp(decider="{type: always-disagg-pd-decider, name: by-need}", handler=HANDLER, text=EPP):
    text = text.replace("DECIDER", decider).replace("HANDLER", handler)
    return loader.settings(loader.parse(text, where="x"))


def endpoints(roles):
    return [
        Endpoint(address, labels={"llm-d.ai/role": role} if role else {})
        for address, role in roles.items()
    ]


def build(settings, roles=ROLES):
    """A pool with endpoints of these roles."""
    parts = factory.build(settings)
    parts.store.set_endpoints(endpoints(roles), 0.0)
    return parts


def chat(words=100, *, images=0, model="m", **headers):
    """A request with a prompt of this many words."""
    parts = [
        {"type": "image_url", "image_url": {"url": pictures.url(pictures.png(64, 64))}}
    ] * images
    content = [*parts, {"type": "text", "text": "word " * words}]
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest(
        {":method": "POST", ":path": "/v1/chat/completions", **named}, msgspec.json.encode(body)
    )


def decide(parts, raw, now=1.0):
    """The decision for a request, and its stages."""
    outcome = parts.director.route(raw, now)
    assert isinstance(outcome, Decision)
    assert outcome.disaggregation is not None
    return outcome, outcome.disaggregation


def addresses(part):
    return [] if part is None else [endpoint.address for endpoint in part.endpoints]


def account(parts, address):
    return parts.store.pool.find(address).account


def fail(parts, endpoint, now):
    parts.store.record_outcome(endpoint, RequestOutcome.FAILED, sent_at=now, now=now)


def scrape(parts, address, now, **numbers):
    member = parts.store.pool.find(address)
    load = Load(at=now, engine="vllm", **{"waiting": 0.0, "running": 0.0, **numbers})
    parts.store.observe(parts.store.begin_scrape(member.endpoint), load, now)


@pytest.mark.parametrize("settings", [native(), epp()])
def test_stages_are_chosen_by_their_profiles(settings):
    """Prefill by its filter, encode by its own, several where its picker names them."""
    parts = build(settings)
    decision, stages = decide(parts, chat(images=1))
    assert decision.endpoints[0].address == DECODE
    assert addresses(stages.prefill) == [PREFILL]
    assert sorted(addresses(stages.encode)) == [ENCODE, ENCODE_TOO]
    assert (stages.decision_type, stages.prefill_reason) == ("encode-prefill-decode", "")
    assert [part.profile for part in stages.parts.values()] == ["prefill", "encode"]
    decision, stages = decide(parts, chat())
    assert (addresses(stages.encode), stages.encode_reason) == ([], "no-media")
    assert stages.decision_type == "prefill-decode"


def test_a_single_endpoint_prefills():
    """The header has room for one, also where the picker of its profile names several."""
    picker = "picker: {kind: random-picker, params: {maxNumOfEndpoints: 2}}"
    text = NATIVE.replace("[{kind: prefill-filter}]}", f"[{{kind: prefill-filter}}], {picker}}}")
    parts = build(native(text=text), {DECODE: "decode", PREFILL: "prefill", ENCODE: "prefill"})
    decision, stages = decide(parts, chat())
    assert len(addresses(stages.prefill)) == 1
    reservation = parts.director.reserve(decision, 1.0)
    assert [part.endpoint.address for part in reservation.parts] == addresses(stages.prefill)
    parts.director.unreserve(reservation, 1.0)


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ({DECODE: "decode"}, "no-endpoint"),
        ({DECODE: "both"}, "same-endpoint"),
        ({DECODE: "prefill-decode"}, "same-endpoint"),
        ({DECODE: ""}, "no-endpoint"),
    ],
)
def test_the_serving_endpoint_prefills_without_another_one(roles, reason):
    """Nothing of it is an error, and one account has the request."""
    parts = build(native(), roles)
    decision, stages = decide(parts, chat())
    assert (stages.prefill, stages.prefill_reason) == (None, reason)
    assert (stages.decision_type, stages.encode) == ("decode-only", None)
    reservation = parts.director.reserve(decision, 1.0)
    assert (reservation.stage, reservation.parts) == ("", ())
    assert account(parts, DECODE).in_flight == 1


@pytest.mark.parametrize(
    ("numbers", "words", "reason"),
    [
        ("{}", 1000, "disabled"),
        ("{nonCachedTokens: 100}", 10, "short"),
        ("{nonCachedTokens: 10, promptTokens: 500}", 100, "short"),
        ("{nonCachedTokens: 100}", 1000, ""),
        ("{nonCachedTokens: 2000}", 1000, "short"),
    ],
)
@pytest.mark.parametrize("form", ["native", "epp"])
def test_the_prefix_based_decider_keeps_short_prompts(form, numbers, words, reason):
    """By its tokens, 5 bytes of a word being 1.25."""
    if form == "native":
        settings = native(f"{{kind: prefix-based-pd-decider, params: {numbers}}}")
    else:
        settings = epp(f"{{type: prefix-based-pd-decider, name: by-need, parameters: {numbers}}}")
    _, stages = decide(build(settings), chat(words))
    assert (stages.prefill_reason, stages.prefill is None) == (reason, bool(reason))


def test_the_prefix_based_decider_keeps_cached_prompts():
    """The second request finds its prompt on the endpoint that decoded the first."""
    settings = native("{kind: prefix-based-pd-decider, params: {nonCachedTokens: 100}}")
    parts = build(settings)
    decision, _ = decide(parts, chat(1000))
    reservation = parts.director.reserve(decision, 1.0)
    parts.director.on_response_headers(reservation, "200", 2.0)
    parts.director.release(reservation, 3.0)
    _, stages = decide(parts, chat(1000), 4.0)
    assert (stages.prefill, stages.prefill_reason) == (None, "cached")


def test_prefill_first_needs_no_decider():
    """As upstream, every prompt goes to another endpoint then."""
    handler = "{type: disagg-profile-handler, parameters: {stageOrder: prefill-first}}"
    _, stages = decide(build(epp(handler=handler)), chat(images=1))
    assert (addresses(stages.prefill), stages.encode) == ([PREFILL], None)


def test_the_older_handler_reads_its_decider():
    """`pd-profile-handler` splits prefill alone, by `prefix-based-pd-decider` if it names no other."""
    handler = "{type: pd-profile-handler, parameters: {deciderPluginName: by-need}}"
    _, stages = decide(build(epp(handler=handler)), chat(images=1))
    assert (addresses(stages.prefill), stages.encode) == ([PREFILL], None)
    decider = "{type: prefix-based-pd-decider, parameters: {nonCachedTokens: 100}}"
    parts = build(epp(decider, "{type: pd-profile-handler}"))
    assert addresses(decide(parts, chat(1000))[1].prefill) == [PREFILL]
    assert decide(parts, chat(10))[1].prefill_reason == "short"


@pytest.mark.parametrize(
    ("loaded", "reason"), [(DECODE, ""), (PREFILL, "slower"), (None, "slower")]
)
def test_the_estimated_time_decides_for_the_faster_one(loaded, reason):
    """The prompts in the queue of an endpoint, and the transfer, which a tie pays for."""
    parts = build(native(text=ESTIMATED))
    if loaded is not None:
        account(parts, loaded).open("m", 100_000, cached_tokens=0, now=1.0)
    _, stages = decide(parts, chat(1000))
    assert stages.prefill_reason == reason
    assert addresses(stages.prefill) == ([] if reason else [PREFILL])


def test_the_estimated_time_keeps_cached_prompts():
    """There is nothing to transfer that is not there."""
    parts = build(native(text=ESTIMATED))
    decision, _ = decide(parts, chat(1))
    cached = msgspec.structs.replace(decision, matched_tokens=decision.request.prompt_tokens)
    decider = parts.director.routing.stages.prefill.decider
    assert decider.find_reason_to_keep(cached) == "cached"
    assert decider.compare(cached, msgspec.structs.replace(cached, cost=None)) == ""


def test_profiles_of_single_models_are_not_split():
    """Their rules choose the endpoint that does everything."""
    text = NATIVE + "  models: {own: {strategy: balanced}}\n"
    director = build(native(text=text)).director
    assert director.route(chat(model="own"), 1.0).disaggregation is None
    assert director.route(chat(model="m"), 1.0).disaggregation is not None


def test_a_queued_request_is_split_when_it_leaves():
    """While it waits for its endpoint nothing is chosen for it."""
    text = NATIVE + "flow_control: {enabled: true}\n"
    parts = build(native(text=text))
    scrape(
        parts, DECODE, 1.0, waiting=50.0, running=9.0, kv_usage=0.99, kv_blocks=99, block_tokens=16
    )
    outcome = parts.director.route(chat(), 1.0)
    assert isinstance(outcome, Deferral)
    assert all(member.account.in_flight == 0 for member in parts.store.pool.members)
    scrape(parts, DECODE, 2.0)
    assert addresses(decide(parts, chat(), 2.0)[1].prefill) == [PREFILL]


def reload(parts, wanted, before):
    _, profiles = factory.rebuild_routing(wanted, guards=parts.guards, before=before)
    return profiles


def change(settings, **changes):
    scheduling = msgspec.structs.replace(settings.scheduling, **changes)
    return msgspec.structs.replace(settings, scheduling=scheduling)


def test_a_reload_adds_changes_and_removes_stages():
    """Stages that stay the same keep their plugins."""
    parts = build(native())
    first = parts.profiles
    same = reload(parts, change(native(), fallbacks=1), first)
    assert same.stages is first.stages
    other = reload(parts, native("{kind: prefix-based-pd-decider}"), same)
    assert other.stages.prefill.decider.kind == "prefix-based-pd-decider"
    without = reload(parts, change(native(), disaggregation=None), other)
    assert without.stages is None
    assert reload(parts, native(), without).stages == first.stages


def test_a_reload_changes_the_goal_of_stages():
    """In an EndpointPickerConfig it is one for all profiles."""
    text = (
        EPP.replace("{type: prefix-cache-scorer}", "{type: estimated-time}")
        .replace("{pluginRef: prefix-cache-scorer}", "{pluginRef: estimated-time}")
        .replace("filter}]}", "filter}, {pluginRef: estimated-time}]}")
        .replace("{pluginRef: two}", "{pluginRef: estimated-time}")
    )
    settings = epp(text=text)
    parts = factory.build(settings)
    profiles = reload(parts, change(settings, goal="throughput"), parts.profiles)
    assert profiles.profile.cost.goal == "throughput"
    assert profiles.stages.prefill.profile.cost.goal == "throughput"


def test_an_external_plugin_chooses_for_a_stage(tmp_path):
    """It stands in the profile of the stage, behind its guard, and learns of its decisions."""
    (tmp_path / "mine.py").write_text(EXTERNAL)
    text = NATIVE.replace("filters: [{kind: prefill-filter}]}", "picker: {kind: last}}")
    text = f"{text}  plugin_files: ['{tmp_path}/mine.py']\n"
    parts = build(native(text=text))
    decision, stages = decide(parts, chat())
    assert addresses(stages.prefill) == [ENCODE_TOO]
    parts.director.reserve(decision, 1.0)
    plugin = parts.profiles.stages.prefill.profile.picker.plugin
    assert plugin.notes == [("prefill", ENCODE_TOO)]


def test_stages_are_chosen_near_the_endpoint_that_decodes():
    """The profile of prefill compares locations with it."""
    other = "10.0.0.5:8000"
    near = "{kind: topology-affinity-filter, params: {minAffinity: rack}}"
    parts = factory.build(
        native(text=NATIVE.replace("{kind: prefill-filter}", "{kind: prefill-filter}, " + near))
    )
    racks = {PREFILL: "r1", other: "r2", DECODE: "r2"}
    roles = {PREFILL: "prefill", other: "prefill", DECODE: "decode"}
    parts.store.set_endpoints(
        [Endpoint(a, labels={"llm-d.ai/role": roles[a], "rack": racks[a]}) for a in racks], 0.0
    )
    for _ in range(3):
        decision, stages = decide(parts, chat(x_peer_topology="rack=r1"))
        assert addresses(stages.prefill) == [other]
        parts.director.reserve(decision, 1.0)


def test_profiles_of_one_name_are_refused():
    """Plugins of one would learn of the decisions of the other."""
    with pytest.raises(ConfigError, match="'decode' twice"):
        factory.build(
            native(text=NATIVE.replace("profile: {filters", "profile: {name: decode, filters"))
        )


def test_an_ejected_endpoint_is_probed_by_a_stage():
    """No request for decode would, and without one it would stay out."""
    other = "10.0.0.5:8000"
    parts = build(native(), {PREFILL: "prefill", other: "prefill", DECODE: "decode"})
    incarnation = parts.store.pool.find(PREFILL).endpoint.incarnation
    detector = parts.store.outlier_detector
    open_here = account(parts, PREFILL).open("m", 10, cached_tokens=0, now=0.0)
    now = 0.0
    while detector.condition(incarnation).state is HealthState.HEALTHY:
        now += 5.0
        assert now < 1000.0
        scrape(parts, PREFILL, now, running=1.0, counters=EngineCounters(steps=7.0))
    open_here.close(now, answered=False)
    assert addresses(decide(parts, chat(), now)[1].prefill) == [other]
    later = detector.condition(incarnation).until + parts.store.outlier_detector.settings.cap_s
    decision, stages = decide(parts, chat(), later)
    assert addresses(stages.prefill) == [PREFILL]
    parts.director.reserve(decision, later)
    assert detector.condition(incarnation).state is HealthState.PROBING
    assert addresses(decide(parts, chat(), later)[1].prefill) == [other]
    scrape(parts, PREFILL, later + 1.0, counters=EngineCounters(steps=8.0))
    assert detector.condition(incarnation).state is HealthState.HEALTHY


def test_requests_go_to_a_role_whose_endpoints_all_fail():
    """Healthy endpoints of other roles are no place for them; they prefill as before."""
    other = "10.0.0.5:8000"
    prefill = {f"10.0.1.{n}:8000": "prefill" for n in range(6)}
    parts = build(native(), {**prefill, DECODE: "decode", other: "decode"})
    chosen = set()
    for at in range(40):
        now = 1.0 + 0.1 * at
        decision, stages = decide(parts, chat(), now)
        chosen.add(decision.endpoints[0].address)
        assert addresses(stages.prefill)[0] in prefill
        fail(parts, decision.endpoints[0], now)
    assert chosen == {DECODE, other}
    reasons = [reason for reason, _ in decision.excluded_by_health]
    assert reasons[-1] == "least-bad"


def test_requests_go_to_a_role_whose_endpoints_are_all_new():
    """Slow start would leave endpoints of the other role alone at times."""
    parts = build(native(), {PREFILL: "prefill"})
    parts.store.set_endpoints(endpoints({PREFILL: "prefill", DECODE: "decode"}), 1.0)
    for at in range(50):
        _, stages = decide(parts, chat(), 1.0 + 0.01 * at)
        assert addresses(stages.prefill) == [PREFILL]


def test_full_endpoints_are_not_passed_over_for_failing_ones():
    """A filter of load has a reason to leave none."""
    text = NATIVE.replace(
        "{kind: decode-filter}",
        "{kind: decode-filter}, {kind: utilization-filter, params: {conditions: "
        "[{metric: active-requests, maxValue: 1}]}}",
    )
    other = "10.0.0.5:8000"
    parts = build(native(text=text), {PREFILL: "prefill", DECODE: "decode", other: "decode"})
    decision, _ = decide(parts, chat())
    fail(parts, decision.endpoints[0], 1.0)
    (left,) = {DECODE, other} - {decision.endpoints[0].address}
    for _ in range(3):
        account(parts, left).open("m", 1, cached_tokens=0, now=1.0)
    assert parts.director.route(chat(), 1.1) is SATURATED


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/embeddings", b'{"model": "m", "input": "word"}'), ("/health", b"")]
)
def test_requests_that_no_sidecar_splits_are_not_split(path, body):
    """The serving endpoint does all, and is charged for it."""
    parts = build(native())
    raw = HttpRequest({":method": "POST", ":path": path}, body)
    decision, stages = decide(parts, raw)
    assert (stages.prefill, stages.prefill_reason) == (None, "other-api")
    assert (stages.encode, stages.encode_reason) == (None, "other-api")
    reservation = parts.director.reserve(decision, 1.0)
    assert (reservation.stage, reservation.parts) == ("", ())


def test_the_serving_endpoint_is_no_encoder_of_its_own_request():
    """Its sidecar would call itself; without another encoder it encodes alone."""
    both = "encode-prefill-decode"
    parts = build(native(), {DECODE: both, ENCODE: "encode"})
    _, stages = decide(parts, chat(images=1))
    assert DECODE not in addresses(stages.encode)
    _, alone = decide(build(native(), {DECODE: both}), chat(images=1))
    assert (alone.encode, alone.encode_reason) == (None, "same-endpoint")


def test_a_slower_probe_does_not_keep_a_prompt_from_others():
    """The endpoint that is to be probed is refused by the decider; healthy ones are compared too."""

    class Refusing:
        kind, needs = "refusing", frozenset()

        def find_reason_to_keep(self, decode):
            return ""

        def compare(self, decode, part):
            return "slower" if part.endpoints[0].address == PREFILL else ""

    parts = build(native())
    decision, _ = decide(parts, chat())
    by_address = {c.endpoint.address: c for c in decision.candidates}
    stage = parts.director.routing.stages.prefill
    stage = msgspec.structs.replace(
        stage,
        decider=Refusing(),
        profile=msgspec.structs.replace(stage.profile, filters=()),
    )
    groups = [[by_address[PREFILL]], [by_address[ENCODE]]]
    context = builders.context(prompt_tokens=100)
    chosen, reason = stage.choose(context, groups, decision)
    assert (chosen.endpoints[0].address, reason) == (ENCODE, "")
    assert stage.choose(context, groups[:1], decision) == (None, "slower")


def test_prefill_takes_the_rank_of_decode():
    """The sidecar passes the header of the rank on."""
    parts = build(native(), {DECODE: "decode", PREFILL: "prefill"})
    for endpoint in parts.store.pool.members:
        parts.store.set_ranks(endpoint.endpoint, range(3), 1.0)
    for _ in range(12):
        decision, stages = decide(parts, chat())
        prefill = stages.prefill.endpoints[0]
        assert prefill.rank.index == decision.endpoints[0].rank.index
        parts.director.reserve(decision, 1.0)
