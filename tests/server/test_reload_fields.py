"""Every live field, changed while a picker runs: it then does what a new picker does."""

from __future__ import annotations

import asyncio
import logging

import pytest

from extproc.config import factory, reloading
from extproc.decision import Deferral, Rejection
from extproc.discovery.endpoint_list import DiscoveredPool
from extproc.endpoint import Endpoint
from extproc.flow_control.flow_queue import QueuedItem
from extproc.flow_control.queue import DepartureCause
from extproc.request import HttpRequest
from extproc.server.flow_control_shell import Admission
from tests.support.reloading import PLUGIN, ReloadingScene, read

pytestmark = pytest.mark.usefixtures("level")

#: Refused without --allow-unsupported.
STRICT = (
    "plugins: [{type: random-picker}, {type: disaggregatedset-rollout-screener, parameters: "
    "{headerSelectors: [{headerName: r, labelKey: r, mode: strict}]}}]\n"
    "schedulingProfiles: [{name: strict, plugins: [{pluginRef: random-picker}]}]"
)


def stale(scene):
    scene.observe(7.0)
    scene.now += 8.0
    return scene.decision().candidates[0].load.waiting


def busy(scene, **request):
    for member in scene.store.pool.members:
        for _ in range(3):
            member.account.open("m", 50_000, cached_tokens=0, now=scene.now)
    return type(scene.decision(**request)).__name__


def held_by_loads(scene):
    scene.observe(0.0)  # and half of the KV cache
    return type(scene.decision()).__name__


def unlisted(scene):
    scene.list_models("other")
    return type(scene.decision()).__name__


def kubeai(scene):
    scene.list_models("base", adapters=("lora",))
    decision = scene.decision(model="base_lora")
    return decision.request.model, decision.request.adapter


def deadline(scene, status=429, **request):
    prepared = scene.prepared(**request)
    queued = scene.flow_controller.enqueue(
        prepared, Deferral(1.0, Rejection(status, "busy", reason="x")), scene.now
    )
    return queued.item.deadline - scene.now


def holds(scene, count, **headers):
    outcomes = [scene.held(**headers) for _ in range(count)]
    return [isinstance(outcome, Rejection) for outcome in outcomes]


def go_order(scene):
    """Requests of two tenants, in the order in which they go on."""
    queue = scene.flow_controller.queue
    for tenant, timeout_s in (("served", 5.0), ("served", 2.0), ("new", 3.0)):
        queue.join(QueuedItem(arrived=0.0, deadline=timeout_s, tenant=tenant), scene.now)
    queue.fair_share.served("served", 9.0, scene.now)
    looked = []
    queue.pump(lambda item: looked.append(item.deadline) or DepartureCause.REJECTED, scene.now)
    return looked


def attained(scene):
    """Service of a tenant that is left after a minute."""
    fair_share = scene.flow_controller.queue.fair_share
    fair_share.served("t", 64.0, scene.now)
    return round(fair_share.attained("t", scene.now + 60.0))


def models_page(scene):
    scene.list_models("m")
    raw = HttpRequest({":method": "GET", ":path": "/v1/models"})
    return type(scene.picker.pool_registry.pool_selector.route(raw, scene.now).outcome).__name__


def picker_of(scene):
    decision = scene.decision()
    return decision.profile, decision.picker


def costs(scene):
    """Of engines with requests: the goal weighs what a request delays."""
    scene.observe(7.0)
    return scene.decision().totals


def health(name):
    """The value itself: `Health` reads it at every use."""
    return lambda scene: getattr(scene.store.outlier_detector.settings, name)


def claim_of_brought(scene):
    """Claim of a pool that Kubernetes adds, before or after, by its annotations."""
    registry = scene.picker.pool_registry
    pool = DiscoveredPool((Endpoint("10.0.0.1:1"),), annotations={"extproc/hosts": "a"})
    if "n/p" not in registry.by_name:
        registry.on_pools_changed({"n/p": pool}, ())
    return registry.by_name["n/p"].match.hosts, registry.by_name["n/p"].match_state


HOLDING = "flow_control: {enabled: true, %s}\n"

SHEDDING = "pool: {objectives: {low: -1}}\nscheduling: {saturation: {%s}}\n"

PLUGINS = "plugins: [{type: rendezvous}, {type: queue-scorer}]"

#: Field to the file before, the file after, and what is looked at.
LIVE = {
    "parse_bodies": (
        "parse_bodies: true",
        "parse_bodies: false",
        lambda scene: scene.answers(b"{" * 2_000_000),
    ),
    "conformance": (
        "conformance: false",
        "conformance: true",
        lambda scene: scene.shared.exchange_settings.conformance,
    ),
    "server.admin_token_file": (
        "server: {}",
        "server: {admin_token_file: FILE}",
        lambda scene: scene.picker.admin_token.current(),
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
    "cluster.match_rules": (
        "cluster: {discover_pools: cluster}",
        "cluster: {discover_pools: cluster, match_rules: [{pools: ['n/*']}]}",
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
            "max_ejection_share",
            "stall_timeout_s",
            "slow_start_s",
            "slow_start_floor",
        )
    },
    "scheduling.strategy": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: round-robin}",
        picker_of,
    ),
    "scheduling.goal": (
        "scheduling: {strategy: adaptive}",
        "scheduling: {strategy: adaptive, goal: throughput}",
        costs,
    ),
    "scheduling.profile": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: random, profile: {picker: {kind: rendezvous}}}",
        picker_of,
    ),
    "scheduling.epp": (
        PLUGINS,
        PLUGINS + "\nschedulingProfiles: [{name: p, plugins: [{pluginRef: rendezvous}]}]",
        lambda scene: [score.name for score in scene.decision().scores],
    ),
    "scheduling.models": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: random, models: {m: {strategy: round-robin}}}",
        picker_of,
    ),
    "scheduling.shadow": (
        "scheduling: {strategy: random}",
        "scheduling: {strategy: random, shadow: {strategy: round-robin}}",
        lambda scene: sorted(scene.picker.pool_registry.shadows()),
    ),
    "scheduling.disaggregation": (
        "scheduling: {strategy: random}",
        """scheduling:
  strategy: random
  disaggregation: {prefill: {profile: {}, decider: {kind: always-disagg-pd-decider}}}""",
        lambda scene: scene.decision().disaggregation,
    ),
    "scheduling.kv_cache_source": (
        "scheduling: {strategy: adaptive}",
        "scheduling: {strategy: adaptive, kv_cache_source: {min_cached_token_delta: 5}}",
        lambda scene: scene.runtime.parts.director.routing.kv_cache_source,
    ),
    "scheduling.saturation": (
        SHEDDING % "concurrency: {maxConcurrency: 1}",
        SHEDDING % "concurrency: {maxConcurrency: 9}",
        lambda scene: busy(scene, x_llm_d_inference_objective="low"),
    ),
    "scheduling.fallbacks": (
        "scheduling: {fallbacks: 0}",
        "scheduling: {fallbacks: 2}",
        lambda scene: len(scene.decision().endpoints),
    ),
    "scheduling.respect_subset": (
        "scheduling: {respect_subset: true}",
        "scheduling: {respect_subset: false}",
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
        lambda scene: scene.runtime.parts.director.routing.profile.picker.guards.limits.budget_s,
    ),
    "scheduling.allow_unsupported": (
        "scheduling: {profile: {picker: {kind: random}}}",
        STRICT,
        picker_of,
    ),
    "limits.max_body_bytes": (
        "limits: {max_body_bytes: 1000}",
        "limits: {max_body_bytes: 20}",
        ReloadingScene.answers,
    ),
    "limits.max_streams": (
        "limits: {max_streams: 7}",
        "limits: {max_streams: 8}",
        lambda scene: scene.shared.overload_rejection.message,
    ),
    "limits.body_idle_s": (
        "limits: {body_idle_s: 7}",
        "limits: {body_idle_s: 8}",
        lambda scene: scene.shared.settings.body_idle_s,
    ),
    "flow_control.timeout_s": (HOLDING % "timeout_s: 5", HOLDING % "timeout_s: 9", deadline),
    "flow_control.empty_timeout_s": (
        HOLDING % "empty_timeout_s: 5",
        HOLDING % "empty_timeout_s: 9",
        lambda scene: deadline(scene, status=503),
    ),
    "flow_control.max_timeout_s": (
        HOLDING % "max_timeout_s: 5",
        HOLDING % "max_timeout_s: 9",
        lambda scene: deadline(scene, x_extproc_queue_timeout_ms="20000"),
    ),
    "flow_control.by_objective": (
        "pool: {objectives: {gold: 1}}\n" + HOLDING % "timeout_s: 5",
        "pool: {objectives: {gold: 1}}\n" + HOLDING % "timeout_s: 5, by_objective: {gold: 2}",
        lambda scene: deadline(scene, x_llm_d_inference_objective="gold"),
    ),
    "flow_control.timeout_header": (
        HOLDING % "timeout_s: 5",
        HOLDING % "timeout_s: 5, timeout_header: x-wait",
        lambda scene: deadline(scene, x_wait="2000"),
    ),
    "flow_control.busy_s": (HOLDING % "busy_s: 0.001", HOLDING % "busy_s: 1.0e+6", busy),
    "flow_control.max_requests": (
        HOLDING % "max_requests: 1",
        HOLDING % "max_requests: 2",
        lambda scene: holds(scene, 2),
    ),
    "flow_control.max_bytes": (
        HOLDING % "max_bytes: 30",
        HOLDING % "max_bytes: 300",
        lambda scene: holds(scene, 2),
    ),
    "flow_control.order": (HOLDING % "order: fcfs", HOLDING % "order: edf", go_order),
    "flow_control.fairness": (HOLDING % "timeout_s: 5", HOLDING % "fairness: none", go_order),
    "flow_control.half_life_s": (
        HOLDING % "half_life_s: 60",
        HOLDING % "half_life_s: 10",
        attained,
    ),
    "flow_control.bands": (
        HOLDING % "bands: [{priority: 0, max_requests: 1}]",
        HOLDING % "bands: [{priority: 1, max_requests: 1}]",
        lambda scene: holds(scene, 2),
    ),
    "flow_control.default_band": (
        HOLDING % "default_band: {max_requests: 1}",
        HOLDING % "default_band: {max_requests: 2}",
        lambda scene: holds(scene, 2),
    ),
    "flow_control.default_negative_band": (
        "pool: {objectives: {low: -1}}\n" + HOLDING % "default_negative_band: {max_requests: 1}",
        "pool: {objectives: {low: -1}}\n" + HOLDING % "default_negative_band: {}",
        lambda scene: holds(scene, 2, x_llm_d_inference_objective="low"),
    ),
    "flow_control.usage_limit": (
        HOLDING % "usage_limit: {min_ceiling: 0.1, max_ceiling: 0.1}",
        HOLDING % "usage_limit: {min_ceiling: 0.1, max_ceiling: 9}",
        held_by_loads,
    ),
    "flow_control.tenant_header": (
        HOLDING % "tenant_header: x-team",
        HOLDING % "tenant_header: x-unit",
        lambda scene: scene.flow_controller.tenant(scene.prepared(x_team="a", x_unit="b")),
    ),
    "flow_control.fallback_tenant_headers": (
        HOLDING % "fallback_tenant_headers: [X-Team]",
        HOLDING % "fallback_tenant_headers: [x-unit, x-team]",
        lambda scene: scene.flow_controller.tenant(scene.prepared(x_team="a", x_unit="b")),
    ),
    "flow_control.by_adapter": (
        HOLDING % "by_adapter: false",
        HOLDING % "by_adapter: true",
        lambda scene: scene.flow_controller.tenant(scene.prepared()),
    ),
    "flow_control.limit": (
        HOLDING % "timeout_s: 5",
        HOLDING % "timeout_s: 5, limit: {requests_per_s: 0}",
        lambda scene: [
            type(scene.flow_controller.reserve(scene.prepared(), scene.now)).__name__
            for _ in range(3)
        ],
    ),
    "flow_control.limits": (
        HOLDING % "tenant_header: x-team",
        HOLDING % "tenant_header: x-team, limits: {a: {requests_per_s: 0}}",
        lambda scene: [
            type(scene.flow_controller.reserve(scene.prepared(x_team="a"), scene.now)).__name__
            for _ in range(3)
        ],
    ),
    "responses.marker": (
        "responses: {marker: true}",
        "responses: {marker: false}",
        lambda scene: scene.shared.exchange_settings.response_marker,
    ),
    "responses.feedback": (
        "responses: {feedback: true}",
        "responses: {feedback: false}",
        lambda scene: scene.shared.exchange_settings.feedback,
    ),
    "responses.stream_sample_ratio": (
        "responses: {stream_sample_ratio: 0}",
        "responses: {stream_sample_ratio: 1}",
        lambda scene: scene.shared.settings.stream_sample_ratio,
    ),
    "responses.restore_model": (
        "responses: {restore_model: true}",
        "responses: {restore_model: false}",
        lambda scene: scene.shared.exchange_settings.restore_model,
    ),
    "responses.request_cost": (
        "responses: {}",
        "responses: {request_cost: {prompt: 1}}",
        lambda scene: scene.shared.settings.request_cost,
    ),
    "responses.request_id": (
        "responses: {request_id: false}",
        "responses: {request_id: true}",
        lambda scene: scene.shared.exchange_settings.request_id,
    ),
    "responses.list_models": (
        "responses: {list_models: false}",
        "responses: {list_models: true}",
        models_page,
    ),
    "decisions.decisions": (
        "decisions: {decisions: 5}",
        "decisions: {decisions: 0}",
        lambda scene: (scene.answers(), len(scene.picker.decisions)),
    ),
    "decisions.header": (
        "decisions: {header: false}",
        "decisions: {header: true}",
        lambda scene: scene.shared.settings.format_decision is not None,
    ),
    "decisions.metadata": (
        "decisions: {metadata: false}",
        "decisions: {metadata: true}",
        lambda scene: scene.shared.settings.describe_decision is not None,
    ),
    "decisions.scores": (
        "decisions: {scores: false}",
        "decisions: {scores: true}",
        lambda scene: scene.shared.exchange_settings.scores,
    ),
    "log.level": (
        "log: {level: info}",
        "log: {level: error}",
        lambda _: logging.getLogger("extproc").level,
    ),
    "log.requests": (
        "log: {requests: off}",
        "log: {requests: all}",
        lambda scene: type(scene.shared.observer.observe_request("")).__name__,
    ),
}


def test_every_live_field_has_a_case():
    """A live field without a probe here does not land."""
    listed = {
        f"{section}.{name}".lstrip(".") for section, live in reloading.LIVE.items() for name in live
    }
    assert set(LIVE) == listed


@pytest.mark.parametrize("field", LIVE)
async def test_a_live_field_applies_at_once(field, tmp_path):
    """After a reload a picker behaves like one that was started with the new configuration."""
    file = tmp_path / "first.py"
    file.write_text("s3cret" if field == "server.admin_token_file" else PLUGIN)
    before, after = (read(text.replace("FILE", str(file)) + "\n") for text in LIVE[field][:2])
    look = LIVE[field][2]
    old = look(ReloadingScene(before))
    reloaded = ReloadingScene(before)
    reloaded.read_again(after)
    observed = look(reloaded)
    fresh = ReloadingScene(after)
    fresh.picker.apply_settings(after)  # sets the level, as `run` does
    assert observed == look(fresh)
    assert observed != old


async def test_waiting_requests_go_on_where_a_reload_allows_it():
    """At once, also where a priority is held and nothing else happens."""
    text = HOLDING % "usage_limit: {min_ceiling: %s, max_ceiling: %s}"
    scene = ReloadingScene(read(text % (0.1, 0.1)))
    scene.observe(0.0)  # and half of the KV cache
    queued = scene.held()
    scene.read_again(read(text % (0.9, 0.9)))
    for _ in range(20):
        await asyncio.sleep(0)
    assert isinstance(queued.admission.result(), Admission)


def test_scrapes_follow_the_age_at_which_loads_turn_unknown():
    """Intervals derive from `stale_after_s`; those of idle endpoints would outlast a shorter one."""
    scene = ReloadingScene(read("scrape: {stale_after_s: 60}"))
    shorter = read("scrape: {stale_after_s: 4}")
    scene.read_again(shorter)
    assert scene.runtime.scraper.settings == factory.build_scraping(shorter.scrape)
