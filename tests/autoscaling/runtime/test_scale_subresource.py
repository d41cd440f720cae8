from __future__ import annotations

import asyncio
import json

import pytest

from extproc.autoscaling.interface import ScalingDecision
from extproc.autoscaling.runtime import autoscaler, scale_subresource
from extproc.autoscaling.runtime.actuator import ActuatorError
from extproc.config import loader
from extproc.config.autoscaling import ScaleTarget
from extproc.discovery.kubernetes.api_responses import ApiError
from extproc.discovery.kubernetes.settings import KubernetesSettings
from extproc.supervision import Supervisor
from tests.support.virtual_loop import VirtualLoop

HPA, SCALED_OBJECT = scale_subresource.KINDS
TARGET = ScaleTarget(name="vllm", namespace="n").filled


def listed(*names, target="vllm", kind="Deployment"):
    reference = {"kind": kind, "name": target}
    items = [{"metadata": {"name": name}, "spec": {"scaleTargetRef": reference}} for name in names]
    return json.dumps({"kind": "List", "items": items}).encode()


class ApiFixture:
    """An API server whose answers a test sets, by plural name."""

    identity = "me"

    def __init__(self, **answers):
        self.answers = {HPA.plural: listed(), SCALED_OBJECT.plural: ApiError(404, "none")} | answers
        self.paths = []

    async def send(self, method, path, body=None):
        self.paths.append((method, path))
        return self.answers[path.rpartition("/")[2]]


class TimeLimitFixture:
    """Takes the place of the API server, and keeps the time limits of requests.

    Args:
        renewal_s: Seconds that loading credentials takes.
    """

    generation = 0

    def __init__(self, renewal_s=0.0):
        self.limits_s = []
        self._renewal_s = renewal_s

    async def send(self, method, path, *, body=None, seconds, kind):
        self.limits_s.append(seconds)
        return (
            ApiError(401, "expired", credentials_expired=True) if len(self.limits_s) % 2 else b"{}"
        )

    async def renew(self, generation):
        await asyncio.sleep(self._renewal_s)


@pytest.mark.parametrize(("renew_s", "limit_s"), [(10.0, 4.0), (5.0, 4.0), (14.0, 0.8)])
async def test_requests_are_over_before_another_replica_can_lead(renew_s, limit_s):
    """Also the second one with fresh credentials, however short the election leaves it."""
    text = f"""
apiVersion: extproc/v1alpha1
kind: ExtProcConfig
cluster: {{lease: {{duration_s: 15, renew_s: {renew_s}}}}}
pool: {{autoscaling: {{target: {{name: vllm}}}}}}
"""
    client = autoscaler._build_cluster(loader.settings(loader.parse(text, where="f")), "me")
    server = client._server = TimeLimitFixture()
    assert await client.send("GET", "/") == b"{}"
    assert server.limits_s == pytest.approx([limit_s / 2.0] * 2)


@pytest.mark.parametrize(
    ("method", "renewal_s", "limits_s"),
    [
        ("PATCH", 1.0, [2.0, 2.0]),
        ("PATCH", 3.0, [2.0, 1.0]),
        ("PATCH", 8.0, [2.0]),
        ("POST", 8.0, [2.0]),
        ("GET", 8.0, [2.0, 2.0]),
    ],
)
def test_a_change_is_not_sent_again_once_another_replica_may_lead(method, renewal_s, limits_s):
    """Slow credentials let a reading through; a change ends within the time of the election."""
    client = scale_subresource.ScaleClient(KubernetesSettings(sources=()), "me", 5.0)
    server = client._server = TimeLimitFixture(renewal_s)
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        answer = runner.run(client.send(method, "/", {}))
    assert server.limits_s == pytest.approx(limits_s)
    assert isinstance(answer, ApiError) is (len(limits_s) == 1)


def scale(api):
    return scale_subresource.ScaleSubresourceActuator(TARGET, api, lambda: True)


async def test_a_target_that_states_no_replicas_has_those_that_are_available():
    """The API server refuses to read such a scale with 500, unlike that of its own failures."""
    unset = 'Internal error occurred: the spec replicas field ".spec.replicas" does not exist'
    api = ApiFixture(scale=ApiError(500, unset))
    for available in (0, 3):
        assert await scale(api).current_replicas(available) == available
    for status, message in ((500, "Internal error occurred: etcd is away"), (404, unset)):
        api.answers["scale"] = ApiError(status, message)
        assert isinstance(await scale(api).current_replicas(1), ActuatorError)


async def test_other_autoscalers_are_listed_in_the_namespace_of_the_target():
    """Of both kinds, and only those that name the target."""
    api = ApiFixture(scaledobjects=listed("s"))
    subject = scale_subresource.AutoscalerLister(TARGET, api)
    assert subject.names is None
    await subject.update()
    assert subject.names == ("ScaledObject s",)
    api.answers |= {HPA.plural: listed("h", target="other"), SCALED_OBJECT.plural: listed("s")}
    await subject.update()
    assert subject.names == ("ScaledObject s",)
    assert {path for _, path in api.paths} == {
        "/apis/autoscaling/v2/namespaces/n/horizontalpodautoscalers",
        "/apis/keda.sh/v1alpha1/namespaces/n/scaledobjects",
    }


@pytest.mark.parametrize(
    "failure",
    [
        ApiError(0, "no answer"),
        ApiError(403, "no"),
        ApiError(429, "busy"),
        ApiError(500, "no"),
        b"<",
    ],
)
async def test_scaling_stays_paused_while_lists_of_other_autoscalers_fail(failure, caplog):
    """Beside an HPA nothing is scaled in an outage, however long it lasts and however it ends."""
    caplog.set_level("INFO", "extproc.server")
    api = ApiFixture(horizontalpodautoscalers=listed("h"))
    subject = scale(api)
    await subject.update_competing_autoscalers()
    assert not subject.can_scale
    api.answers[HPA.plural] = failure
    for _ in range(20):
        await subject.update_competing_autoscalers()
        assert not subject.can_scale
    api.answers[HPA.plural] = listed()
    assert await subject.update_competing_autoscalers() == 60.0
    assert subject.can_scale
    assert "no other autoscaler of Deployment n/vllm is left" in caplog.text


async def test_scaling_continues_while_lists_of_other_autoscalers_fail():
    """Scaling continues if no other autoscaler was known."""
    api = ApiFixture()
    subject = scale(api)
    await subject.update_competing_autoscalers()
    assert subject.can_scale
    for failure in (ApiError(0, "no answer"), ApiError(403, "no"), ApiError(503, "busy")):
        api.answers[HPA.plural] = failure
        await subject.update_competing_autoscalers()
        assert subject.can_scale


async def test_scale_waits_until_every_kind_was_listed(caplog):
    """A first list that fails says nothing of other autoscalers; the log names it once."""
    api = ApiFixture(horizontalpodautoscalers=ApiError(503, "starting"))
    subject = scale(api)
    pauses = [await subject.update_competing_autoscalers() for _ in range(6)]
    assert not subject.can_scale
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert caplog.text.count("is not scaled until horizontalpodautoscalers in n were listed") == 1
    api.answers[HPA.plural] = listed()
    await subject.update_competing_autoscalers()
    assert subject.can_scale


async def test_scale_reports_a_lost_permission_after_several_refusals():
    """The first look of all names it at once."""
    subject = scale(ApiFixture(scale=ApiError(403, "no")))
    assert 'resources: ["deployments/scale"]' in (await subject.current_replicas(1)).message
    api = ApiFixture(scale=b'{"spec": {"replicas": 2}}')
    subject = scale(api)
    assert await subject.current_replicas(1) == 2
    api.answers["scale"] = ApiError(403, "no")
    advised = ["add to a Role" in (await subject.current_replicas(1)).message for _ in range(4)]
    assert advised == [False, False, False, True]


async def test_autoscaler_list_reports_a_missing_permission_after_several_refusals(caplog):
    """An API server that has just started answers 403 for a moment."""
    api = ApiFixture(scaledobjects=ApiError(403, "no"))
    subject = scale(api)
    for _ in range(3):
        await subject.update_competing_autoscalers()
        assert not subject.can_scale
        assert "no right to list" not in caplog.text
    assert await subject.update_competing_autoscalers() == 60.0
    assert subject.can_scale
    await subject.update_competing_autoscalers()
    assert caplog.text.count("no right to list scaledobjects in n") == 1


async def test_autoscaler_list_reports_an_uninstalled_kind_after_several_refusals():
    """The definitions of an API server that has just started come a moment later."""
    api = ApiFixture(scaledobjects=listed("s"))
    subject = scale(api)
    await subject.update_competing_autoscalers()
    api.answers[SCALED_OBJECT.plural] = ApiError(404, "no such resource")
    for _ in range(3):
        await subject.update_competing_autoscalers()
        assert not subject.can_scale
    await subject.update_competing_autoscalers()
    assert subject.can_scale


async def test_events_that_cannot_be_written_are_logged_with_the_missing_right(caplog):
    """Once, with the namespace of the target and what to add to a Role there."""

    class ForbiddingFixture:
        generation = 0

        async def send(self, method, path, **_):
            return ApiError(403, "events is forbidden")

    client = scale_subresource.ScaleClient(KubernetesSettings(sources=()), "me", 5.0)
    client._server = ForbiddingFixture()
    for _ in range(2):
        await client.write_event(TARGET, "Scaled", "from 1 to 2 replicas")
    assert caplog.text.count("no Event can be written in n: 403 events is forbidden; add to a") == 1
    assert 'resources: ["events"], verbs: ["create"]' in caplog.text


async def test_scale_writes_further_events_after_an_event_raised():
    """An Event that raises is counted, and the look for rivals is not begun anew."""
    reasons, written = [], asyncio.Event()

    class BrokenApi(ApiFixture):
        async def write_event(self, about, reason, note, *, warning=False):
            reasons.append(reason)
            if len(reasons) == 1:
                raise ValueError(note)
            written.set()

    api, supervisor = BrokenApi(scale=b"{}"), Supervisor()
    subject = scale_subresource.ScaleSubresourceActuator(TARGET, api, lambda: True, supervisor)
    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(subject.run())
        for replicas in (2, 3):
            assert await subject.scale(ScalingDecision(replicas, "load"), 1) is None
        await written.wait()
        running.cancel()
    assert reasons == ["Scaled", "Scaled"]
    assert supervisor.failures["autoscaling"] == 1
    lists = [path for method, path in api.paths if method == "GET"]
    assert len(lists) == len(scale_subresource.KINDS)
