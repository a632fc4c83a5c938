"""`/v1/files` with OpenAI's client, and with invalid uploads."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator

import openai
import pytest
from file_script import MemoryFiles
from gateway_script import RawResponse, RunningGateway, head, serving

from gateway.gateway_config import BatchEdgeConfig, ConnectionLimits, GatewayConfig
from weft.api.router.v1 import file_service_pb2
from weft.durable.batches import MAX_PIECE_BYTES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

PATH = "/v1/files"
LINES = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'
PURPOSE = b'Content-Disposition: form-data; name="purpose"'
FILE = b'Content-Disposition: form-data; name="file"; filename="in.jsonl"'


def part(top: bytes, data: bytes) -> bytes:
    return b"--edge\r\n" + top + b"\r\n\r\n" + data + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--edge--\r\n"


GOOD = form(part(PURPOSE, b"batch"), part(FILE, LINES))


async def send(gateway: RunningGateway, body: bytes, **headers: str) -> RawResponse:
    given = {"Content-Type": "multipart/form-data; boundary=edge", **headers}
    return await gateway.request("POST", PATH, body, given)


async def test_client_can_request_an_expiry_and_the_store_decides() -> None:
    async with serving(files=MemoryFiles()) as gateway:
        made = await gateway.sdk.files.create(
            file=("in.jsonl", LINES), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert made.expires_at == 1769817600


async def test_purpose_can_follow_the_file() -> None:
    files = MemoryFiles()
    async with serving(files=files) as gateway:
        assert (await send(gateway, form(part(FILE, LINES), part(PURPOSE, b"batch")))).status == 200
        late = await send(gateway, form(part(FILE, LINES), part(PURPOSE, b"assistants")))
    assert late.refusal == (400, "invalid_argument", "purpose")
    assert files.text("file-1") == LINES.decode()
    assert len(files.kept) == 1


async def test_invalid_form_field_is_reported_and_nothing_is_stored() -> None:
    files = MemoryFiles()
    async with serving(files=files) as gateway:
        for body, param in (
            (form(part(PURPOSE, b"assistants"), part(FILE, LINES)), "purpose"),
            (form(part(PURPOSE, b"batch_output"), part(FILE, LINES)), "purpose"),
            (form(part(FILE, LINES)), "purpose"),
            (form(part(PURPOSE, b"batch") * 2, part(FILE, LINES)), "purpose"),
            (form(part(FILE.replace(b'"file"', b'"purpose"'), b"batch"), part(FILE, LINES)), "purpose"),
            (form(part(PURPOSE, b"batch")), "file"),
            (form(part(PURPOSE, b"batch"), part(FILE, b"")), "file"),
            (form(part(PURPOSE, b"batch"), part(FILE, LINES) * 2), "file"),
            (form(part(PURPOSE, b"batch"), part(b'Content-Disposition: form-data; name="file"', LINES)), "file"),
            (form(part(PURPOSE, b"batch"), part(FILE.replace(b"in.jsonl", b""), LINES)), "file"),
            (form(part(PURPOSE, b"batch"), part(FILE.replace(b"in.jsonl", b"x" * 256), LINES)), "file"),
            (form(part(PURPOSE, b"\xff"), part(FILE, LINES)), "purpose"),
        ):
            assert (await send(gateway, body)).refusal == (400, "invalid_argument", param)
    assert files.kept == {}


FORM = {"Host": "localhost", "Connection": "close", "Content-Type": "multipart/form-data; boundary=edge"}
HEAD_END, LAST_CHUNK = b"\r\n\r\n", b"0\r\n\r\n"


def chunked(body: bytes, size: int) -> bytes:
    """An upload in chunks of one size."""
    pieces = [body[index : index + size] for index in range(0, len(body), size)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return head(f"POST {PATH} HTTP/1.1", {**FORM, "Transfer-Encoding": "chunked"}) + chunks + LAST_CHUNK


class Counting(MemoryFiles):
    """Counts the bytes that were requested and not yet consumed, and stores nothing."""

    keeps_nothing = True
    sizes: list[int]

    async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
        self.sizes = []

        async def counted() -> AsyncGenerator[bytes]:
            async for piece in content:
                self.sizes.append(len(piece))
                yield piece

        return await super().save(new, counted())


async def test_large_file_is_forwarded_in_chunks_of_one_size() -> None:
    files = Counting(keeps_nothing=True)
    data = b"x" * (3 * MAX_PIECE_BYTES + 5)
    async with serving(files=files) as gateway:
        made = await gateway.sdk.files.create(file=("in.jsonl", data), purpose="batch")
    assert made.bytes == len(data)
    assert files.sizes == [MAX_PIECE_BYTES] * 3 + [5]


async def test_oversized_file_is_rejected_before_or_during_upload() -> None:
    files = MemoryFiles()
    config = GatewayConfig(port=0, batches=BatchEdgeConfig(max_file_bytes=1000))
    async with serving(files=files, config=config) as gateway:
        at_most = await send(gateway, form(part(PURPOSE, b"batch"), part(FILE, b"x" * 1000)))
        large = await send(gateway, form(part(PURPOSE, b"batch"), part(FILE, b"x" * 1001)))
        declared = await gateway.exchange(head(f"POST {PATH} HTTP/1.1", {**FORM, "Content-Length": "70000"}))
        streamed = await gateway.exchange(chunked(form(part(PURPOSE, b"batch"), part(FILE, b"x" * 70_000)), 9_000))
        field = await send(gateway, form(part(b'Content-Disposition: form-data; name="a"', b"x" * 9_000)))
    assert at_most.status == 200
    assert [each.refusal[:2] for each in (large, declared, streamed, field)] == [(413, "request_too_large")] * 4
    assert len(files.kept) == 1


@pytest.mark.parametrize(("megabytes", "status"), [(1, 413), (12, 200)])
async def test_uploads_larger_than_a_normal_body_may_use_more_chunks(megabytes: int, status: int) -> None:
    config = GatewayConfig(port=0, connections=ConnectionLimits(max_body_pieces=1_000))
    body = form(part(PURPOSE, b"batch"), part(FILE, b"x" * megabytes * 2**20))
    many = 1_300 * 700
    head, chunks = chunked(body[:-many], 2**17), chunked(body[-many:], 700)
    assert head.endswith(LAST_CHUNK)
    async with serving(files=MemoryFiles(), config=config) as gateway:
        answer = await gateway.exchange(head.removesuffix(LAST_CHUNK) + chunks.partition(HEAD_END)[2])
    assert answer.status == status


async def test_slow_upload_is_rejected() -> None:
    pace = ConnectionLimits(body_grace_seconds=0.05)
    files = MemoryFiles()
    config = GatewayConfig(port=0, connections=pace)
    async with serving(files=files, config=config) as gateway, gateway.connection() as (reader, writer):
        writer.write(chunked(GOOD, 40)[:-30])
        first = await reader.readline()
    assert first.startswith(b"HTTP/1.1 408 ")
    assert files.kept == {}


class Slow(MemoryFiles):
    """Stores files only once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go_on = asyncio.Event(), asyncio.Event()

    async def save(self, new: file_service_pb2.File, content: AsyncIterator[bytes]) -> file_service_pb2.File:
        self.entered.set()
        await self.go_on.wait()
        return await super().save(new, content)


async def test_slow_store_does_not_count_against_the_upload_timeout() -> None:
    files = Slow()
    pace = ConnectionLimits(body_grace_seconds=0.05)
    async with serving(files=files, config=GatewayConfig(port=0, connections=pace)) as gateway:
        sending = asyncio.create_task(send(gateway, form(part(PURPOSE, b"batch"), part(FILE, b"x" * 300_000))))
        await files.entered.wait()
        still_sending = await asyncio.wait({sending}, timeout=0.1)
        assert still_sending == (set(), {sending})
        files.go_on.set()
        assert (await sending).status == 200


async def test_concurrent_uploads_are_limited() -> None:
    files = Slow()
    config = GatewayConfig(port=0, batches=BatchEdgeConfig(max_uploads=1))
    async with serving(files=files, config=config) as gateway:
        sending = asyncio.create_task(send(gateway, GOOD))
        await files.entered.wait()
        refused = await send(gateway, GOOD)
        files.go_on.set()
        assert (await sending).status == 200
        assert (await send(gateway, GOOD)).status == 200
    assert refused.refusal[:2] == (429, "rate_limit_exceeded")
    assert "max_uploads" in refused.error["message"]


async def test_store_error_is_returned() -> None:
    full = WeftError(Reason.TOO_MANY_RESOURCES, "the tenant keeps all it may")
    files = MemoryFiles(save_failure=full)
    async with serving(files=files) as gateway:
        assert (await send(gateway, GOOD)).refusal[:2] == (429, "too_many_resources")
        files.failure = WeftError(Reason.SERVICE_UNAVAILABLE, "the router cannot be reached")
        assert (await gateway.request("GET", f"{PATH}/file-1")).refusal[:2] == (503, "service_unavailable")


async def test_another_tenant_gets_404() -> None:
    other = {"X-Tenant-ID": "other"}
    async with serving(files=MemoryFiles()) as gateway:
        await send(gateway, GOOD)
        statuses = [
            (await gateway.request(method, path, headers=other)).status
            for method, path in (
                ("GET", f"{PATH}/file-1"),
                ("GET", f"{PATH}/file-1/content"),
                ("DELETE", f"{PATH}/file-1"),
                ("GET", f"{PATH}?after=file-1"),
            )
        ]
        listed = (await gateway.request("GET", PATH, headers=other)).json
        own = await gateway.request("GET", f"{PATH}/file-1")
    assert statuses == [404] * 4
    assert listed == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert own.status == 200


async def test_files_are_listed_in_pages_in_both_orders() -> None:
    async with serving(files=MemoryFiles()) as gateway:
        for _ in range(5):
            await send(gateway, GOOD)
        newest = [file.id async for file in gateway.sdk.files.list(limit=2)]
        oldest = [file.id async for file in gateway.sdk.files.list(limit=2, order="asc")]
        page = await gateway.read(f"{PATH}?limit=2&after=file-4")
        last = await gateway.read(f"{PATH}?limit=2&order=asc&after=file-3")
        none = await gateway.read(f"{PATH}?purpose=batch_output")
    assert newest == ["file-5", "file-4", "file-3", "file-2", "file-1"]
    assert oldest == newest[::-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("file-3", "file-2", True)
    assert (last["first_id"], last["last_id"], last["has_more"]) == ("file-4", "file-5", False)
    assert none["data"] == []


async def test_invalid_list_parameter_is_reported() -> None:
    async with serving(files=MemoryFiles()) as gateway:
        for query, status, param in (
            ("limit=0", 400, "limit"),
            ("limit=10001", 400, "limit"),
            ("order=up", 400, "order"),
            ("purpose=video", 400, "purpose"),
            ("after=nope", 404, "after"),
            ("after=nope&order=asc", 400, "after"),
            ("after=", 400, "after"),
            ("unheard=1", 400, "unheard"),
        ):
            answer = await gateway.request("GET", f"{PATH}?{query}")
            assert (answer.refusal[0], answer.refusal[2]) == (status, param)


class Breaking(MemoryFiles):
    """Fails within a file."""

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        yield LINES[:10]
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the router has gone")


class Forgetful(MemoryFiles):
    """Has lost the end of a file without noticing."""

    async def read(self, tenant: str, file_id: str) -> AsyncGenerator[bytes]:
        yield LINES[:10]


@pytest.mark.parametrize("files", [Breaking(), Forgetful()])
async def test_interrupted_file_download_is_not_terminated_as_complete(files: MemoryFiles) -> None:
    async with serving(files=files) as gateway:
        made = await gateway.sdk.files.create(file=("in.jsonl", LINES), purpose="batch")
        with pytest.raises(openai.APIConnectionError):
            await gateway.sdk.files.content(made.id)


async def test_file_name_is_escaped_in_the_header() -> None:
    async with serving(files=MemoryFiles()) as gateway:
        named = FILE.replace(b"in.jsonl", "../a b\u00e9;x.jsonl".encode())
        made = json.loads((await send(gateway, form(part(PURPOSE, b"batch"), part(named, LINES)))).body)
        answer = await gateway.request("GET", f"{PATH}/{made['id']}/content")
    assert made["filename"] == "a b\u00e9;x.jsonl"
    assert answer.headers["content-disposition"] == "attachment; filename*=UTF-8''a%20b%C3%A9%3Bx.jsonl"
    assert answer.body == LINES
