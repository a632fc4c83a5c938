"""ProcessService over gRPC: the health of this process with reasons."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
from typing_extensions import override

from weft import __version__
from weft.api.operations.v1 import process_service_pb2 as pb
from weft.api.operations.v1 import process_service_pb2_grpc
from weft.api.operations.v1.process_service_pb2 import DatabaseSchema
from weft.kernel.channels.rpc import AnsweringServicer, GenericHandlers
from weft.kernel.services.health import HealthSource
from weft.kernel.services.service_lifecycle import Service
from weft.kernel.telemetry.log_threshold import threshold_in_use


class SchemaSource(Protocol):
    """A database or its owner."""

    @property
    def known_schema(self) -> DatabaseSchema:
        """The locally known revision of its tables."""
        ...

    async def schema(self) -> DatabaseSchema:
        """Returns it with the revision of the database itself; empty if unknown."""
        ...


SCHEMA_SECONDS = 1.0
"""Timeout for reading the schemas of databases, which may be frozen."""


class SchemaLooks:
    """Reads the schemas of databases.

    A slow read is not cancelled: it may use the only connection by which a registry owns its database, and a cancelled
    statement breaks the connection. The next call waits for the same read.
    """

    def __init__(self, sources: Sequence[SchemaSource]) -> None:
        self._sources = sources
        self._looks: dict[SchemaSource, asyncio.Task[DatabaseSchema]] = {}

    async def known(self) -> list[DatabaseSchema]:
        """Returns the schemas, locally known ones for databases that do not answer within SCHEMA_SECONDS."""
        looks = [self._look(source) for source in self._sources]
        if looks:
            await asyncio.wait(looks, timeout=SCHEMA_SECONDS)
        return [
            look.result() if look.done() else source.known_schema
            for source, look in zip(self._sources, looks, strict=True)
        ]

    async def stop(self) -> None:
        """Cancels running reads."""
        for look in self._looks.values():
            look.cancel()
        await asyncio.gather(*self._looks.values(), return_exceptions=True)

    def _look(self, source: SchemaSource) -> asyncio.Task[DatabaseSchema]:
        look = self._looks.get(source)
        if look is None or look.done():
            look = self._looks[source] = asyncio.create_task(source.schema())
        return look


WatchingProcesses = Callable[[], Sequence[pb.WatchingProcess]]


class ProcessService(AnsweringServicer, Service, process_service_pb2_grpc.ProcessServiceServicer):
    """Reports the health of a process."""

    service_names = (pb.DESCRIPTOR.services_by_name["ProcessService"].full_name,)

    def __init__(
        self,
        health: HealthSource,
        *,
        schemas: Sequence[SchemaSource] = (),
        watching: WatchingProcesses | None = None,
    ) -> None:
        """`schemas`: its databases. `watching`: the processes that follow its watch, if it has one."""
        self._schemas = SchemaLooks(schemas)
        self._watching = watching or tuple
        self._health = health

    @override
    def register(self, server: grpc.aio.Server) -> None:
        add: Any = process_service_pb2_grpc.add_ProcessServiceServicer_to_server
        add(self, GenericHandlers(server))

    @override
    async def start(self) -> None:
        """Does nothing: it only answers calls."""

    @override
    async def stop(self, grace_seconds: float) -> None:
        """Cancels reads of schemas."""
        await self._schemas.stop()

    async def GetHealth(  # noqa: N802 - the name of the rpc
        self,
        request: pb.GetHealthRequest,  # noqa: ARG002
        context: Any,  # noqa: ARG002
    ) -> pb.GetHealthResponse:
        """See the contract."""
        report = self._health.report
        response = pb.GetHealthResponse(
            status=report.status,
            live=report.is_live,
            ready=report.is_ready,
            log_level=threshold_in_use().level,
            version=__version__,
            schemas=await self._schemas.known(),
            watching_processes=self._watching(),
        )
        for each in self._health.component_documents():
            added = response.components.add(**{name: each[name] for name in ("name", "state", "reason", "message")})
            added.since_time.FromJsonString(each["since"])
        return response
