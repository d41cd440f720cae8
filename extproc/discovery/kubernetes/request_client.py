"""Single requests to an API server, for components outside of discovery that read and write there.

The client below is heavy and optional, so that it is imported on demand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from extproc.discovery.kubernetes import api_responses
from extproc.discovery.kubernetes.settings import KubernetesSettings
from extproc.errors import ConfigError

if TYPE_CHECKING:
    from extproc.discovery.kubernetes import api_client


class ApiRequestClient:
    """Connection to an API server; base of the clients of Leases, reviews and scale targets."""

    def __init__(self, settings: KubernetesSettings) -> None:
        self._settings = settings
        self._server: api_client.KubernetesApiClient | None = None

    async def open(self) -> None:
        """Load configuration and credentials.

        Raises:
            ConfigError: The address or credentials are missing or broken.
        """
        from extproc.discovery.kubernetes import api_client  # noqa: PLC0415 - heavy, not for everybody

        self._server = api_client.KubernetesApiClient(self._settings)
        await self._server.open()

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            await self._server.close()

    async def send_once(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        seconds: float,
        kind: str = "application/json",
    ) -> bytes | api_responses.ApiError:
        """Send a request, and renew credentials that have expired for the next one.

        Args:
            body: Object to send as JSON; None for no body.
            seconds: Time limit of the request (seconds); renewing may take longer.
            kind: Content type of the body.

        Returns:
            The body of the answer, or an error; with `credentials_expired` where another attempt has
            fresh credentials.
        """
        if self._server is None:
            return api_responses.ApiError(0, "not connected")
        generation = self._server.generation
        answer = await self._server.send(method, path, body=body, seconds=seconds, kind=kind)
        if isinstance(answer, api_responses.ApiError) and answer.credentials_expired:
            try:
                await self._server.renew(generation)
            except ConfigError as error:
                return api_responses.ApiError(0, str(error))
        return answer
