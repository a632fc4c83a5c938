"""The cache manager: flush, figures, and engines without slots."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from kit.failures import fails

from runner_svc.backend.port import CacheIsolation, ErasedCache, SlotSnapshot
from runner_svc.cache.manager import CacheManager
from runner_svc.cache.model_cache import ModelCache
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.policy.load_options import AS_CONFIGURED
from weft.api.common.v1 import completion_pb2, usage_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import CacheMode, Handling

PROMPT = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="hello")])
PRIVATE = Handling(cache_mode=CacheMode.NONE)


class Engine:
    def __init__(self, isolation: CacheIsolation, slots: int = 0, *, fails: WeftError | None = None) -> None:
        self.cache_isolation = isolation
        self.process_id: int | None = 100
        self.kept_prompt_bytes = 0
        self.prefix_reports = None
        self.slot_count = slots
        self.erased: list[list[int]] = []
        self.tokens = 10
        self._fails = fails

    async def slot_snapshots(self) -> Sequence[SlotSnapshot]:
        return ()

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        if self._fails is not None:
            raise self._fails
        self.erased.append(list(slots or ()))
        return ErasedCache(entry_count=len(slots or ()), token_count=self.tokens * len(slots or ()))


class Model:
    def __init__(self, model: str, engine: Engine) -> None:
        self.model = model
        self.names = (model, f"{model}-adapter")
        self.model_path: Path | None = None
        self.digest = ""
        self.plan = AS_CONFIGURED
        self.backend: Any = engine

    def expects(self, prompt: KeptPrompt) -> bool:
        return False

    def forget(self, tenant: str | None, tag: str | None) -> None:
        pass


def _desk(**engines: Engine) -> CacheManager:
    return CacheManager([Model(name, engine) for name, engine in engines.items()])


async def _use(desk: CacheManager, model: str, tenant: str, handling: Handling | None = None) -> Any:
    async with await desk.of_request(model, tenant, handling or Handling()).generating(PROMPT) as turn:
        turn.worked = True
        return turn


def _flush(scope: str, **names: str) -> pb.FlushCacheRequest:
    request = pb.FlushCacheRequest(scope=pb.FlushCacheRequest.Scope.Value(f"SCOPE_{scope}"))
    for name, value in names.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.FlushCacheRequest(), "scope"),
        (_flush("MODEL"), "model"),
        (_flush("TENANT"), "tenant"),
        (_flush("TENANT", model="m"), "tenant"),
        (_flush("TAG", tenant="a"), "tag"),
        (_flush("ALL", tenant="a"), "tenant"),
        (_flush("ALL", tag="a"), "tag"),
        (_flush("MODEL", model="m", tenant="a"), "tenant"),
        (_flush("TENANT", tenant="a", tag="t"), "tag"),
        (_flush("TENANT", tenant="a b"), "tenant"),
        (_flush("TAG", tag="x" * 65), "tag"),
    ],
)
async def test_ambiguous_flush_is_refused(request_: pb.FlushCacheRequest, field: str) -> None:
    engine = Engine(CacheIsolation.SLOTS, 2)
    desk = _desk(m=engine)
    with fails(field=field):
        await desk.flush(request_)
    assert engine.erased == []


async def test_flush_of_an_unserved_model_is_refused() -> None:
    with fails(Reason.MODEL_NOT_FOUND):
        await _desk(m=Engine(CacheIsolation.SLOTS, 1)).flush(_flush("MODEL", model="other"))


async def test_flush_of_one_model_keeps_the_others() -> None:
    one, other = Engine(CacheIsolation.SLOTS, 2), Engine(CacheIsolation.SLOTS, 2)
    desk = _desk(one=one, other=other)
    for model in ("one", "other"):
        await _use(desk, model, "a")
    flushed = await desk.flush(_flush("TENANT", tenant="a", model="one"))
    assert (flushed.entry_count, flushed.token_count) == (2, 20)
    assert one.erased == [[0, 1]]
    assert other.erased == []


@pytest.mark.parametrize(("token_size", "reported"), [(1_000, 10_000), (None, None)])
async def test_memory_is_reported_only_if_the_token_size_is_known(
    token_size: int | None, reported: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelCache, "token_size", AsyncMock(return_value=token_size))
    desk = _desk(m=Engine(CacheIsolation.SLOTS, 1))
    await _use(desk, "m", "a")
    flushed = await desk.flush(_flush("ALL"))
    assert (flushed.reusable_bytes if flushed.HasField("reusable_bytes") else None) == reported


async def test_flush_of_a_stopped_engine_reports_zero_entries() -> None:
    engine = Engine(CacheIsolation.SLOTS)
    engine.process_id = None
    response = await _desk(m=engine).flush(_flush("ALL"))
    assert (response.entry_count, response.token_count) == (0, 0)


async def test_failed_erasure_is_reported_and_its_slots_start_fresh() -> None:
    engine = Engine(CacheIsolation.SLOTS, 1, fails=WeftError(Reason.BACKEND_ERROR, "too late"))
    desk = _desk(m=engine)
    await _use(desk, "m", "a")
    with pytest.raises(WeftError, match="too late"):
        await desk.flush(_flush("ALL"))
    assert (await _use(desk, "m", "a")).use.fresh


async def test_server_without_isolation_cannot_be_flushed_but_does_not_block_the_others() -> None:
    shared, own = Engine(CacheIsolation.NONE), Engine(CacheIsolation.SLOTS, 1)
    desk = _desk(shared=shared, own=own)
    await _use(desk, "own", "a")
    assert (await desk.flush(_flush("ALL"))).entry_count == 1
    with fails(Reason.UNSUPPORTED_OPERATION):
        await desk.flush(_flush("MODEL", model="shared"))


async def test_private_request_to_a_server_without_isolation_is_warned() -> None:
    desk = _desk(m=Engine(CacheIsolation.NONE))
    assert (await _use(desk, "m", "a")).warnings == []
    turn = await _use(desk, "m", "a", PRIVATE)
    assert turn.use.fresh
    assert [event.warning.field for event in turn.warnings] == ["cache_mode"]


async def test_server_with_salts_gets_a_new_one_per_tenant_and_after_a_flush(tmp_path: Path) -> None:
    desk = CacheManager([Model("m", Engine(CacheIsolation.SALT))], tmp_path)
    a, again, b = [(await _use(desk, "m", tenant)).use.salt for tenant in ("a", "a", "b")]
    assert a == again != b
    private = [(await _use(desk, "m", "a", PRIVATE)).use.salt for _ in range(2)]
    assert len({a, b, *private}) == 4
    await desk.flush(_flush("TENANT", tenant="a"))
    assert (await _use(desk, "m", "a")).use.salt != a
    assert (await _use(desk, "m", "b")).use.salt == b
    restarted = CacheManager([Model("m", Engine(CacheIsolation.SALT))], tmp_path)
    assert (await _use(restarted, "m", "b")).use.salt == b


async def test_single_prompt_engine_discards_its_cache_between_tenants() -> None:
    desk = _desk(m=Engine(CacheIsolation.WHOLE))
    uses = [(await _use(desk, "m", tenant)).use for tenant in ("a", "a", "b", "b", "a")]
    assert [use.fresh for use in uses] == [False, False, True, False, True]


async def test_restarted_engine_has_a_new_cache_directory() -> None:
    engine = Engine(CacheIsolation.SLOTS, 1)
    desk = _desk(m=engine)
    await _use(desk, "m", "a")
    assert (await _use(desk, "m", "b")).use.fresh
    engine.process_id = 101
    assert not (await _use(desk, "m", "a")).use.fresh


async def test_cancelled_turn_returns_its_slot() -> None:
    desk = _desk(m=Engine(CacheIsolation.SLOTS, 1))
    await _use(desk, "m", "a")
    entered = asyncio.Event()

    async def hang() -> None:
        async with await desk.of_request("m", "b", Handling()).generating(PROMPT):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(hang())
    await entered.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await _use(desk, "m", "b")).use.slot == 0


async def test_embedding_given_up_while_it_waits_leaves_the_cached_prompts_of_others() -> None:
    desk = _desk(m=Engine(CacheIsolation.SLOTS, 2))
    for tenant in ("a", "b"):
        await _use(desk, "m", tenant)

    async def embed() -> None:
        async with await desk.of_request("m", "b", Handling()).embedding():
            raise AssertionError("it overtook the conversation")

    async with await desk.of_request("m", "a", Handling()).generating(PROMPT):
        embedding = asyncio.create_task(embed())
        await asyncio.sleep(0)
        embedding.cancel()
        await asyncio.wait({embedding})
    assert embedding.cancelled()
    assert [(await _use(desk, "m", tenant)).use.fresh for tenant in ("a", "b")] == [False, False]


class SlowEraser(Engine):
    def __init__(self) -> None:
        super().__init__(CacheIsolation.SLOTS, 1)
        self.let = asyncio.Event()

    async def erase_cache(self, slots: Sequence[int] | None = None) -> ErasedCache:
        await self.let.wait()
        return await super().erase_cache(slots)


async def test_pending_erasure_does_not_remove_the_text_of_a_newer_turn() -> None:
    engine = SlowEraser()
    desk = _desk(m=engine)
    await _use(desk, "m", "a")
    await _use(desk, "m", "a", PRIVATE)
    # Another tenant gets the slot whose erasure the engine has not confirmed.
    following = asyncio.create_task(_use(desk, "m", "b"))
    await asyncio.sleep(0.01)
    assert not following.done()
    engine.let.set()
    assert (await following).use.slot == 0
    assert engine.erased[-1] == [0]
    assert not (await _use(desk, "m", "b")).use.fresh


async def test_figures_are_counted_per_model() -> None:
    desk = _desk(one=Engine(CacheIsolation.SLOTS, 1), other=Engine(CacheIsolation.SLOTS, 1))
    desk.note("one", usage_pb2.Usage(prompt_tokens=100))
    desk.note("one", usage_pb2.Usage(prompt_tokens=100, cached_prompt_tokens=90))
    expected = pb.CacheFigures(hit_count=1, miss_count=1, prompt_token_count=200, cached_token_count=90)
    assert desk.figures("one") == expected
    assert desk.figures("other") == pb.CacheFigures()
