"""A `FilePort` over gRPC."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from datetime import UTC
from typing import TYPE_CHECKING, Any, cast

import grpc

from weft.api.router.v1 import file_service_pb2 as pb
from weft.api.router.v1 import file_service_pb2_grpc
from weft.durable.files import MAX_PIECE_BYTES, FilePage, NewFile, StoredFile
from weft.durable.store_calls import TIMEOUT_SECONDS, answered, as_tenant, read_stream, upload

if TYPE_CHECKING:
    from weft.api.router.v1.file_service_pb2_grpc import FileServiceAsyncStub

_KIND = "files"


class RemoteFiles:
    """See FilePort."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self._timeout_seconds = timeout_seconds
        self._stub = cast("FileServiceAsyncStub", file_service_pb2_grpc.FileServiceStub(channel))

    async def save(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        """See FilePort.save."""
        call: Any = self._stub.UploadFile(metadata=as_tenant(new.tenant))
        async with aclosing(_messages(new, content)) as messages:
            done = await upload(call, messages, kind=_KIND, timeout_seconds=self._timeout_seconds)
        return file_of(done.file)

    async def get(self, tenant: str, file_id: str) -> StoredFile:
        """See FilePort.get."""
        found = await self._ask(self._stub.GetFile, tenant, pb.GetFileRequest(id=file_id))
        return file_of(found.file)

    async def list_page(self, tenant: str, *, purpose: str = "", after: str = "", limit: int = 100) -> FilePage:
        """See FilePort.list_page."""
        request = pb.ListFilesRequest(purpose=purpose, after=after, limit=limit)
        found = await self._ask(self._stub.ListFiles, tenant, request)
        return FilePage(files=[file_of(message) for message in found.files], has_more=found.has_more)

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        """See FilePort.read."""
        call: Any = self._stub.ReadFile(pb.ReadFileRequest(id=file_id), metadata=as_tenant(tenant))
        async with aclosing(read_stream(call, kind=_KIND, timeout_seconds=self._timeout_seconds)) as messages:
            async for message in messages:
                yield message.data

    async def delete(self, tenant: str, file_id: str) -> None:
        """See FilePort.delete."""
        await self._ask(self._stub.DeleteFile, tenant, pb.DeleteFileRequest(id=file_id))

    async def _ask(self, method: Any, tenant: str, request: object) -> Any:
        call = method(request, metadata=as_tenant(tenant), timeout=self._timeout_seconds)
        return await answered(call, kind=_KIND)


async def _messages(new: NewFile, content: AsyncIterator[bytes]) -> AsyncGenerator[pb.UploadFileRequest]:
    yield pb.UploadFileRequest(file=pb.File(name=new.name, purpose=new.purpose))
    size = 0
    async for data in content:
        for start in range(0, len(data), MAX_PIECE_BYTES):
            yield pb.UploadFileRequest(data=data[start : start + MAX_PIECE_BYTES])
        size += len(data)
    yield pb.UploadFileRequest(file=pb.File(byte_count=size))


def file_message(file: StoredFile) -> pb.File:
    """A file as it travels."""
    message = pb.File(id=file.id, tenant=file.tenant, name=file.name, purpose=file.purpose, byte_count=file.size)
    message.create_time.FromDatetime(file.created_at)
    message.expire_time.FromDatetime(file.expires_at)
    return message


def file_of(message: pb.File) -> StoredFile:
    """A file as it came."""
    return StoredFile(
        id=message.id,
        tenant=message.tenant,
        name=message.name,
        purpose=message.purpose,
        size=message.byte_count,
        created_at=message.create_time.ToDatetime(UTC),
        expires_at=message.expire_time.ToDatetime(UTC),
    )
