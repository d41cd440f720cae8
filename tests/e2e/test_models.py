"""Models and adapters through a real Envoy: asked for, kept apart, refused, and renamed in bodies."""

from __future__ import annotations

import json
import random

import pytest

from tests.e2e import backend, http1, http2, installation
from tests.e2e.test_modes import MODES, SEEING, every_mode

PATH = "/v1/chat/completions"
AUDIO = "/v1/audio/transcriptions"

CONFIG = (
    "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, "
    "scrape: {idle_interval_s: 0.2, models_interval_s: 0.2}, "
    "scheduling: {strategy: round-robin, unknown_model: reject}}"
)


def listing(base, *adapters):
    """Answers /v1/models as vLLM does."""
    cards = [{"id": base, "parent": None}, *({"id": name, "parent": base} for name in adapters)]
    body = json.dumps({"object": "list", "data": cards}).encode()
    return backend.saying(body, headers=[("content-type", "application/json")])


@pytest.fixture(scope="module")
def llama(live):
    with live.holding(backend.backend()) as item:
        item.plays["/v1/models"] = listing("llama", "sql")
        yield item


@pytest.fixture(scope="module")
def qwen(live):
    with live.holding(backend.backend()) as item:
        item.plays["/v1/models"] = listing("qwen", "math")
        yield item


@pytest.fixture(scope="module")
def listeners():
    return {}


@pytest.fixture(scope="module")
def place(live, llama, qwen, listeners, binary):
    change = lambda config: every_mode(config, listeners)  # noqa: E731  keeps the port table at hand
    with live.holding(
        installation.installed(
            llama.address,
            qwen.address,
            change=change,
            arguments=["--config-text", CONFIG],
            binary=binary,
        )
    ) as item:
        live.run(item.until(lambda result: known(result, llama) == known(result, qwen) == 2))
        yield item


def known(result, served):
    """Number of models that are known of a backend."""
    return result.get(f'extproc_endpoint_models{{endpoint="{served.address}"}}')


def chat(model, content="hello"):
    """A body whose spaces and order no encoder would make."""
    message = json.dumps(content, ensure_ascii=False)
    text = (
        f'{{ "messages":[{{"content":{message},"role":"user"}}],\t"model" :"{model}", "n":1.0e0}}'
    )
    return text.encode()


def requests_to(served, path):
    """Requests that arrived on a path, without those of the scraper."""
    return [ask for ask in served.asks if ask.path == path]


@pytest.mark.parametrize("mode", SEEING)
async def test_027_models_go_where_they_are_served(place, llama, qwen, listeners, mode):
    """Base models and adapters reach their own engine, however often round robin turns."""
    port = listeners[mode, "NONE"]
    for model, served in (("llama", llama), ("sql", llama), ("qwen", qwen), ("math", qwen)):
        for _ in range(3):
            answer = await http1.ask(port, PATH, chat(model))
            assert answer.json()["by"] == served.address
            assert requests_to(served, PATH)[-1].body == chat(model)


@pytest.mark.parametrize("mode", SEEING)
async def test_027_unknown_models_are_refused(place, llama, listeners, mode):
    """404 in OpenAI's shape, with the names there are; no engine hears of it."""
    before = len(requests_to(llama, PATH))
    answer = await http1.ask(listeners[mode, "NONE"], PATH, chat("gpt"))
    assert answer.status == 404
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "model_not_found")
    assert "`gpt` does not exist; there are: llama, math, " in error["message"]
    assert len(requests_to(llama, PATH)) == before


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize("framing", ["content-length", "chunked"])
async def test_027_kubeai_names_are_renamed_in_place(place, llama, listeners, mode, framing):
    """A visible body has one changed value and its length; another body is unchanged."""
    sent = chat("llama_sql", "llama_sql \u00e9 " * 10_000)
    cut = [sent[at : at + 9_999] for at in range(0, len(sent), 9_999)]
    how = {"chunks": cut} if framing == "chunked" else {"body": sent}
    if mode[0] not in SEEING:
        # Nothing of the model is known: anybody may get it, unchanged.
        assert (await http1.ask(listeners[mode], PATH, **how)).status == 200
        return
    answer = await http1.ask(listeners[mode], PATH, **how)
    assert answer.json()["by"] == llama.address
    got = requests_to(llama, PATH)[-1]
    assert got.body == sent.replace(b'"llama_sql"', b'"sql"')
    length = got.head.get("content-length")
    assert (
        length == str(len(got.body)) if length else "chunked" in got.head.get("transfer-encoding")
    )


async def test_027_a_cut_body_is_renamed_in_its_beginning(place, llama, listeners):
    """BUFFERED_PARTIAL: the engine gets the edited beginning and all of the rest."""
    rest = random.Random(1).randbytes(1_500_000).hex().encode()
    sent = b'{"model":"llama_sql","messages":[{"role":"user","content":"' + rest + b'"}]}'
    port = listeners["BUFFERED_PARTIAL", "NONE"]
    for how in ({"body": sent}, {"chunks": [sent[:1000], sent[1000:]]}):
        answer = await http1.ask(port, PATH, **how)
        assert answer.status == 200, answer.body
        got = requests_to(llama, PATH)[-1]
        assert got.size == len(sent) - len("llama_")
        assert answer.json()["by"] == llama.address


@pytest.mark.parametrize("mode", SEEING)
async def test_027_a_form_is_renamed(place, llama, listeners, mode):
    """Transcriptions: the field's bytes, and the file beside it as it was."""
    sent = (
        b'--B\r\nContent-Disposition: form-data; name="model"\r\n\r\nllama_sql\r\n'
        b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        + random.Random(2).randbytes(50_000)
        + b"\r\n--B--\r\n"
    )
    headers = [("content-type", "multipart/form-data; boundary=B")]
    answer = await http1.ask(listeners[mode, "NONE"], AUDIO, sent, headers=headers)
    assert answer.json()["by"] == llama.address
    assert requests_to(llama, AUDIO)[-1].body == sent.replace(b"llama_sql", b"sql")


async def test_027_a_body_ended_by_trailers_is_renamed(place, llama, listeners):
    """HTTP/2 with trailers, full duplex: renamed once, sent once."""
    sent = chat("llama_sql", "x" * 20_000)
    port = listeners["FULL_DUPLEX_STREAMED", "NONE"]
    await http2.ask(port, PATH, sent, trailers=[("x-checksum", "1")])
    assert requests_to(llama, PATH)[-1].body == sent.replace(b'"llama_sql"', b'"sql"')


async def test_027_renames_are_counted(place, listeners):
    """The metrics say how many bodies were edited, and nothing was left unedited."""
    before = await place.total("extproc_model_rewrites_total")
    await http1.ask(listeners["BUFFERED", "NONE"], PATH, chat("llama_sql"))
    result = await place.until(
        lambda values: values['extproc_model_rewrites_total{result="edited"}'] == before + 1
    )
    assert 'extproc_model_rewrites_total{result="unedited"}' not in result


async def test_027_an_adapter_loaded_later_is_found(place, llama, listeners):
    """A newly listed adapter is served from the next list on, a removed one no longer."""
    port = listeners["FULL_DUPLEX_STREAMED", "NONE"]
    assert (await http1.ask(port, PATH, chat("new"))).status == 404
    llama.plays["/v1/models"] = listing("llama", "sql", "new")
    await place.until(lambda result: known(result, llama) == 3)
    assert (await http1.ask(port, PATH, chat("llama_new"))).json()["by"] == llama.address
    llama.plays["/v1/models"] = listing("llama", "sql")
    await place.until(lambda values: known(values, llama) == 2)
    assert (await http1.ask(port, PATH, chat("llama_new"))).status == 404
