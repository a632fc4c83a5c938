"""FileService over the file port; translation only."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
from typing_extensions import override

from router_svc.call_metadata import metadata_of, tenant_of
from router_svc.durable.batches.uploads import IDLE_SECONDS, incomplete_stream, with_idle_timeout
from weft.api.router.v1 import file_service_pb2 as pb
from weft.api.router.v1 import file_service_pb2_grpc
from weft.durable.files import BATCH_OUTPUT, MAX_PIECE_BYTES, FilePort, NewFile
from weft.durable.remote_stores import file_message
from weft.kernel.errors import invalid_field
from weft.kernel.names import MAX_REQUEST_ID_CHARS, require_token
from weft.kernel.principal import MESH_ACCESS
from weft.kernel.rpc import answering
from weft.kernel.rpc_auth import caller

DEFAULT_LISTED = 100

Context = grpc.aio.ServicerContext[Any, Any]


class FileServicer(file_service_pb2_grpc.FileServiceServicer):
    """FileService over the file port."""

    def __init__(self, files: FilePort, *, idle_seconds: float = IDLE_SECONDS) -> None:
        self._files = files
        self._idle_seconds = idle_seconds

    @override
    async def UploadFile(
        self, request_iterator: AsyncIterator[pb.UploadFileRequest], context: Context
    ) -> pb.UploadFileResponse:
        async with answering(context):
            tenant = _tenant(context)
            async with aclosing(
                with_idle_timeout(aiter(request_iterator), idle_seconds=self._idle_seconds)
            ) as messages:
                first = await anext(messages, None)
                if first is None:
                    raise incomplete_stream()
                if first.file.purpose == BATCH_OUTPUT:
                    caller().require(MESH_ACCESS)
                new = NewFile(tenant=tenant, name=first.file.name, purpose=first.file.purpose)
                async with aclosing(_content(first, messages)) as content:
                    file = await self._files.save(new, content)
            return pb.UploadFileResponse(file=file_message(file))
        raise AssertionError("abort has raised")

    @override
    async def GetFile(self, request: pb.GetFileRequest, context: Context) -> pb.GetFileResponse:
        async with answering(context):
            file = await self._files.get(_tenant(context), _id(request.id))
            return pb.GetFileResponse(file=file_message(file))
        raise AssertionError("abort has raised")

    @override
    async def ListFiles(self, request: pb.ListFilesRequest, context: Context) -> pb.ListFilesResponse:
        async with answering(context):
            page = await self._files.list_page(
                _tenant(context),
                purpose=request.purpose,
                after=_id(request.after, "after") if request.after else "",
                limit=request.limit or DEFAULT_LISTED,
            )
            return pb.ListFilesResponse(files=map(file_message, page.files), has_more=page.has_more)
        raise AssertionError("abort has raised")

    @override
    async def ReadFile(self, request: pb.ReadFileRequest, context: Context) -> AsyncGenerator[pb.ReadFileResponse]:
        async with answering(context), aclosing(self._files.read(_tenant(context), _id(request.id))) as content:
            async for data in content:
                yield pb.ReadFileResponse(data=data)

    @override
    async def DeleteFile(self, request: pb.DeleteFileRequest, context: Context) -> pb.DeleteFileResponse:
        async with answering(context):
            await self._files.delete(_tenant(context), _id(request.id))
            return pb.DeleteFileResponse()
        raise AssertionError("abort has raised")


async def _content(first: pb.UploadFileRequest, messages: AsyncIterator[pb.UploadFileRequest]) -> AsyncGenerator[bytes]:
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


def _data(message: pb.UploadFileRequest) -> bytes:
    if len(message.data) > MAX_PIECE_BYTES:
        raise invalid_field("data", f"must have at most {MAX_PIECE_BYTES} bytes")
    return message.data


def _tenant(context: Context) -> str:
    return tenant_of(metadata_of(context))


def _id(text: str, field: str = "id") -> str:
    return require_token(text, field, MAX_REQUEST_ID_CHARS)
