"""vLLM itself on a processor, under its own environment, with the demo model. A start takes one to three minutes."""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from kit.demo_answers import CERTAIN_ANSWER, certain_chat
from kit.engine_settings import engine_settings
from kit.peft_folder import write_peft_adapter
from mesh_process import WEFT, MeshProcess, alive, eventually, running_mesh, user_environment, write_config
from native_builds import built_vllm

from runner_svc.backend.port import BackendFacts, CacheUse, CallInfo, LoadOrder
from runner_svc.memory.estimate import read_model_facts
from runner_svc.policy.cache_directory import Partition
from runner_svc.policy.engine_blocks import PromptPrefixes
from runner_svc.policy.memory_estimate import MEBIBYTE
from runner_svc.runtimes.vllm.arguments import CACHE_BLOCK_TOKENS, server_arguments
from runner_svc.runtimes.vllm.runtime import VllmAdapter, VllmModel
from runner_svc.runtimes.vllm.vllm_backend import VllmBackend
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, tokenize_pb2
from weft.api.registry.v1 import runner_pb2
from weft.dispatch.frames import Frame, has_content
from weft.dispatch.payload_description import cache_scope, prompt_prefixes
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_testing.conformance.backend_steps import chat

pytestmark = [pytest.mark.runtimes, pytest.mark.timeout(3700)]
AT_NIGHT = pytest.mark.nightly("each start of vLLM takes 40 s of both processors")


def _at_night(value: str) -> Any:
    return pytest.param(value, marks=AT_NIGHT)


START_SECONDS = 600.0
NOTICE_SECONDS = 30.0
IDLE_STREAM_SECONDS = 10.0
STORY = "Tell me a long story about a fox and a crow. "
LONG_PROMPT = STORY * 120
"""About 1,600 tokens: their prefill takes longer than noticing that the caller left."""
CACHED_PROMPT = STORY * 30
EAGER = {"extra_arguments": ["--enforce-eager"]}
_NUMBERS = iter(range(10_000))


def _backend(**settings: Any) -> VllmBackend:
    program, model = built_vllm()
    given = {
        "name": "smollm2",
        "model": str(model),
        "command": (str(program),),
        "dtype": "bfloat16",
        **EAGER,
        "tool_call_parser": "hermes",
        "load_stall_seconds": START_SECONDS,
        **settings,
    }
    return VllmBackend(*engine_settings(VllmModel, **given), shape=read_model_facts(model).shape)


@asynccontextmanager
async def _running(**settings: Any) -> AsyncGenerator[tuple[VllmBackend, BackendFacts]]:
    backend = _backend(**settings)
    async with asyncio.timeout(START_SECONDS):
        facts = await backend.start()
    try:
        yield backend, facts
    finally:
        await backend.stop()


def _call(**given: Any) -> CallInfo:
    return CallInfo(request_id=f"r{next(_NUMBERS)}", traceparent=new_traceparent(), **given)


async def _answered(backend: VllmBackend, payload: chat_pb2.ChatPayload, **given: Any) -> list[Frame]:
    async with asyncio.timeout(120):
        return [frame async for frame in backend.generate(payload, _call(**given))]


async def _frames(backend: VllmBackend, text: str, cache: CacheUse | None = None) -> list[Frame]:
    return await _answered(backend, chat(text=text, max_tokens=16), cache=cache or CacheUse())


async def _drained(frames: AsyncGenerator[Frame]) -> None:
    async with asyncio.timeout(NOTICE_SECONDS):
        async for _ in frames:
            pass


async def _load(backend: VllmBackend) -> runner_pb2.EngineLoad:
    """The figures of a sample that was taken after this call."""
    backend.figures.load = None
    found = await eventually(lambda: backend.engine_load, NOTICE_SECONDS, "there is no sample")
    assert isinstance(found, runner_pb2.EngineLoad)
    return found


def _cached(frames: list[Frame]) -> int:
    return frames[-1][-1].finished.receipt.usage.cached_prompt_tokens


def _members(backend: VllmBackend) -> list[psutil.Process]:
    return [psutil.Process(process.pid) for process in backend.processes()]


def _worker(members: list[psutil.Process]) -> psutil.Process:
    """The process that has the weights."""
    return max(members, key=lambda process: process.memory_info().rss)


async def _leave(backend: VllmBackend, text: str, *, in_prefill: bool) -> None:
    """Leaves an answer, and asserts that the engine no longer works on it."""
    async with aclosing(backend.generate(chat(text=text, max_tokens=300), _call())) as left:
        if in_prefill:
            reading = asyncio.ensure_future(anext(left))
            await asyncio.sleep(0.1)
            assert not reading.done()
            reading.cancel()
            await asyncio.wait({reading})
        else:
            while not has_content(await anext(left)):
                pass
    idle = await _load(backend)
    assert (idle.running_count, idle.waiting_count) == (0, 0)


async def _follow_grammars(backend: VllmBackend) -> None:
    payload = chat(text="Say something.", max_tokens=8)
    grammar = payload.extra_parameters.fields.add(name="grammar").value
    grammar.string_value = 'root ::= "yes" | "no"'
    answered = await _answered(backend, payload)
    assert "".join(event.delta.text for frame in answered for event in frame) in ("yes", "no")
    grammar.string_value = "root ::= ("
    with pytest.raises(WeftError) as refused:
        await _answered(backend, payload)
    assert refused.value.reason in (Reason.INVALID_ARGUMENT, Reason.BACKEND_REJECTED), "and the engine goes on"


async def test_model_life_cycle_works_end_to_end() -> None:
    stages = []
    backend = _backend()
    starting = asyncio.create_task(backend.start())
    while not starting.done():
        if (share := backend.load_progress()) is not None and share not in stages:
            stages.append(share)
        await asyncio.sleep(0.05)
    facts = await starting
    try:
        assert stages == sorted(stages)
        assert {0.1, 0.6, 0.95} <= set(stages)
        assert (facts.context_tokens, facts.slots) == (2048, 4)
        assert Operation.CHAT in facts.operations

        # A chat is streamed, and its tokens are counted.
        frames = await _answered(backend, certain_chat(16))
        events = [event for frame in frames for event in frame]
        assert "".join(event.delta.text for event in events) == CERTAIN_ANSWER
        assert sum(has_content(frame) for frame in frames) > 1
        receipt = events[-1].finished.receipt
        assert receipt.usage.completion_tokens > 0
        timings = receipt.engine_timings
        assert min(timings.prefill_time.ToMicroseconds(), timings.decode_time.ToMicroseconds()) > 0

        await _follow_grammars(backend)

        # Cached tokens are told; a tenant finds nothing of another one; a flush leaves nothing.
        salt, other = CacheUse(salt="a" * 64), CacheUse(salt="b" * 64)
        assert _cached(await _frames(backend, CACHED_PROMPT, salt)) == 0
        found = _cached(await _frames(backend, CACHED_PROMPT, salt))
        assert found > 0
        assert found % CACHE_BLOCK_TOKENS == 0
        assert _cached(await _frames(backend, CACHED_PROMPT, other)) == 0
        await backend.erase_cache()
        assert _cached(await _frames(backend, CACHED_PROMPT, salt)) == 0

        await _leave(backend, LONG_PROMPT, in_prefill=True)
        await _leave(backend, STORY, in_prefill=False)

        # It tells its figures, and what weft forecasts of its cache is what it has.
        load = await _load(backend)
        assert load.prefix_hit_tokens >= found
        given = server_arguments(backend.model, backend._order, backend._shape)
        cache_bytes = int(given[given.index("--kv-cache-memory-bytes") + 1])
        assert load.kv_cache_tokens * 23_040 == pytest.approx(cache_bytes, abs=128 * 23_040 + MEBIBYTE)
        counted = await backend.tokenize(tokenize_pb2.TokenizePayload(text="hello world"), _call())
        assert (counted.count, counted.max_context_tokens) == (2, 2048)

        # On a processor it cannot sleep in its process; vLLM itself takes the routes.
        assert not await backend.sleep()
        members = _members(backend)
        held = sum(process.memory_info().rss for process in members)
        assert held > 500 * MEBIBYTE
    finally:
        await backend.stop()
    assert alive(members) == []


async def test_cached_prefixes_are_known_from_the_events_of_the_real_engine() -> None:
    payload = chat(text=STORY * 70, max_tokens=8)
    digests, chars = prompt_prefixes(payload, cache_scope("t", ""))
    prefixes = PromptPrefixes(digests, chars, Partition("t"))
    settings = {"kv_events": True, "slots": 1, "extra_arguments": ["--enforce-eager", "--block-size", "32"]}
    async with _running(**settings) as (backend, _):
        reports = backend.prefix_reports
        assert reports is not None
        for text in (payload, payload):
            frames = await _answered(backend, text, cache=CacheUse(salt="t"), prefixes=prefixes)
            await eventually(lambda: sorted(reports.prefixes) == sorted(digests), NOTICE_SECONDS, "not reported")
        assert _cached(frames) > 0.9 * frames[-1][-1].finished.receipt.usage.prompt_tokens

        # Its cache has room for 2,048 tokens and a block.
        for number in range(4):
            await _answered(backend, chat(text=f"{number} " + "Another thing, numbers and words. " * 200, max_tokens=8))
        await eventually(lambda: not {*digests} & {*reports.prefixes}, NOTICE_SECONDS, "not evicted")
        frames = await _answered(backend, payload, cache=CacheUse(salt="t"), prefixes=prefixes)
        assert _cached(frames) == 0
        await eventually(lambda: sorted(reports.prefixes) == sorted(digests), NOTICE_SECONDS, "not reported")
        await backend.erase_cache()
        assert reports.prefixes == []


@AT_NIGHT
async def test_embedding_model_returns_vectors() -> None:
    async with _running(kind="embedding", tool_call_parser=None) as (backend, facts):
        assert facts.operations == {Operation.EMBEDDING, Operation.TOKENIZE}
        inputs = [completion_pb2.PromptInput(text=text) for text in ("a fox", "a crow")]
        async with asyncio.timeout(120):
            result = await backend.embed(embedding_pb2.EmbeddingPayload(inputs=inputs), _call())
        one, other = ([*vector.values] for vector in result.embeddings)
        assert len(one) == len(other) == 576
        assert one != other
        assert result.usage.prompt_tokens > 0


@pytest.mark.parametrize("victim", [_at_night("server"), _at_night("engine"), "worker"])
async def test_death_of_any_process_ends_all_of_them_and_the_answer(victim: str) -> None:
    async with _running() as (backend, _):
        members = _members(backend)
        worker = _worker(members)
        chosen = {
            "server": next(process for process in members if process.pid == backend.process_id),
            "engine": worker.parent(),
            "worker": worker,
        }[victim]
        assert chosen is not None
        ended = asyncio.create_task(backend.wait_exit())
        async with aclosing(backend.generate(chat(text=STORY, max_tokens=1500), _call())) as frames:
            while not has_content(await anext(frames)):
                pass
            chosen.kill()
            with pytest.raises(WeftError) as failed:
                await _drained(frames)
        assert failed.value.reason in (Reason.SERVER_DIED, Reason.BACKEND_ERROR, Reason.BACKEND_PROTOCOL_ERROR)
        async with asyncio.timeout(NOTICE_SECONDS):
            assert (await ended).reason is Reason.SERVER_DIED
        await backend.stop()
        assert alive(members) == []


async def test_sleep_and_abort_routes_of_vllm_match_the_fake() -> None:
    async with _running() as (backend, _):
        connector = aiohttp.UnixConnector(backend._socket_path)
        async with aiohttp.ClientSession("http://vllm", connector=connector) as session:

            async def post(path: str, **body: Any) -> dict[str, Any]:
                async with session.post(path, json=body) as answer:
                    assert answer.status == 200, path
                    return dict(await answer.json())

            async def is_sleeping() -> bool:
                async with session.get("/is_sleeping") as answer:
                    return bool((await answer.json())["is_sleeping"])

            assert (await post("/sleep?level=1"))["status"] == "sleeping"
            assert await is_sleeping()
            assert (await post("/wake_up"))["status"] == "awake"
            assert not await is_sleeping()
            assert (await post("/reset_prefix_cache")) == {"success": True}
            call = _call()
            async with aclosing(backend.generate(chat(text=STORY, max_tokens=1500), call)) as frames:
                while not has_content(await anext(frames)):
                    pass
                await post("/abort_requests", request_ids=[f"chatcmpl-{call.request_id}"])
                with pytest.raises(WeftError):
                    await _drained(frames)
            async with session.get("/v1/models") as answer:
                assert answer.status == 401


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    program, model = built_vllm()
    runner = {
        "name": "gpu",
        "runtime": "vllm",
        "command": [str(program)],
        "load_stall_seconds": START_SECONDS,
        "idle_stream_timeout_seconds": IDLE_STREAM_SECONDS,
        "models": [
            {
                "name": "smollm2",
                "model": str(model),
                "dtype": "bfloat16",
                "extra_arguments": ["--enforce-eager"],
                "start_asleep": True,
            }
        ],
    }
    folder = tmp_path_factory.mktemp("vllm")
    with running_mesh(folder / "home", "--config", str(write_config(folder, runner))) as mesh:
        yield mesh


def _weft(mesh: MeshProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WEFT, *arguments, "--home", str(mesh.home)],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=3 * START_SECONDS,
        check=False,
    )


def _engines(mesh: MeshProcess) -> list[psutil.Process]:
    return [process for process in mesh.family() if process.memory_info().rss > 300 * MEBIBYTE]


async def test_request_wakes_a_sleeping_model_and_a_hung_worker_is_detected_by_missing_tokens(
    mesh: MeshProcess,
) -> None:
    body = {"model": "smollm2", "messages": [{"role": "user", "content": STORY}], "max_tokens": 1500, "stream": True}
    began = 0.0
    timeout = aiohttp.ClientTimeout(total=2 * START_SECONDS)
    async with aiohttp.ClientSession(mesh.url, timeout=timeout) as client:
        async with client.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            lines = []
            async for line in answer.content:
                if b'"content":"' in line and not began:
                    began = time.monotonic()
                    os.kill(_worker(_engines(mesh)).pid, signal.SIGSTOP)
                lines.append(line)
        assert [line for line in lines if b"stall_timeout" in line], lines[-3:]
        assert IDLE_STREAM_SECONDS - 1 < time.monotonic() - began < IDLE_STREAM_SECONDS + NOTICE_SECONDS
        async with client.post("/v1/chat/completions", json={**body, "stream": False, "max_tokens": 8}) as whole:
            assert whole.status == 200, f"it was to be started again: {await whole.text()}"
    description = await mesh.describe("gpu")
    assert [Reason(restart.reason) for restart in description.restarts] == [Reason.STALL_TIMEOUT]


async def test_conversations_without_streams_go_on_beside_each_other(
    mesh: MeshProcess,
) -> None:
    """The router learns the engine's speed from them, and lets none wait for ever behind the others' prompts."""
    timeout = aiohttp.ClientTimeout(total=2 * START_SECONDS)

    async def converse(number: int) -> list[int]:
        messages, cached = [{"role": "user", "content": f"Story {number}. {STORY} " * 40}], list[int]()
        for _ in range(2):
            body = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0}
            async with client.post("/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                said = await answer.json()
            cached.append(said["usage"]["prompt_tokens_details"]["cached_tokens"])
            messages += [said["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        return cached

    async with aiohttp.ClientSession(mesh.url, timeout=timeout) as client:
        found = await asyncio.gather(*(converse(number) for number in range(6)))
    assert all(second > 256 > first for first, second in found), found


@AT_NIGHT
async def test_weft_conformance_passes_and_an_unload_frees_the_memory(mesh: MeshProcess) -> None:
    done = await asyncio.to_thread(_weft, mesh, "runner", "conformance", "gpu", "-o", "json")
    findings: list[dict[str, Any]] = json.loads(done.stdout)["items"]
    assert {finding["check"]: finding["detail"] for finding in findings if finding["verdict"] != "honoured"} == {
        "embeddings": "the model gives no embeddings"
    }
    assert done.returncode == 0
    done = await asyncio.to_thread(_weft, mesh, "unload", "smollm2")
    assert done.returncode == 0, done.stderr
    await eventually(lambda: not _engines(mesh), NOTICE_SECONDS, "vLLM still has memory")


_CONNECTOR = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:])
arguments.model = arguments.model_tag
found = AsyncEngineArgs.from_cli_args(arguments).create_engine_config().kv_transfer_config
print(found.kv_connector, int(found.kv_connector_extra_config["cpu_bytes_to_use"]))
"""


def test_kept_prompts_turn_on_the_offloading_of_vllm() -> None:
    """Without a GPU: its parser and its configuration only."""
    program, _ = built_vllm()
    arguments = server_arguments(_backend(kept_prompts_mb=1536).model, LoadOrder())
    command = [str(program.resolve().with_name("python")), "-c", _CONNECTOR, *arguments]
    environment = {**user_environment(), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.stdout.splitlines()[-1] == f"OffloadingConnector {1536 * MEBIBYTE}"


@AT_NIGHT
async def test_adapters_answer_by_name_and_share_no_prefixes(tmp_path: Path) -> None:
    adapters = tuple(
        VllmAdapter(name=name, path=str(write_peft_adapter(tmp_path / name, strength=strength)))
        for name, strength in (("nonsense", 0.5), ("mute", 0.0))
    )
    async with _running(adapters=adapters, context_tokens=1024, slots=2) as (backend, _):

        async def ask(adapter: str) -> tuple[str, int]:
            call = _call(adapter=adapter)
            text = CACHED_PROMPT + "What is the capital of France?"
            frames = [frame async for frame in backend.generate(chat(text=text, max_tokens=16), call)]
            events = [event for frame in frames for event in frame]
            assert not [event for event in events if event.HasField("warning")]
            return "".join(event.delta.text for event in events), _cached(frames)

        plain, cached = await ask("")
        assert cached == 0
        assert (await ask(""))[1] > 0
        odd, cached = await ask("nonsense")
        assert cached == 0, "the prompt as the model without an adapter computed it is of no use"
        assert odd != plain
        assert (await ask("nonsense"))[1] > 0
        same, cached = await ask("mute")
        assert (same, cached) == (plain, 0)
