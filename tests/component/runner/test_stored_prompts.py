"""Prompts of an engine that ended come back from disk at its next start, and to their own tenant only."""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import aclosing
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from kit.engines import call_of, fake_engine
from kit.failures import fails
from kit.one_model import OneModel
from kit.presence import present

from runner_svc.backend.port import LoadOrder
from runner_svc.cache.manager import CacheManager
from runner_svc.cache.prompt_store import MIN_MEASURED_BYTES, PRIOR_BYTES_PER_SECOND, PromptStore
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.engine_blocks import PromptPrefixes
from runner_svc.policy.kept_prompts import KeptPrompt
from weft.api.common.v1 import receipt_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CacheMode, Handling
from weft_testing.conformance.prefix_cache import MODEL, Tenants, completion

TOPICS = ("sea", "hills", "city", "river")
SEA = "sea: tell me more about the sea. " * 60
BUDGET = 64 * 1024 * 1024


class _Runner:
    """The cache of one model whose prompts are stored in a folder."""

    def __init__(self, folder: Path) -> None:
        self.backend = fake_engine(name=MODEL, slots=2, context_tokens=4096)
        self.model = OneModel(self.backend)
        self.store = PromptStore(folder, BUDGET)
        self.desk = CacheManager([self.model], store=self.store)
        self.ask = Tenants(self.backend, self.desk, call_of)

    async def start(self) -> None:
        await self.desk.open()
        await self.backend.start()

    async def end(self) -> None:
        await self.desk.put_away(self.model)
        await self.backend.stop()
        await self.desk.settle()

    async def restart(self, order: LoadOrder | None = None) -> None:
        await self.end()
        await self.backend.start(order)

    async def request(self, text: str, prefixes: PromptPrefixes) -> None:
        """Sends a prompt that routers know by these prefixes."""
        payload = completion(text)
        async with await self.desk.of_request(MODEL, "a", Handling()).generating(payload, prefixes) as turn:
            async for _ in self.backend.generate(payload, call_of(turn.use)):
                turn.worked = True

    async def receipt(self, text: str, prefill_seconds: float = 0.0) -> receipt_pb2.Receipt:
        """The receipt of a request to an engine that needed this long for the prompt; 0: it does not say."""
        payload, use = completion(text), self.desk.of_request(MODEL, "a", Handling())
        receipt = receipt_pb2.Receipt()
        async with await use.generating(payload) as turn:
            async for frame in self.backend.generate(payload, call_of(turn.use)):
                turn.worked = True
                if frame[-1].HasField("finished"):
                    receipt = frame[-1].finished.receipt
            receipt.engine_timings.Clear()
            if prefill_seconds:
                receipt.engine_timings.prefill_time.FromNanoseconds(int(prefill_seconds * 1e9))
            use.note_turn(turn, receipt)
        return receipt


async def _started(folder: Path) -> _Runner:
    runner = _Runner(folder)
    await runner.start()
    return runner


async def _ended(folder: Path) -> _Runner:
    """A runner that has served SEA to tenant a, and has put it away."""
    runner = await _started(folder)
    await runner.ask.cached("a", SEA)
    await runner.end()
    return runner


def _stored(folder: Path) -> list[Path]:
    """The files of the store, except the key."""
    return [file for file in folder.iterdir() if file.name != "key"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prompts"


async def test_receipt_says_where_a_prompt_was_restored_from_and_what_that_saved(folder: Path) -> None:
    runner = await _started(folder)
    cold = await runner.receipt(SEA, prefill_seconds=1000.0)
    assert not cold.HasField("restored_prompt")
    for topic in TOPICS[1:]:
        await runner.receipt(SEA.replace("sea", topic))
    in_memory = await runner.receipt(SEA)
    await runner.end()
    again = _Runner(folder)
    await again.start()
    on_disk = await again.receipt(SEA)
    await again.end()
    for source, receipt in (("MEMORY", in_memory), ("DISK", on_disk)):
        told = receipt.restored_prompt
        assert receipt_pb2.RestoredPrompt.Source.Name(told.source) == f"SOURCE_{source}"
        assert told.token_count == receipt.usage.cached_prompt_tokens > 200
        whole = 1000.0 * told.token_count / cold.usage.prompt_tokens
        assert 0.8 * whole < told.saved_time.ToSeconds() <= whole


@pytest.mark.parametrize(("share", "is_restored"), [(0.5, True), (2.0, False)])
async def test_prompt_is_restored_if_that_is_sooner_than_processing_it(
    folder: Path, share: float, is_restored: bool
) -> None:
    runner = _Runner(folder)
    await runner.start()
    await runner.receipt(SEA, prefill_seconds=10.0)
    await runner.end()
    again = _Runner(folder)
    await again.start()
    (stored,) = again.store.prompts
    again.store.bytes_per_second = stored.byte_count / (share * stored.seconds)
    receipt = await again.receipt(SEA)
    await again.end()
    assert receipt.HasField("restored_prompt") == is_restored
    assert (receipt.usage.cached_prompt_tokens > 200) == is_restored


async def test_speed_of_the_store_is_measured_when_it_writes_too_but_not_with_small_prompts(folder: Path) -> None:
    store = PromptStore(folder, BUDGET)
    await store.open()
    store.bytes_per_second = 1.0
    for name, size in (("small", MIN_MEASURED_BYTES - 1), ("large", MIN_MEASURED_BYTES)):
        prompt = KeptPrompt(name=name, partition=Partition("a", ""), marks=(name.encode(),), byte_count=size)
        store.put(prompt, BytesIO(bytes(size)))
        await store.settle()
        assert (store.bytes_per_second > 1.0) == (name == "large")
        before = store.bytes_per_second
        store.note_restored(prompt, 1000.0)
        assert (store.bytes_per_second < before) == (name == "large")


async def test_prompts_in_slots_and_in_memory_survive_a_restart_of_their_engine(folder: Path) -> None:
    runner = await _started(folder)
    texts = [SEA.replace("sea", topic) for topic in TOPICS]
    for text in texts:
        await runner.ask.cached("a", text)
    await runner.restart()
    stored = sum(len(file.read_bytes()) for file in _stored(folder))
    figures = runner.desk.figures(MODEL)
    assert 0 < figures.stored_bytes < stored, "the files have headers"
    assert (figures.stored_prompt_count, figures.stored_limit_bytes, figures.kept_prompt_count) == (4, BUDGET, 0)
    before = runner.desk.figures(MODEL).restored_prompt_count
    assert min([await runner.ask.cached("a", text) for text in texts]) > 200
    assert runner.desk.figures(MODEL).restored_prompt_count == before + 4
    await runner.end()


async def test_routers_learn_what_is_stored_and_how_long_its_restore_takes(folder: Path) -> None:
    runner = await _started(folder)
    prefixes = PromptPrefixes((11, 12), 2_000, Partition("a"))
    async with aclosing(runner.desk.stored(MODEL)) as following:
        assert list((await anext(following)).prompts) == []
        other = await runner.receipt(SEA.replace("sea", "hills"), prefill_seconds=10.0)
        await runner.request(SEA, prefixes)
        await runner.restart()
        (prompt,) = (await anext(following)).prompts
        (size,) = (each.byte_count for each in runner.store.prompts if each.digests)
        assert (list(prompt.prefix_digests), prompt.byte_count) == ([11, 12], size)
        assert prompt.token_prefill.ToNanoseconds() == pytest.approx(10e9 / other.usage.prompt_tokens, rel=1e-6)
        assert prompt.restore.ToNanoseconds() == pytest.approx(size / PRIOR_BYTES_PER_SECOND * 1e9, abs=1)
        await runner.ask.flush("all")
        assert list((await anext(following)).prompts) == []
    await runner.request(SEA, prefixes)
    await runner.end()
    next_runner = _Runner(folder)
    await next_runner.desk.open()
    (prompt,) = (await anext(next_runner.desk.stored(MODEL))).prompts
    assert list(prompt.prefix_digests) == [11, 12]


async def test_change_of_the_store_is_noted_once_the_prompt_is_written(folder: Path) -> None:
    """Routers learned of the first prompt after a swap with the next regular report only, 5 s later."""
    counts: list[int] = []
    runner = _Runner(folder)
    runner.store.followers.on_change = lambda: counts.append(len(runner.store.prompts))
    await runner.start()
    await runner.ask.cached("a", SEA)
    await runner.end()
    assert counts[-1] == 1


async def test_stored_prompt_is_restored_only_for_its_tenant_and_tag(folder: Path) -> None:
    runner = await _started(folder)
    await runner.ask.cached("a", SEA, tag="x")
    await runner.restart()
    found = [await runner.ask.cached("b", SEA, tag="x"), await runner.ask.cached("a", SEA, tag="y")]
    assert (found, await runner.ask.cached("a", SEA, tag="x") > 200) == ([0, 0], True)
    await runner.end()


async def test_only_the_turn_that_may_restore_a_prompt_waits_until_it_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an unload and a load, the first tokens of all callers waited for the disk."""
    runner, seal, is_disk_free = await _started(folder), PromptStore._seal, threading.Event()

    def slow_seal(store: PromptStore, *args: Any) -> None:
        assert is_disk_free.wait(30.0)
        seal(store, *args)

    monkeypatch.setattr(PromptStore, "_seal", slow_seal)
    await runner.ask.cached("a", SEA)
    await runner.desk.put_away(runner.model)
    await runner.backend.stop()
    await runner.backend.start(None)
    assert await runner.ask.cached("b", SEA) == 0
    waiting = asyncio.create_task(runner.ask.cached("a", SEA))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    is_disk_free.set()
    assert await waiting > 0
    await runner.end()


async def test_prompt_is_neither_announced_nor_restored_for_an_engine_with_other_settings(folder: Path) -> None:
    runner = await _started(folder)
    await runner.request(SEA, PromptPrefixes((11,), 2_000, Partition("a")))
    await runner.restart(LoadOrder(parameters={"context_tokens": 2048}))
    assert list((await anext(runner.desk.stored(MODEL))).prompts) == []
    assert await runner.ask.cached("a", SEA) == 0
    await runner.end()


@pytest.mark.parametrize("scope", [("all", {}), ("tenant", {"tenant": "a"}), ("model", {"model": MODEL})])
async def test_flush_deletes_the_prompts_of_an_unloaded_model(folder: Path, scope: tuple[str, dict[str, str]]) -> None:
    runner = await _ended(folder)
    await runner.ask.flush(scope[0], **scope[1])
    assert _stored(folder) == []


async def test_flush_of_everything_deletes_the_prompts_of_models_that_are_not_served_any_more(folder: Path) -> None:
    await _ended(folder)
    others = CacheManager([], store=PromptStore(folder, BUDGET))
    await others.open()
    await others.flush(pb.FlushCacheRequest(scope=pb.FlushCacheRequest.SCOPE_ALL))
    assert _stored(folder) == []


async def test_flush_fails_until_the_disk_deletes_the_stored_prompts(folder: Path) -> None:
    """The flush ended without a word, and the next process used what was flushed."""
    runner = await _ended(folder)
    (file,) = _stored(folder)
    file.unlink()
    (file / "in the way").mkdir(parents=True)
    everything = pb.FlushCacheRequest(scope=pb.FlushCacheRequest.SCOPE_ALL)
    with fails(Reason.SERVICE_UNAVAILABLE, match=f"1 stored prompts cannot be deleted from {folder}"):
        await runner.desk.flush(everything)
    with pytest.raises(WeftError, match="cannot be deleted"):
        await runner.desk.flush(everything)
    (file / "in the way").rmdir()
    file.rmdir()
    await runner.desk.flush(everything)


async def test_prompts_put_away_while_a_flush_begins_are_not_stored(folder: Path) -> None:
    """The store forgot them before the engine's memory did, and was given them again in between."""
    runner = await _started(folder)
    for topic in TOPICS:
        await runner.ask.cached("a", SEA.replace("sea", topic))
    flushing = asyncio.create_task(runner.ask.flush("all"))
    await asyncio.sleep(0)
    await runner.desk.put_away(runner.model)
    await flushing
    await runner.desk.settle()
    assert _stored(folder) == []
    await runner.end()


class _Broken(BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError("no")


async def test_failed_write_leaves_no_part_of_a_file(folder: Path) -> None:
    store = PromptStore(folder, BUDGET)
    await store.open()
    prompt = KeptPrompt(name="p", partition=Partition("a"), marks=(b"1",), byte_count=5, identity="m:1")
    store.put(prompt, _Broken())
    await store.settle()
    assert (_stored(folder), len(store.prompts)) == ([], 0)


async def test_followers_learn_of_prompts_that_gave_way_to_one_that_was_not_written(folder: Path) -> None:
    """Routers sent requests for a deleted prompt to this runner until the store's next change."""
    counts: list[int] = []
    store = PromptStore(folder, 8, lambda: counts.append(len(store.prompts)))
    await store.open()
    first, second = (
        KeptPrompt(name=name, partition=Partition(name), marks=(b"1",), byte_count=5, identity="m:1") for name in "pq"
    )
    store.put(first, BytesIO(b"state"))
    await store.settle()
    store.put(second, _Broken())
    await store.settle()
    assert counts == [0, 1, 0]


async def test_engine_that_processes_restored_prompts_again_gets_no_more_until_its_next_start(folder: Path) -> None:
    """llama.cpp#26676: the engine reports a restore, and no cached tokens afterwards."""
    runner = await _started(folder)
    for topic in TOPICS:
        await runner.receipt(SEA.replace("sea", topic))
    restored = []
    for topics in (TOPICS[:3], TOPICS[:1]):
        await runner.restart()
        for topic in topics:
            use = runner.desk.of_request(MODEL, "a", Handling())
            async with await use.generating(completion(SEA.replace("sea", topic))) as turn:
                restored.append(turn.restored is not None)
                use.note_turn(turn, receipt_pb2.Receipt())
        if len(topics) == 3:
            assert runner.desk.figures(MODEL).kept_limit_bytes == 0, "the engine cannot save prompts"
    assert restored == [True, True, False, True]
    await runner.end()


async def test_two_turns_restore_one_prompt_simultaneously(folder: Path) -> None:
    runner = await _started(folder)
    await runner.ask.cached("a", SEA)
    await runner.restart()
    found = await asyncio.gather(*(runner.ask.cached("a", f"{SEA}{end}") for end in ("And then?", "Why?")))
    assert min(found) > 200
    assert _saved(runner) == []
    await runner.end()


async def test_request_without_the_cache_leaves_nothing_on_disk(folder: Path) -> None:
    runner = await _started(folder)
    await runner.ask.cached("a", SEA, mode=CacheMode.NONE)
    await runner.end()
    assert _stored(folder) == []


async def test_stored_files_are_private_and_do_not_show_the_prompt(folder: Path) -> None:
    runner = await _started(folder)
    await runner.ask.cached("tenant-7", SEA)
    await runner.end()
    stored = b"".join(file.read_bytes() for file in _stored(folder))
    assert [_mode(path) for path in (folder, folder / "key", *_stored(folder))] == [0o700, 0o600, 0o600]
    assert len(stored) > 1_000
    assert b"sea" not in stored
    assert b"tenant-7" not in stored


def _saved(runner: _Runner) -> list[Path]:
    """What the engine's folder in main memory has."""
    saved = present(runner.backend._saved)
    assert saved.folder is not None
    return list(saved.folder.iterdir())


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def _file(path: Path) -> Path:
    path.touch()
    return path


def _exchange(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def _cut_before_its_state(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: 12 + int.from_bytes(content[8:12], "big")])


def _change(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    file.write_bytes(content)


def _delete(file: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("damage", [_cut, _cut_before_its_state, _change, _delete])
async def test_prompt_of_a_damaged_file_is_processed_again(folder: Path, damage: Callable[[Path], None]) -> None:
    runner = await _ended(folder)
    (file,) = _stored(folder)
    damage(file)
    await runner.backend.start()
    assert await runner.ask.cached("a", SEA) == 0
    assert not file.exists()
    assert _saved(runner) == []
    await runner.end()


async def test_file_without_its_state_is_not_given_to_an_engine(folder: Path, tmp_path: Path) -> None:
    store, target = PromptStore(folder, BUDGET), tmp_path / "state"
    await store.open()
    prompt = KeptPrompt(name="p", partition=Partition("a"), marks=(b"1",), byte_count=5, identity="m:1")
    store.put(prompt, BytesIO(b"state"))
    await store.settle()
    assert await store.read(prompt, target)
    assert target.read_bytes() == b"state"
    _cut_before_its_state(folder / "p.prompt")
    assert not await store.read(prompt, target)


async def test_exchanged_files_are_not_used(folder: Path) -> None:
    runner = await _started(folder)
    await runner.ask.cached("a", SEA)
    await runner.ask.cached("b", SEA.replace("sea", "hills"))
    await runner.end()
    one, other = _stored(folder)
    _exchange(one, other)
    await runner.backend.start()
    assert [await runner.ask.cached("a", SEA), await runner.ask.cached("b", SEA.replace("sea", "hills"))] == [0, 0]
    await runner.end()


async def test_lost_key_starts_an_empty_store(folder: Path) -> None:
    await _ended(folder)
    _delete(folder / "key")
    await _Runner(folder).desk.open()
    assert _stored(folder) == []


async def test_prompt_unused_for_a_week_is_deleted(folder: Path) -> None:
    await _ended(folder)
    (file,) = _stored(folder)
    os.utime(file, (0, 0))
    await _Runner(folder).desk.open()
    assert not file.exists()


async def test_unwritable_folder_stores_nothing_and_fails_no_request(tmp_path: Path) -> None:
    runner = _Runner(_file(tmp_path / "file") / "prompts")
    await runner.start()
    assert await runner.ask.cached("a", SEA) == 0
    await runner.restart()
    assert await runner.ask.cached("a", SEA) == 0
    await runner.end()


async def test_file_that_cannot_be_read_or_deleted_does_not_disable_the_store(folder: Path) -> None:
    await _ended(folder)
    for name in ("lost+found", "checks"):
        (folder / name).mkdir()
    (folder / "away.prompt").symlink_to(folder / "lost+found")
    runner = await _started(folder)
    assert await runner.ask.cached("a", SEA) > 0
    assert sorted(file.name for file in _stored(folder) if not file.is_file()) == ["checks", "lost+found"]
    await runner.end()


async def test_nearly_full_disk_stores_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner_svc.cache.prompt_store.MIN_FREE_BYTES", 1 << 62)
    await _ended(folder)
    assert _stored(folder) == []


async def test_flush_during_the_writing_deletes_the_prompt(folder: Path) -> None:
    runner = await _started(folder)
    await runner.ask.cached("a", SEA)
    await runner.desk.put_away(runner.model)
    await asyncio.gather(runner.ask.flush("all"), runner.desk.settle())
    assert _stored(folder) == []
    await runner.end()


async def test_least_recently_used_prompt_gives_way_to_another(folder: Path) -> None:
    await _ended(folder)
    (file,) = _stored(folder)
    size = len(file.read_bytes())
    next_runner: Any = _Runner(folder)
    next_runner.desk._store.prompts.budget_bytes = size + size // 2
    await next_runner.start()
    await next_runner.ask.cached("b", SEA)
    await next_runner.end()
    assert len(_stored(folder)) == 1
    assert not file.exists()
