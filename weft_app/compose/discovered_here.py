"""Engines and model files found on the machine of a running mesh, and which of them its runners serve."""

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from weft.api.gateway.v1.discovery_pb2 import DiscoveredFile, DiscoveredServer, Discovery
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import server_location
from weft.kernel.time.clock import Clock
from weft_app.compose.discovery import Discovered, discover
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig

if TYPE_CHECKING:
    from weft.api.runner.v1.added_model_pb2 import AddedModel

FRESH_SECONDS = 5.0
"""Maximum age of a cached result, so that many open pages cause one search."""
MAX_SERVERS = 64
MAX_LISTED_MODELS = 256
"""Maximum number of models returned per server."""


class DiscoveredHere:
    """Searches this machine for engines and model files, one search at a time and at most every FRESH_SECONDS."""

    def __init__(self, config: Callable[[], WeftConfig], home: WeftHome, clock: Clock) -> None:
        """`config` returns the active configuration."""
        self._config = config
        self._home = home
        self._clock = clock
        self._turn = asyncio.Lock()
        self._found: tuple[float, Discovery] | None = None

    async def __call__(self) -> Discovery:
        """Returns what is found. Raises UNSUPPORTED_OPERATION if the configuration disables discovery."""
        config = self._config()
        if config.discovery.mode == "no":
            raise WeftError(Reason.UNSUPPORTED_OPERATION, "the configuration says not to look (discovery.mode: no)")
        async with self._turn:
            known, now = self._found, self._clock.monotonic()
            if known is not None and now - known[0] < FRESH_SECONDS:
                return known[1]
            found = discovery_of(await discover(config.discovery, self._home), await self._served(config))
            self._found = self._clock.monotonic(), found
        return found

    async def _served(self, config: WeftConfig) -> frozenset[str]:
        # Imported here, as in `discover`: a start does not need it.
        from runner_svc.added_models_file import remembered_models  # noqa: PLC0415

        added = await asyncio.to_thread(remembered_models, self._home.state / "runners")
        return served_sources(config, added)


def served_sources(config: WeftConfig, added: "Collection[AddedModel]") -> frozenset[str]:
    """Returns what configured runners serve, including added models and servers.

    The result has sources and paths of models, and normalized addresses of servers (`server_location`).
    """
    served = set[str]()
    for runner in config.runners or ():
        urls = [runner.url, *(getattr(model, "url", None) for model in runner.models)]
        served |= {server_location(url) for url in urls if url}
        for model in runner.models:
            found = [getattr(model, name, None) for name in ("source", "path")]
            served |= {str(each) for each in found if each}
    return frozenset(
        served | {server_location(each.source) if each.HasField("server") else each.source for each in added}
    )


def discovery_of(found: Discovered, served: frozenset[str]) -> Discovery:
    """Returns the response of the HTTP API."""
    return Discovery(
        servers=[
            DiscoveredServer(
                program=server.program,
                version=server.version,
                title=server.title,
                source=server.url,
                models=server.models[:MAX_LISTED_MODELS],
                detail=server.why_empty,
                served=server_location(server.url) in served,
            )
            for server in found.servers[:MAX_SERVERS]
        ],
        files=[
            DiscoveredFile(
                name=file.name,
                source=file.model.source,
                file=file.model,
                served=not served.isdisjoint((file.model.source, file.model.path)),
            )
            for file in found.files
        ],
        files_left_out=found.left_out,
    )
