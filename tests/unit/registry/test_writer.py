"""The registry's writes: one at a time, and what happens while the database does not tell about a commit."""

import asyncio

import pytest

from registry_svc.writer import SingleWriter
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason


class Database:
    """A database that may keep its callers waiting."""

    def __init__(self) -> None:
        self.is_in_doubt = False
        self.answer = asyncio.Event()
        self.memory = list[str]()

    async def write(self, word: str) -> str:
        await self.answer.wait()
        self.memory.append(word)
        return word


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("registry_svc.writer.DOUBT_SECONDS", 0.01)


async def refusal(write: "asyncio.Future[str]") -> str:
    with pytest.raises(WeftError) as refused:
        await write
    assert refused.value.reason is Reason.SERVICE_UNAVAILABLE
    return refused.value.message


async def test_commit_in_doubt_takes_effect_later_and_its_caller_is_told_that_it_is_unknown() -> None:
    database = Database()
    writer = SingleWriter(lambda: database.is_in_doubt)
    first = asyncio.ensure_future(writer.run(lambda: database.write("first")))
    second = asyncio.ensure_future(writer.run(lambda: database.write("second")))
    await asyncio.sleep(0)
    database.is_in_doubt = True
    assert "it has not told whether this was stored" in await refusal(first)
    assert "nothing was changed" in await refusal(second)
    third = asyncio.ensure_future(writer.run(lambda: database.write("third")))
    assert "nothing was changed" in await refusal(third)
    async with asyncio.timeout(1), writer.turn():
        assert database.memory == []  # a heartbeat does not wait
    database.is_in_doubt = False
    database.answer.set()
    assert await writer.run(lambda: database.write("fourth")) == "fourth"
    assert database.memory == ["first", "fourth"]


async def test_write_continues_without_its_caller_and_one_that_waits_is_dropped() -> None:
    database = Database()
    writer = SingleWriter(lambda: False)
    writes = [asyncio.ensure_future(writer.run(lambda word=word: database.write(word))) for word in ("a", "b")]  # type: ignore[misc]
    await asyncio.sleep(0.05)
    for each in writes:
        each.cancel()
    await asyncio.gather(*writes, return_exceptions=True)
    database.answer.set()
    await writer.drain(1.0)
    assert (database.memory, writer.waiting) == (["a"], 0)


async def test_heartbeat_that_waits_for_a_write_goes_on_once_its_commit_is_in_doubt() -> None:
    database = Database()
    writer = SingleWriter(lambda: database.is_in_doubt)
    write = asyncio.ensure_future(writer.run(lambda: database.write("first")))
    await asyncio.sleep(0)

    async def beat() -> None:
        async with writer.turn():
            database.memory.append("beat")

    beating = asyncio.ensure_future(beat())
    await asyncio.sleep(0.05)
    assert database.memory == []  # the database may still answer
    database.is_in_doubt = True
    await asyncio.wait_for(beating, 1)
    assert database.memory == ["beat"]
    await refusal(write)
    database.is_in_doubt = False
    database.answer.set()
    assert await writer.run(lambda: database.write("second")) == "second"
    assert database.memory == ["beat", "first", "second"]
