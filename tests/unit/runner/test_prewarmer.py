"""Prompts of agents are processed after a load, while the engine has no requests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_stage import end
from instance_stage import CALL, Stage, StepBackend
from kit.one_model import OneModel
from kit.running_record import running_record

from runner_svc.backend.port import CacheIsolation, CallInfo
from runner_svc.cache.manager import CacheManager
from runner_svc.cache.model_cache import prompt_marks
from runner_svc.chat.chat_request import ChatRequest, ChatSetup
from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.expected_prefixes import MAX_PREFIXES
from runner_svc.policy.kept_prompts import KeptPrompt
from runner_svc.prewarmer import Prewarmer
from runner_svc.runner_config import RunnerConfig
from runner_svc.runner_service import build
from runner_svc.tools.tool_box import ToolBox
from runner_svc.waiting import end_tasks
from weft.api.common.v1 import agent_behaviour_pb2, chat_pb2, tokenize_pb2
from weft.api.registry.v1 import agent_pb2, tenant_pb2
from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.dispatch.fleet import FleetView, ModelView
from weft.dispatch.frames import Frame, GenerationPayload
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Handling, Operation
from weft_testing.fake_clock import FakeClock

MODEL = ModelView(
    name="m",
    pool="m",
    runner="r",
    operations=frozenset(Operation),
    remote=False,
    active=True,
    context_tokens=0,
    created_at_seconds=0,
)
AGENTS = {
    name: agent_pb2.Agent(manifest=agent_pb2.AgentManifest(name=name, model="m", system_prompt=f"You are {name}."))
    for name in ("editor", "keeper")
}


class _Engine(StepBackend):
    """Prompts have 400 tokens. Each call lasts until the test lets it go."""

    slot_count = 4

    def __init__(self) -> None:
        super().__init__()
        self.uncounted: WeftError | None = None
        self.loaded.set()
        self.calls: list[str] = []
        self.go = asyncio.Semaphore(0)

    @property
    def cache_isolation(self) -> CacheIsolation:
        return CacheIsolation.SLOTS

    async def tokenize(self, payload: tokenize_pb2.TokenizePayload, call: CallInfo) -> tokenize_pb2.TokenizeResult:
        if self.uncounted is not None:
            raise self.uncounted
        return tokenize_pb2.TokenizeResult(ids=range(400))

    async def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        if isinstance(payload, chat_pb2.ChatPayload):
            self.calls.append("chat: " + "".join(part.text for turn in payload.messages[:1] for part in turn.content))
        else:
            self.calls.append(f"tokens: {len(payload.prompts[0].tokens.ids)}")
        try:
            await self.go.acquire()
        except asyncio.CancelledError:
            self.calls.append("interrupted")
            raise
        for frame in end(prompt=400):
            yield frame


@asynccontextmanager
async def _prewarming(
    view: FleetView,
    *uses: tuple[str, str],
    replaces: bool = False,
    slots: int = 4,
    uncounted: WeftError | None = None,
    **config: Any,
) -> AsyncIterator[tuple[Stage, _Engine, CacheManager]]:
    """A loaded instance. `uses`: agents that were used before, and by whom. `config`: of ServedModel."""
    engine = _Engine()
    engine.slot_count, engine.uncounted = slots, uncounted
    stage = Stage(engine=engine)
    stage.instance.config = replace(stage.instance.config, **{"operations": MODEL.operations, **config})
    caches = CacheManager([OneModel(_Engine()) if replaces else stage.instance])
    setup = ChatSetup(runner="r", model="m", settings=ChatSettings(), tools=ToolBox([]), clock=stage.clock)

    async def mesh() -> FleetView:
        return view

    prewarmer = Prewarmer(stage.instance, caches, {"m": setup}, mesh, stage.clock)
    stage.instance.set_idle_work(prewarmer)
    for agent, tenant in uses:
        await prewarmer.note(_chat(agent=agent), "m", tenant, Handling())
    await stage.clock.advance(1.0)
    await stage.instance.start()
    await stage.settle()
    try:
        yield stage, engine, caches
    finally:
        await stage.instance.stop()
        await caches.close()


def _view(*agents: str, tenants: tuple[str, ...] = ()) -> FleetView:
    return FleetView(
        revision=1,
        models={"m": MODEL},
        agents={name: AGENTS[name] for name in agents},
        tenants={name: tenant_pb2.Tenant() for name in tenants},
    )


def _chat(*systems: str, agent: str = "") -> ChatRequest:
    turns = [*((chat_pb2.ROLE_SYSTEM, text) for text in systems), (chat_pb2.ROLE_USER, "Hello.")]
    messages = [chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)]) for role, text in turns]
    payload = chat_pb2.ChatPayload(messages=messages)
    return ChatRequest(payload=payload, call=CALL, behaviour=agent_behaviour_pb2.AgentBehaviour(), agent=agent)


async def test_announced_beginning_is_processed_after_the_next_load_and_its_prompt_is_kept() -> None:
    hour = Handling(prefix_seconds=3_600.0)
    async with _prewarming(_view()) as (stage, engine, _):
        work = stage.instance.idle_work
        assert await work.note(_chat("Be brief."), "m", "team", hour) == []
        (told,) = await work.note(_chat(), "m", "team", hour)
        assert told.warning.field == "prefix_keep_alive"
        kept = KeptPrompt(
            name="p", partition=Partition("team"), marks=prompt_marks(_chat("Be brief.").payload), byte_count=1
        )
        assert stage.instance.expects(kept)
        assert not stage.instance.expects(replace(kept, partition=Partition("b")))
        await stage.instance.unload()
        await stage.clock.advance(60.0)
        waking = asyncio.create_task(stage.instance.wake())
        engine.go.release()
        engine.go.release()
        await stage.settle()
        await waking
        assert engine.calls == ["tokens: 64", "chat: Be brief."]
        await stage.clock.advance(3_600.0)
        assert not stage.instance.expects(kept)


async def test_flush_forgets_announced_beginnings() -> None:
    """After the next load the engine would have processed a prompt that was flushed."""
    async with _prewarming(_view()) as (stage, _, caches):
        for tenant in ("a", "b"):
            await stage.instance.idle_work.note(_chat("Be brief."), "m", tenant, Handling(prefix_seconds=3_600.0))
        await caches.flush(pb.FlushCacheRequest(scope=pb.FlushCacheRequest.SCOPE_TENANT, tenant="a"))
        marks = prompt_marks(_chat("Be brief.").payload)
        kept = [KeptPrompt(name="p", partition=Partition(each), marks=marks, byte_count=1) for each in ("a", "b")]
        assert [stage.instance.expects(prompt) for prompt in kept] == [False, True]


async def test_prompt_that_is_flushed_before_its_turn_is_not_processed() -> None:
    async with _prewarming(_view()) as (stage, engine, caches):
        await stage.instance.idle_work.note(_chat("Be brief."), "m", "a", Handling(prefix_seconds=3_600.0))
        await stage.instance.unload()
        await stage.clock.advance(1.0)
        with running_record(stage.instance.records, "r"):
            await stage.instance.wake()
            await stage.settle()
            await caches.flush(pb.FlushCacheRequest(scope=pb.FlushCacheRequest.SCOPE_TENANT, tenant="a"))
        await stage.settle()
        assert engine.calls == []


@pytest.mark.parametrize(
    "engine",
    [
        {"operations": frozenset({Operation.CHAT, Operation.COMPLETION})},
        {"uncounted": WeftError(Reason.BACKEND_ERROR, "later")},
    ],
)
async def test_prompt_that_cannot_be_divided_is_not_processed(engine: dict[str, Any]) -> None:
    """Requests waited until the engine had processed all of it."""
    async with _prewarming(_view("keeper"), **engine) as (_, backend, _):
        assert backend.calls == []


async def test_prompt_does_not_replace_the_text_of_a_request() -> None:
    """The text of another tenant was lost, although no request needed its slot."""
    async with _prewarming(_view("keeper"), slots=1, replaces=True) as (stage, engine, caches):
        caches.add(stage.instance)
        async with await caches.of_request("m", "team", Handling()).generating(_chat("Be brief.").payload) as turn:
            turn.worked = True
        await stage.advance(1.0)
        assert engine.calls == []
        async with await caches.of_request("m", "team", Handling()).generating(_chat("Be brief.").payload) as turn:
            assert not turn.use.fresh


async def test_work_goes_on_only_when_no_request_has_begun_meanwhile() -> None:
    """A request that began just after another one had ended waited for a prompt of an agent."""
    async with _prewarming(_view("keeper"), replaces=True) as (stage, engine, caches):
        caches.add(stage.instance)
        records = stage.instance.records
        with running_record(records, "first"):
            await stage.advance(1.0)
        with running_record(records, "second"):
            await stage.settle()
            assert engine.calls == []
        await stage.settle()
        assert engine.calls == ["tokens: 64"]


async def test_engine_that_stays_up_does_not_get_prompts_again() -> None:
    """After a failed sleep they were counted again."""
    async with _prewarming(_view("keeper")) as (stage, engine, caches):
        engine.go.release()
        engine.go.release()
        await stage.settle()
        await stage.clock.advance(1.0)
        await asyncio.wait_for(stage.instance.idle_work.run(), 1.0)
        assert engine.calls == ["tokens: 64", "chat: You are keeper."]
        assert caches.figures("m").prewarmed_token_count == 400


async def test_engine_that_weft_does_not_run_gives_a_warning() -> None:
    async with _prewarming(_view("keeper"), remote=True) as (stage, engine, _):
        (told,) = await stage.instance.idle_work.note(_chat("Be brief."), "m", "team", Handling(prefix_seconds=60.0))
        assert told.warning.message.startswith("was not used: weft does not run")
        assert engine.calls == []


async def test_requests_that_expect_nothing_again_do_not_displace_an_agent() -> None:
    uses = (("keeper", "team"), *(("", f"tenant-{number}") for number in range(MAX_PREFIXES)))
    async with _prewarming(_view("keeper", tenants=("team",)), *uses) as (_, engine, _):
        assert engine.calls


async def test_prompt_is_processed_in_steps_and_counted_apart_from_requests() -> None:
    async with _prewarming(_view("keeper")) as (stage, engine, caches):
        assert engine.calls == ["tokens: 64"]
        assert (stage.instance.records.all, stage.instance.slots.holders) == ((), ())
        engine.go.release()
        await stage.settle()
        assert engine.calls == ["tokens: 64", "chat: You are keeper."]
        engine.go.release()
        await stage.settle()
        figures = caches.figures("m")
        assert (figures.prewarmed_token_count, figures.prompt_token_count, figures.miss_count) == (400, 0, 0)


async def test_late_registry_is_waited_for(tmp_path: Path) -> None:
    """Without its agents, nothing was processed until the next load."""
    clock, address = FakeClock(), f"unix:{tmp_path}/s.sock"
    config = RunnerConfig(
        name="r", host="h", address=address, registry_address=address, session_file=tmp_path / "r", models=()
    )
    reading = asyncio.create_task(build(config, clock=clock)._mesh_view())
    await clock.advance(60.0)
    assert not reading.done()
    await end_tasks(reading)


async def test_replacing_instance_does_not_use_the_cache_of_the_replaced_one() -> None:
    """Its slots then had texts of which its own cache directory did not know, and any tenant could use them."""
    async with _prewarming(_view("keeper"), replaces=True) as (stage, engine, caches):
        await stage.clock.advance(1.0)
        assert engine.calls == []
        caches.add(stage.instance)
        await stage.advance(1.0)
        assert engine.calls == ["tokens: 64"]


async def test_request_is_served_first_and_interrupts_the_processing() -> None:
    async with _prewarming(_view("keeper")) as (stage, engine, _):
        caller = await stage.request()
        await stage.settle()
        assert engine.calls == ["tokens: 64", "interrupted", "chat: "]
        engine.go.release()
        await stage.settle()
        assert caller.done()
        assert engine.calls[3:] == ["tokens: 64"]


@pytest.mark.parametrize(
    ("view", "uses", "texts"),
    [
        (_view("editor", "keeper"), (), ["editor", "keeper"]),
        (_view("editor", tenants=("default",)), (), ["editor"]),
        (_view("editor", "keeper", tenants=("default", "team")), (), []),
        (_view("editor", "keeper", tenants=("default", "team")), [("keeper", "team"), ("keeper", "b")], ["keeper"] * 2),
        (_view(), [("keeper", "team")], []),
    ],
)
async def test_prompts_are_processed_for_the_tenants_that_use_them(
    view: FleetView, uses: list[tuple[str, str]], texts: list[str]
) -> None:
    async with _prewarming(view, *uses) as (stage, engine, _):
        for _ in range(8):
            engine.go.release()
        await stage.settle()
        assert [call for call in engine.calls if call.startswith("chat")] == [f"chat: You are {one}." for one in texts]
