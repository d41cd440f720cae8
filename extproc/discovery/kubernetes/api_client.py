"""Kubernetes API client on top of the official one: configuration, tokens, TLS, sessions.

Importing this takes half a second and 20 MB, so `controller` does it only on demand.

What comes back is left as bytes: the client's own models would cost a core at 1,000 pods a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

import aiohttp
import yaml
from kubernetes.aio import client, config
from kubernetes.aio.config import incluster_config

from extproc.discovery.kubernetes import api_responses, settings
from extproc.discovery.kubernetes.watch_plan import WatchedCollection
from extproc.errors import ConfigError

#: What a connection may end with, besides an answer.
_CONNECTION_ERRORS = (aiohttp.ClientError, OSError, TimeoutError, EOFError)

#: What broken kubeconfig files make the client raise, besides its own error.
_PROTOCOL_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
    yaml.YAMLError,
)

_JSON = "application/json"

#: Longest Retry-After that is obeyed (seconds): pools stand still meanwhile.
_MAX_RETRY_AFTER_S = 10

#: Longest body of an error that is read.
_MAX_ERROR_BYTES = 64 * 1024

#: A peer that vanished without a word is noticed after 15 + 3 * 5 seconds; a watch may be silent
#: for minutes.
_KEEPALIVE = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 3,
}


class _Session:
    """One client session, closed after retirement as soon as its last reader ends."""

    def __init__(self, client: client.ApiClient) -> None:
        self.client = client
        self._users = 0
        self._retired = False

    @contextlib.asynccontextmanager
    async def used(self) -> AsyncIterator[client.ApiClient]:
        self._users += 1
        try:
            yield self.client
        finally:
            self._users -= 1
            await self._close_if_idle()

    async def retire(self) -> None:
        self._retired = True
        await self._close_if_idle()

    async def _close_if_idle(self) -> None:
        if self._retired and not self._users:
            await self.client.close()


class KubernetesApiClient:
    """Client of one API server.

    Attributes:
        name: Its address, for people.
        generation: Number of the credentials in use.
    """

    def __init__(self, settings: settings.KubernetesSettings) -> None:
        self._settings = settings
        self._session: _Session | None = None
        #: Whether the credentials are those of the pod; once so, always: its token may be missing
        #: for a moment.
        self._in_cluster = False
        self.generation = 0
        self._renewing = asyncio.Lock()
        self.name = "the API server"

    async def open(self) -> None:
        """Loads the configuration; raises `ConfigError` if it is missing or broken."""
        in_cluster = self._in_cluster or (not self._settings.kubeconfig and _in_cluster_token())
        client = await _load_configuration(self._settings, in_cluster=in_cluster)
        self._in_cluster = in_cluster
        old, self._session = self._session, _Session(client)
        self.generation += 1
        self.name = str(client.configuration.host)
        if old is not None:
            await old.retire()

    async def renew(self, generation: int) -> None:
        """Reloads tokens, certificates and address; requests in progress continue.

        Args:
            generation: Number of the credentials that failed; of many calls at once the first loads
                for all.

        Raises:
            ConfigError: If the configuration is broken now.
        """
        async with self._renewing:
            if generation == self.generation:
                await self.open()

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.retire()

    async def page(
        self, collection: WatchedCollection, more: str, *, limit: int
    ) -> bytes | api_responses.ApiError:
        """Fetches a page of a list.

        Args:
            more: Token of the page; empty for the first one.
            limit: Objects per page (count); 0 for all on one page.
        """
        wanted = {"limit": str(limit) if limit else "", "continue": more}
        query = {key: text for key, text in wanted.items() if text}
        settings = self._settings
        timeout = aiohttp.ClientTimeout(total=settings.request_s, sock_connect=settings.connect_s)
        async with self._request(collection, query, timeout) as answer:
            if isinstance(answer, api_responses.ApiError):
                return answer
            try:
                return await answer.read()
            except _CONNECTION_ERRORS as error:
                return api_responses.ApiError(0, _error_text(error))

    async def send(
        self, method: str, path: str, *, body: object = None, seconds: float, kind: str = _JSON
    ) -> bytes | api_responses.ApiError:
        """Sends any other request, for components that share the connection.

        Args:
            body: Object to send as JSON; None for no body.
            seconds: Time limit of the complete call (seconds).
            kind: Content type of the body, which selects the kind of a PATCH.
        """
        if self._session is None:
            return api_responses.ApiError(0, "not connected")
        limits = aiohttp.ClientTimeout(total=seconds)
        async with self._session.used() as client:
            answer = await _call_api(client, path, {}, limits, method=method, body=body, kind=kind)
            if isinstance(answer, api_responses.ApiError):
                return answer
            async with answer:
                try:
                    return await answer.read()
                except _CONNECTION_ERRORS as error:
                    return api_responses.ApiError(0, _error_text(error))

    @contextlib.asynccontextmanager
    async def watch(
        self, collection: WatchedCollection, version: str, seconds: int
    ) -> AsyncIterator[AsyncIterator[bytes] | api_responses.ApiError]:
        """Opens a watch and yields its bytes until it ends for any reason.

        Args:
            version: Resource version to go on after.
            seconds: Seconds after which the server ends the watch.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(
            total=seconds + self._settings.request_s, sock_connect=self._settings.connect_s
        )
        async with self._request(collection, query, timeout) as answer:
            if isinstance(answer, api_responses.ApiError):
                yield answer
                return
            _keep_alive(answer)
            async with contextlib.aclosing(_chunks(answer)) as chunks:
                yield chunks

    @contextlib.asynccontextmanager
    async def _request(
        self, collection: WatchedCollection, query: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse | api_responses.ApiError]:
        selectors = {"labelSelector": collection.labels, "fieldSelector": collection.fields}
        query = {**query, **{key: text for key, text in selectors.items() if text}}
        if self._session is None:
            yield api_responses.ApiError(0, "not connected")
            return
        async with self._session.used() as client:
            answer: aiohttp.ClientResponse | api_responses.ApiError
            try:
                # A watch may last for minutes, but it begins at once.
                async with asyncio.timeout(self._settings.request_s):
                    answer = await _call_api(client, collection.path, query, limits)
            except TimeoutError:
                answer = api_responses.ApiError(0, "no answer in time")
            try:
                yield answer
            finally:
                if isinstance(answer, aiohttp.ClientResponse):
                    answer.close()


async def _call_api(
    client: client.ApiClient,
    path: str,
    query: Mapping[str, str],
    limits: aiohttp.ClientTimeout,
    *,
    method: str = "GET",
    body: object = None,
    kind: str = _JSON,
) -> aiohttp.ClientResponse | api_responses.ApiError:
    try:
        method, url, headers, *_ = await client.param_serialize(
            method,
            path,
            query_params=list(query.items()),
            header_params={"Accept": _JSON} | ({} if body is None else {"Content-Type": kind}),
            auth_settings=["BearerToken"],
        )
        # A token file may end in a newline, which no header may contain.
        headers = {name: " ".join(text.split()) for name, text in headers.items()}
        call = await client.call_api(method, url, headers, body, _request_timeout=limits)
        response: aiohttp.ClientResponse = call.response
        if response.status in {200, 201}:
            return response
        async with response:
            error_body = await response.content.read(_MAX_ERROR_BYTES)
    except (config.ConfigException, ValueError) as error:
        # A token that no header may contain is a ValueError.
        return api_responses.ApiError(0, _error_text(error), credentials_expired=True)
    except _CONNECTION_ERRORS as error:
        return api_responses.ApiError(
            0, _error_text(error), credentials_expired=isinstance(error, aiohttp.ClientSSLError)
        )
    return api_responses.ApiError(
        response.status,
        api_responses.decode_status(error_body).message or response.reason or "",
        _seconds(response.headers.get("Retry-After", "")),
        credentials_expired=response.status == 401,
    )


async def _chunks(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes]:
    """Yields chunks until the watch ends, for any reason: the caller resumes from its version."""
    with contextlib.suppress(*_CONNECTION_ERRORS):
        async for chunk in response.content.iter_any():
            yield chunk


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    connection = response.connection
    transport = connection.transport if connection is not None else None
    link = transport.get_extra_info("socket") if transport is not None else None
    if link is None:
        return
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, number in _KEEPALIVE.items():
            # Not every system has them all.
            option = getattr(socket, name, None)
            if option is not None:
                link.setsockopt(socket.IPPROTO_TCP, option, number)


async def _load_configuration(
    settings: settings.KubernetesSettings, *, in_cluster: bool
) -> client.ApiClient:
    configuration = client.Configuration()
    # Every watch holds a connection; the default of 100 would leave the last ones waiting.
    configuration.connection_pool_maxsize = 0
    # Authorities of clusters may lack what Python 3.13 requires of them (`scrape.client.build_tls`).
    configuration.disable_strict_ssl_verification = True
    where = settings.kubeconfig
    try:
        if in_cluster:
            where = f"the service account, {incluster_config.SERVICE_TOKEN_FILENAME}"
            config.load_incluster_config(client_configuration=configuration)
        else:
            where = where or os.environ.get("KUBECONFIG", "") or "~/.kube/config"
            _check_exists(where)
            await config.load_kube_config(
                config_file=where,
                context=settings.context or None,
                client_configuration=configuration,
                persist_config=False,
            )
        # In a thread: it reads the system's authorities, for as long as 0.2 s.
        return await asyncio.to_thread(client.ApiClient, configuration=configuration)
    except (config.ConfigException, *_PROTOCOL_ERRORS) as error:
        raise ConfigError(
            "kubernetes",
            wanted="the address of an API server and credentials for it",
            got=f"{_error_text(error)} ({where})",
            fix="run inside a pod with a service account, or name a kubeconfig file",
        ) from error


def _check_exists(paths: str) -> None:
    """Check that a kubeconfig file is there; the client would miss a key of it instead.

    Raises:
        FileNotFoundError: None of the paths is.
    """
    named = (path for path in paths.split(os.pathsep) if path)
    # Path.expanduser raises where the user has no home.
    if not any(pathlib.Path(os.path.expanduser(path)).exists() for path in named):  # noqa: PTH111
        raise FileNotFoundError("no such file")


def _in_cluster_token() -> bool:
    """Returns True in a pod with a service account."""
    token = pathlib.Path(incluster_config.SERVICE_TOKEN_FILENAME)
    return token.is_file() and bool(os.environ.get(incluster_config.SERVICE_HOST_ENV_NAME))


def _seconds(text: str) -> float:
    """Parses Retry-After as seconds, up to 10; API servers do not use the form with a date."""
    return (
        float(min(int(text), _MAX_RETRY_AFTER_S))
        if text.isascii() and text.isdigit() and len(text) < 9
        else 0.0
    )


def _error_text(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
