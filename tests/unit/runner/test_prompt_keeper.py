"""Saving and restoring prompts: what happens meanwhile counts."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from kit.engines import fake_engine
from kit.failures import fails

from runner_svc.backend.port import SavedSlot, SlotSnapshot
from runner_svc.cache.prompt_keeper import PromptKeeper, Restored
from runner_svc.policy.cache_directory import CacheDirectory, Partition
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

A, B = Partition("a"), Partition("b")
SEA, HILLS = (b"sea1", b"sea2", b"sea3"), (b"hills1", b"hills2", b"hills3")


class Engine:
    def __init__(self) -> None:
        self.saved: list[str] = []
        self.deleted: list[str] = []
        self.restored: list[str] = []
        self.asked, self.goes_on = asyncio.Event(), asyncio.Event()
        self.fails = False
        self.state_identity = ""

    async def slot_snapshots(self) -> list[SlotSnapshot]:
        return [SlotSnapshot(number=0, is_busy=False, is_empty=False, task=1, token_count=10)]

    async def save_slot(self, slot: int, name: str) -> SavedSlot:
        self.saved.append(name)
        self.asked.set()
        await self.goes_on.wait()
        if self.fails:
            raise WeftError(Reason.BACKEND_ERROR, "no")
        return SavedSlot(byte_count=10)

    async def restore_slot(self, slot: int, name: str) -> None:
        if self.fails:
            raise WeftError(Reason.BACKEND_ERROR, "no")
        self.restored.append(name)

    def delete_saved(self, names: list[str]) -> None:
        self.deleted += names


class Stage:
    """One slot that holds SEA, and a keeper."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.bytes_per_token: int | None = 1
        backend: Any = self.engine
        self.keeper = PromptKeeper("m", backend, 100, self.token_size)
        self.directory = CacheDirectory(1, keeps=True)
        self.directory.end(self.directory.begin(A, SEA), worked=True)

    async def token_size(self) -> int | None:
        return self.bytes_per_token

    def begin(self, marks: tuple[bytes, ...], partition: Partition = A) -> "asyncio.Task[tuple[bool, Restored | None]]":
        found, kept_marks = self.keeper.kept.best(partition, marks)
        self.turn = self.directory.begin(partition, marks, kept_marks=kept_marks)
        begin = self.keeper.moment(self.directory, self.turn)
        return asyncio.create_task(self.keeper.swap(self.directory, self.turn, begin, found))

    async def take_turns(self) -> bool:
        """HILLS of another tenant takes the slot from SEA, and SEA takes it back. Returns whether SEA is computed."""
        self.engine.goes_on.set()
        await self.begin(HILLS, B)
        self.directory.end(self.turn, worked=True)
        return (await self.begin(SEA))[0]


async def test_prompt_that_lost_its_slot_is_restored() -> None:
    stage = Stage()
    assert not await stage.take_turns()
    assert stage.engine.restored == stage.engine.saved[:1]


async def test_a_turn_that_comes_while_its_prompt_is_saved_finds_it() -> None:
    """It found the version before, which was deleted then, or none, and agents lost their prompts to others."""
    stage = Stage()
    swapping = stage.begin(HILLS)
    await stage.engine.asked.wait()
    next_turn = asyncio.create_task(stage.keeper.best(A, SEA))
    await asyncio.sleep(0)
    assert (await stage.keeper.best(B, SEA)) == (None, 0)
    assert not next_turn.done()
    stage.engine.goes_on.set()
    await swapping
    assert (await next_turn)[1] == len(SEA)


async def test_prompt_saved_during_a_flush_is_deleted() -> None:
    stage = Stage()
    swapping = stage.begin(HILLS)
    await stage.engine.asked.wait()
    stage.keeper.forget("a", None)
    stage.engine.goes_on.set()
    await swapping
    assert (stage.engine.deleted, len(stage.keeper.kept)) == (stage.engine.saved, 0)


async def test_prompt_saved_while_its_slot_may_have_been_reused_is_deleted() -> None:
    stage = Stage()
    swapping = stage.begin(HILLS)
    await stage.engine.asked.wait()
    stage.directory.begin_loose(B)
    stage.engine.goes_on.set()
    assert (await swapping)[0], "the slot may have the text of the other turn"
    assert stage.directory.end(stage.turn, worked=True), "and is erased"
    assert (stage.engine.deleted, len(stage.keeper.kept)) == (stage.engine.saved, 0)


async def test_caller_leaving_during_a_save_leaves_no_file() -> None:
    stage = Stage()
    swapping = stage.begin(HILLS)
    await stage.engine.asked.wait()
    swapping.cancel()
    await asyncio.wait([swapping])
    stage.engine.goes_on.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(stage.keeper.kept) + len(stage.engine.deleted) == 1


async def test_prompt_beyond_the_budget_is_not_saved() -> None:
    stage = Stage()
    stage.bytes_per_token = 11
    await stage.begin(HILLS)
    assert stage.engine.saved == []


async def test_prompt_of_unknown_size_is_saved() -> None:
    stage = Stage()
    stage.bytes_per_token = None
    stage.engine.goes_on.set()
    await stage.begin(HILLS)
    assert len(stage.keeper.kept) == 1


async def test_engine_that_cannot_save_is_not_asked_again() -> None:
    stage = Stage()
    stage.engine.fails = True
    stage.engine.goes_on.set()
    await stage.begin(HILLS)
    assert not stage.keeper.works
    assert stage.engine.deleted == stage.engine.saved


async def test_prompt_that_cannot_be_restored_is_computed_again() -> None:
    stage = Stage()
    stage.engine.goes_on.set()
    await stage.begin(HILLS, B)
    stage.directory.end(stage.turn, worked=True)
    found, _ = stage.keeper.kept.best(A, SEA)
    swapping = stage.begin(SEA)
    stage.engine.fails = True
    assert await swapping
    assert found is not None
    assert found.name in stage.engine.deleted


@pytest.mark.parametrize("body", [b"", b"saved", b"[]", b'{"n_written": "1 MB"}', b"[" * 9_999])
async def test_unexpected_answer_to_a_save_is_an_error_of_the_engine(body: bytes) -> None:
    """It was an internal error of the request that took the slot, and of the load that tested the engine."""
    backend: Any = fake_engine()

    async def call_route(*_: object) -> tuple[int, bytes]:
        return 200, body

    backend._http = SimpleNamespace(call_route=call_route)
    with fails(Reason.BACKEND_ERROR, "slot 0"):
        await backend.save_slot(0, "prompt-1")
