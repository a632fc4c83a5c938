"""The batch service: batches and files over gRPC, and their composition."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
from typing_extensions import override

from router_svc.call_metadata import metadata_of, tenant_of
from router_svc.durable.batches.batch_servicer import BatchServicer
from router_svc.durable.batches.batch_sql import BatchStore
from router_svc.durable.files import FileManager
from router_svc.durable.limits import BatchLimits, TaskLimits
from router_svc.durable.sweeper import Sweeper, Sweeps, sweep_once
from router_svc.durable.tasks.task_events import TaskEventBus
from router_svc.durable.tasks.task_media import TaskMedia
from router_svc.durable.uploads import IDLE_SECONDS, incomplete_stream, with_idle_timeout
from router_svc.store.database import RouterDatabase
from weft.api.router.v1 import batch_service_pb2 as batch_pb
from weft.api.router.v1 import batch_service_pb2_grpc, file_service_pb2_grpc
from weft.api.router.v1 import file_service_pb2 as file_pb
from weft.dispatch.agents import KnownNames
from weft.durable.batches import (
    BATCH_OUTPUT,
    MAX_PIECE_BYTES,
    RESULT,
    TASK_INPUT,
    BatchClient,
    FileClient,
)
from weft.kernel.clock import Clock, SystemClock
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.principal import MESH_ACCESS
from weft.kernel.rpc import answering, answers
from weft.kernel.rpc_auth import caller
from weft.kernel.service import Service

DEFAULT_LISTED_FILES = 100

Context = grpc.aio.ServicerContext[Any, Any]


_OF_SERVICES = frozenset({BATCH_OUTPUT, RESULT})
"""Purposes of files that only the services of the mesh write."""


class FileServicer(file_service_pb2_grpc.FileServiceServicer):
    """FileService over the file manager."""

    def __init__(self, files: FileManager, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._files = files
        self._idle_seconds = idle_seconds

    @override
    @answers
    async def UploadFile(
        self, request_iterator: AsyncIterator[file_pb.UploadFileRequest], context: Context
    ) -> file_pb.UploadFileResponse:
        tenant = _tenant(context)
        async with aclosing(with_idle_timeout(aiter(request_iterator), idle_seconds=self._idle_seconds)) as messages:
            first = await anext(messages, None)
            if first is None:
                raise incomplete_stream()
            if first.file.purpose in _OF_SERVICES:
                caller().require(MESH_ACCESS)
            if first.file.purpose == TASK_INPUT:
                raise invalid_field("file.purpose", "is that of what is submitted with a task")
            new = file_pb.File(
                tenant=tenant,
                name=first.file.name,
                purpose=first.file.purpose,
                media_type=first.file.media_type,
            )
            async with aclosing(_content(first, messages)) as content:
                file = await self._files.save(new, content)
        return file_pb.UploadFileResponse(file=file)

    @override
    @answers
    async def GetFile(self, request: file_pb.GetFileRequest, context: Context) -> file_pb.GetFileResponse:
        file = await self._files.get(_tenant(context), _id(request.id))
        return file_pb.GetFileResponse(file=file)

    @override
    @answers
    async def ListFiles(self, request: file_pb.ListFilesRequest, context: Context) -> file_pb.ListFilesResponse:
        return await self._files.list_page(
            _tenant(context),
            purpose=request.purpose,
            after=_id(request.after, "after") if request.after else "",
            limit=request.limit or DEFAULT_LISTED_FILES,
        )

    @override
    async def ReadFile(
        self, request: file_pb.ReadFileRequest, context: Context
    ) -> AsyncGenerator[file_pb.ReadFileResponse]:
        async with answering(context), aclosing(self._files.read(_tenant(context), _id(request.id))) as content:
            async for data in content:
                yield file_pb.ReadFileResponse(data=data)

    @override
    @answers
    async def DeleteFile(self, request: file_pb.DeleteFileRequest, context: Context) -> file_pb.DeleteFileResponse:
        await self._files.delete(_tenant(context), _id(request.id))
        return file_pb.DeleteFileResponse()


async def _content(
    first: file_pb.UploadFileRequest, messages: AsyncIterator[file_pb.UploadFileRequest]
) -> AsyncGenerator[bytes]:
    """Yields the content; the last message states its length, because a broken connection may look like an end."""
    yield _data(first)
    size = len(first.data)
    is_whole = 0 < size == first.file.byte_count
    async for message in messages:
        size += len(_data(message))
        is_whole = message.HasField("file")
        if is_whole and message.file.byte_count != size:
            raise invalid_field("file.byte_count", f"must be what was sent, which is {size}")
        yield message.data
    if not is_whole:
        raise incomplete_stream()


def _data(message: file_pb.UploadFileRequest) -> bytes:
    if len(message.data) > MAX_PIECE_BYTES:
        raise invalid_field("data", f"must have at most {MAX_PIECE_BYTES} bytes")
    return message.data


def _tenant(context: Context) -> str:
    return tenant_of(metadata_of(context))


def _id(text: str, field: str = "id") -> str:
    return require_token(text, field, MAX_REQUEST_ID_CHARS)


def build(
    database: RouterDatabase,
    limits: BatchLimits,
    task_limits: TaskLimits,
    events: TaskEventBus,
    *,
    clock: Clock | None = None,
    names: KnownNames | None = None,
    files: FileManager | None = None,
) -> "BatchService":
    """Returns the batch service on a database, not started. `events`: the bus of the task service in this process.

    `names`: models, routes and agents that items may name; None: any name is accepted. `files`: the file store that
    tasks share; None: one of its own.
    """
    chosen = clock or SystemClock()
    files = files or FileManager(database, limits, chosen)
    media = TaskMedia(files)
    batches = BatchServicer(BatchStore(database), limits, task_limits, events, chosen, names=names, media=media)
    return BatchService(database, files, batches, limits.sweep_interval_seconds, chosen)


class BatchService(Service):
    """Serves files and batches beside a router."""

    def __init__(
        self,
        database: RouterDatabase,
        files: FileManager,
        batches: BatchServicer,
        sweep_interval_seconds: float,
        clock: Clock,
    ) -> None:
        self._database = database
        self._files = files
        self._batches = batches
        self._file_servicer = FileServicer(files)
        self.files, self.batches = FileClient(self._file_servicer), BatchClient(batches)
        """The clients of the services in this process."""
        self._sweeps: Sweeps = {"files": self._files.sweep, "batches": self._batches.sweep}
        self._sweeper = Sweeper("batch-sweeper", self._sweeps, sweep_interval_seconds, clock)
        self._is_open = False

    @override
    @property
    def service_names(self) -> Sequence[str]:
        return (
            file_pb.DESCRIPTOR.services_by_name["FileService"].full_name,
            batch_pb.DESCRIPTOR.services_by_name["BatchService"].full_name,
        )

    @override
    def register(self, server: grpc.aio.Server) -> None:
        file_service_pb2_grpc.add_FileServiceServicer_to_server(self._file_servicer, server)
        batch_service_pb2_grpc.add_BatchServiceServicer_to_server(self._batches, server)

    @override
    async def start(self) -> None:
        await self._database.open()
        self._is_open = True
        await sweep_once(self._sweeps)
        self._batches.start()
        self._sweeper.start()

    @override
    async def stop(self, grace_seconds: float) -> None:
        if not self._is_open:
            return
        self._is_open = False
        await self._sweeper.stop()
        await self._files.stop(grace_seconds)
        await self._batches.stop(grace_seconds)
        await self._database.close()
