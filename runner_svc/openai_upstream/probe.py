"""Probes of running servers, limited in time and size, without redirects, proxies and cookies."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from runner_svc.openai_upstream.server_probes import HEALTH, LISTED, MODELS, ServerProbe, lacks_list
from runner_svc.policy.model_names import ServerList, listed_models

MAX_ANSWER_BYTES = 8 * 1024 * 1024
WEFT = "weft"
"""Owner of a mesh's models in its model list. A mesh that followed itself would list each model repeatedly."""
NAME_ITS_MODELS = "list them beside its url, such as models: [{name: qwen}]"
"""Advice for an attached server that is a mesh."""
_READ_BYTES = 64 * 1024
_REFUSED = frozenset({401, 403})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A response to a probe."""

    status: int | None = None
    """HTTP status; None: no response before the timeout."""
    body: bytes = b""
    why: str = ""
    """Why the status or the body is missing."""


class Prober:
    """Sends probes; created by `probing`."""

    def __init__(self, session: aiohttp.ClientSession, seconds: float) -> None:
        self._session = session
        self._seconds = seconds

    async def get(self, url: str, key: str = "") -> Answer:
        """Returns the response to a GET. Server faults never raise."""
        headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            async with (
                asyncio.timeout(self._seconds),
                self._session.get(url, headers=headers, allow_redirects=False) as response,
            ):
                body = bytearray()
                async for chunk in response.content.iter_chunked(_READ_BYTES):
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        return Answer(
                            status=response.status, why=f"its answer is longer than {MAX_ANSWER_BYTES // 1024**2} MiB"
                        )
                return Answer(status=response.status, body=bytes(body))
        except TimeoutError:
            return Answer(why=f"it did not answer within {self._seconds:g} s")
        except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError):
            return Answer(why="it does not answer")
        except (aiohttp.ClientError, OSError, ValueError):
            return Answer(why="its answer is not HTTP")

    async def probe(self, base_url: str, key: str = "") -> ServerProbe:
        """Returns the response to a request for the server's models. Server faults never raise."""
        answer = await self.get(f"{base_url}{MODELS}", key)
        if lacks_list(answer.status):
            health = await self.get(f"{base_url}{HEALTH}", key)
            return ServerProbe(status=answer.status, health=health.status)
        if answer.status != LISTED or answer.why:
            return ServerProbe(status=answer.status, why=answer.why)
        return ServerProbe(status=answer.status, listed=listed_models(answer.body))


def list_of(probe: ServerProbe) -> ServerList:
    """Returns the models that a server lists, or why they are unknown."""
    if probe.status is None or probe.why:
        return ServerList(models=None, why=probe.why)
    if probe.status in _REFUSED:
        return ServerList(
            models=None, why=f"it refuses the key (status {probe.status})", remedy="correct api_key_env, or its value"
        )
    found = probe.listed
    if found is None:
        return ServerList(models=None, why=f"it has no list of models (status {probe.status})")
    if not found.is_list:
        return ServerList(models=None, why="its answer is not a list of models")
    if found.owners == {WEFT}:
        why = "it is a weft mesh; list its models one by one"
        return ServerList(models=None, why=why, remedy=NAME_ITS_MODELS)
    return ServerList(models=found)


@asynccontextmanager
async def probing(seconds: float) -> AsyncIterator[Prober]:
    """Opens a prober; `seconds` limits each complete response."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        yield Prober(session, seconds)
