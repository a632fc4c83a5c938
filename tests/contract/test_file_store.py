"""Files that are kept, on every kind of database that a router may have."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kit.refusals import refusal_of
from stored_batches import NEW_FILE, World, content, running

from router_svc.durable.uploads import UPLOAD_LIMIT_SECONDS
from weft.api.router.v1 import file_service_pb2
from weft.durable.batches import BATCH_OUTPUT, MAX_PIECE_BYTES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

pytest_plugins = ("database_fixtures",)

BOB_FILE = file_service_pb2.File(tenant="bob", name="bob.jsonl", purpose=BATCH_OUTPUT)


@pytest.fixture
async def world(database_url: str) -> AsyncIterator[World]:
    async with running(database_url) as world:
        yield world


async def read(world: World, file_id: str, tenant: str = "ann") -> bytes:
    return b"".join([data async for data in world.files.read(tenant, file_id)])


async def test_file_round_trips_byte_for_byte_over_a_restart(database_url: str) -> None:
    data = bytes(range(256)) * 10
    async with running(database_url) as world:
        saved = await world.files.save(NEW_FILE, content(data[:100], b"", data[100:]))
    async with running(database_url) as world:
        assert await world.files.get("ann", saved.id) == saved
        assert (saved.name, saved.purpose, saved.byte_count) == ("lines.jsonl", "batch", len(data))
        assert await read(world, saved.id) == data


@pytest.mark.parametrize("size", [0, 1, MAX_PIECE_BYTES, MAX_PIECE_BYTES + 1, 3 * MAX_PIECE_BYTES])
async def test_files_of_any_length_are_stored_in_bounded_pieces(world: World, size: int) -> None:
    data = bytes(size)
    file = await world.files.save(NEW_FILE, content(data[: size // 2], data[size // 2 :]))
    assert file.byte_count == size
    chunks = [chunk async for chunk in world.files.read("ann", file.id)]
    assert b"".join(chunks) == data
    assert all(len(chunk) <= MAX_PIECE_BYTES for chunk in chunks)


async def test_tenant_reads_and_deletes_only_its_own_files(world: World) -> None:
    file = await world.files.save(NEW_FILE, content(b"a"))
    missing = await refusal_of(Reason.NOT_FOUND, world.files.get("ann", "file-none"))
    for asked in (world.files.get, world.files.delete):
        assert (await refusal_of(Reason.NOT_FOUND, asked("bob", file.id))).replace(file.id, "file-none") == missing
    await refusal_of(Reason.NOT_FOUND, read(world, file.id, "bob"))
    await refusal_of(Reason.NOT_FOUND, world.files.list_page("bob", after=file.id))
    assert list((await world.files.list_page("bob")).files) == []
    await world.files.delete("ann", file.id)
    for asked in (world.files.get, world.files.delete):
        await refusal_of(Reason.NOT_FOUND, asked("ann", file.id))
    assert await world.count("file_pieces") == 0


@pytest.mark.parametrize("file_id", ["", "a\0b", "x" * 500, "ä"])
async def test_malformed_file_id_is_rejected(world: World, file_id: str) -> None:
    await refusal_of(Reason.INVALID_ARGUMENT, world.files.get("ann", file_id))
    await refusal_of(Reason.INVALID_ARGUMENT, world.files.delete("ann", file_id))
    if file_id:
        await refusal_of(Reason.INVALID_ARGUMENT, world.files.list_page("ann", after=file_id))


async def test_files_are_listed_newest_first_in_pages_and_by_purpose(world: World) -> None:
    kept = [
        await world.files.save(file_service_pb2.File(tenant="ann", name=str(number), purpose=purpose), content(b"a"))
        for number, purpose in enumerate(["batch", "batch_output", "batch", "batch"])
    ]
    await world.files.save(BOB_FILE, content(b"b"))
    page = await world.files.list_page("ann", limit=3)
    assert [file.name for file in page.files] == ["3", "2", "1"]
    assert page.has_more
    page = await world.files.list_page("ann", after=kept[1].id, limit=3)
    assert ([file.name for file in page.files], page.has_more) == (["0"], False)
    page = await world.files.list_page("ann", purpose="batch")
    assert [file.name for file in page.files] == ["3", "2", "0"]
    await refusal_of(Reason.NOT_FOUND, world.files.list_page("ann", after="file-none"))
    for limit in (-1, 1001):
        await refusal_of(Reason.INVALID_ARGUMENT, world.files.list_page("ann", limit=limit))
    await refusal_of(Reason.INVALID_ARGUMENT, world.files.list_page("ann", purpose="video"))


async def test_file_with_interrupted_content_is_never_visible_and_removed_immediately(world: World) -> None:
    seen: list[int] = []

    async def breaking() -> AsyncIterator[bytes]:
        yield bytes(20 * MAX_PIECE_BYTES)
        seen.append(await world.count("file_pieces"))
        assert list((await world.files.list_page("ann")).files) == []
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await world.files.save(NEW_FILE, breaking())
    assert seen == [19]
    assert await world.count("files") == await world.count("file_pieces") == 0


async def test_oversized_file_is_rejected_during_upload(database_url: str) -> None:
    read_on: list[int] = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read_on.append(1)
            yield bytes(MAX_PIECE_BYTES)

    async with running(database_url, max_file_bytes=2 * MAX_PIECE_BYTES) as world:
        await world.files.save(NEW_FILE, content(bytes(2 * MAX_PIECE_BYTES)))
        words = await refusal_of(Reason.REQUEST_TOO_LARGE, world.files.save(NEW_FILE, endless()))
        assert words == f"file: must have at most {2 * MAX_PIECE_BYTES} bytes"
        assert len(read_on) <= 4
        assert await world.count("files") == 1


async def test_tenant_file_count_and_byte_quotas_are_enforced(database_url: str) -> None:
    async with running(database_url, max_files_per_tenant=2, max_tenant_file_bytes=10) as world:
        first = await world.files.save(NEW_FILE, content(b"12345"))
        words = await refusal_of(Reason.TOO_MANY_RESOURCES, world.files.save(NEW_FILE, content(b"123456")))
        assert "10 bytes" in words
        await world.files.save(NEW_FILE, content(b"12345"))
        words = await refusal_of(Reason.TOO_MANY_RESOURCES, world.files.save(NEW_FILE, content(b"")))
        assert "2 files" in words
        await world.files.save(BOB_FILE, content(b"1234567890"))
        await world.files.delete("ann", first.id)
        await world.files.save(NEW_FILE, content(b"12345"))
        assert await world.count("files") == 3


async def test_concurrent_uploads_cannot_exceed_the_byte_quota(database_url: str) -> None:
    async with running(database_url, max_tenant_file_bytes=10) as world:
        saves = [world.files.save(NEW_FILE, content(b"123456")) for _ in range(4)]
        results = await asyncio.gather(*saves, return_exceptions=True)
        refusals = [each for each in results if isinstance(each, WeftError)]
        assert [each.reason for each in refusals] == [Reason.TOO_MANY_RESOURCES] * len(refusals)
        assert await world.database.value("SELECT sum(size) FROM files") <= 10


@pytest.mark.parametrize("name", ["", "x" * 256, "a/b", "..", ".", "a\\b", "a\nb", "a\0b"])
async def test_file_name_with_a_path_or_unprintable_characters_is_rejected(world: World, name: str) -> None:
    new = file_service_pb2.File(tenant="ann", name=name, purpose="batch")
    assert "file.name" in await refusal_of(Reason.INVALID_ARGUMENT, world.files.save(new, content(b"a")))


async def test_unknown_purpose_is_rejected(world: World) -> None:
    new = file_service_pb2.File(tenant="ann", name="a", purpose="video")
    assert "file.purpose" in await refusal_of(Reason.INVALID_ARGUMENT, world.files.save(new, content(b"a")))


async def test_file_expires(database_url: str) -> None:
    async with running(database_url, keep_file_seconds=1_000.0, sweep_interval_seconds=300.0) as world:
        old = await world.files.save(NEW_FILE, content(b"a"))
        await world.clock.advance(899, sleepers=1)
        young = await world.files.save(NEW_FILE, content(b"b"))
        assert (await world.files.get("ann", old.id)).expire_time.seconds - old.create_time.seconds == 1_000
        await world.clock.advance(301, sleepers=1)
        await refusal_of(Reason.NOT_FOUND, world.files.get("ann", old.id))
        assert await read(world, young.id) == b"b"
        assert await world.count("files") == await world.count("file_pieces") == 1


async def test_crash_leftovers_are_removed_once_they_are_surely_incomplete(database_url: str) -> None:
    async with running(database_url) as world:
        file = await world.files.save(NEW_FILE, content(bytes(MAX_PIECE_BYTES + 1)))
        await world.database.change("UPDATE files SET is_whole = FALSE WHERE id = :id", id=file.id)
        await world.clock.advance(UPLOAD_LIMIT_SECONDS - 300, sleepers=1)
        assert await world.count("file_pieces") == 2
        await world.clock.advance(600, sleepers=1)
        assert await world.count("files") == await world.count("file_pieces") == 0


async def test_upload_that_takes_too_long_is_abandoned(world: World) -> None:
    async def slow() -> AsyncIterator[bytes]:
        yield bytes(2 * MAX_PIECE_BYTES)
        await world.clock.advance(UPLOAD_LIMIT_SECONDS + 600, sleepers=1)
        yield b"the rest"

    await refusal_of(Reason.DEADLINE_EXCEEDED, world.files.save(NEW_FILE, slow()))
    assert await world.count("files") == await world.count("file_pieces") == 0


async def test_file_deleted_during_a_read_is_not_reported_complete(world: World) -> None:
    file = await world.files.save(NEW_FILE, content(bytes(3 * MAX_PIECE_BYTES)))
    reading = world.files.read("ann", file.id)
    await anext(reading)
    await world.files.delete("ann", file.id)
    await refusal_of(Reason.NOT_FOUND, anext(reading))
