"""A picker whose /metrics takes tokens that a real API server reviews."""

from __future__ import annotations

import aiohttp
import pytest

from tests.support import kube, kube_picker, serving

PORT = 8000
READS_METRICS = [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]


def reviews():
    """Rights that the component of the manifests adds."""
    return kube.picker_rules("components/metrics-auth")


async def place(api, cluster, *, everywhere):
    """A namespace with a pool, and the kubeconfig of a picker for it."""
    namespace = await api.namespace("metrics")
    await api.create(kube.pool("vllm", namespace, (PORT,)))
    access = await api.account(namespace, kube.picker_rules(), everywhere=everywhere)
    return namespace, cluster.write_kubeconfig(namespace, access, namespace)


def guarded(where, **more):
    """A picker that reviews tokens."""
    namespace, kubeconfig = where
    pool = ("--pool-name", "vllm", "--pool-namespace", namespace)
    return kube_picker.picker(kubeconfig, *pool, "--metrics-endpoint-auth", **more)


async def scrape(picker, token=""):
    """Status and text of the page for a token."""
    url = f"http://{serving.LOCAL}:{picker.pages}/metrics"
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession() as http, http.get(url, headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.fixture(scope="module")
def where(live, api, cluster, crds):
    return live.run(place(api, cluster, everywhere=reviews()))


@pytest.fixture(scope="module")
def picker(live, where):
    with live.holding(guarded(where)) as item:
        yield item


async def test_metrics_are_for_tokens_of_accounts_with_the_right(api, where, picker):
    """One account may read the path, another is known and may not, and the rest is unknown."""
    namespace, _ = where
    reader = await api.account(namespace, [], everywhere=READS_METRICS)
    status, text = await scrape(picker, reader.token)
    assert status == 200
    assert "extproc_info" in text
    other = await api.account(namespace, kube.picker_rules())
    status, text = await scrape(picker, other.token)
    assert status == 403
    assert f"system:serviceaccount:{namespace}:{kube.account_of(other)} may not get" in text
    # The last character of a signature may not matter.
    for token in ("", "made-up", f"{reader.token[:-20]}{'A' * 20}"):
        assert (await scrape(picker, token))[0] == 401
    assert await picker.page("/healthz") == "ok\n"
    assert await picker.pool() == []


async def test_a_missing_right_to_review_is_logged(api, cluster, crds):
    """Nothing is served without a review, and the log says which rule is missing."""
    where = await place(api, cluster, everywhere=())
    async with guarded(where) as picker:
        result = picker.child.line("tokenreviews: 403")
        status, _ = await scrape(picker, "made-up")
        assert status == 503
        assert 'resources: ["tokenreviews"], verbs: ["create"]' in await result


@pytest.mark.slow
async def test_an_api_server_that_is_away_refuses_new_tokens_only(
    api, cluster, ours, where, picker
):
    """A token that was accepted counts on; another is accepted once the server is back."""
    namespace, _ = where
    reader = await api.account(namespace, [], everywhere=READS_METRICS)
    newer = await api.token(namespace, kube.account_of(reader), seconds=7200)
    assert (await scrape(picker, reader.token))[0] == 200
    cluster.stop()
    try:
        assert (await scrape(picker, newer.token))[0] == 503
        assert (await scrape(picker, reader.token))[0] == 200
    finally:
        await cluster.restart()

    async def again():
        return (await scrape(picker, newer.token))[0]

    await picker.until(again, lambda status: status == 200)
