"""What a runner learns from servers that run already: capabilities, context, slots, and the requests of others."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from kit.engine_settings import engine_settings
from kit.engines import CALL, chat, started
from kit.fake_backend import run_fake_backend
from kit.http_server import http_server
from structlog.testing import capture_logs

from runner_svc.backend.port import BackendFacts
from runner_svc.runtimes import engine_figures
from runner_svc.runtimes.openai_http.facts import capabilities_from_ollama
from runner_svc.runtimes.openai_http.openai_http_backend import AttachedServer
from runner_svc.runtimes.openai_http.runtime import ATTACHED_SLOTS, MAX_ATTACHED_SLOTS, OpenAiHttpModel
from weft.api.registry.v1.runner_pb2 import EngineLoad
from weft.kernel.requests.capabilities import UNKNOWN, Capabilities
from weft.kernel.requests.request_values import Skill

SECONDS = 10.0


def attached(url: str, **settings: Any) -> AbstractAsyncContextManager[tuple[AttachedServer, BackendFacts]]:
    return started(AttachedServer(*engine_settings(OpenAiHttpModel, url=url, **settings)))


class Routes:
    """A server with fixed answers, which notes what it is asked."""

    def __init__(self, answers: Mapping[str, Any]) -> None:
        self._answers = answers
        self.asked: list[str] = []

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked.append(f"{request.path} {(await request.read()).decode()}".strip())
        found = self._answers.get(request.path)
        return web.Response(status=404) if found is None else web.Response(text=json.dumps(found))


@asynccontextmanager
async def serving(**answers: Any) -> AsyncIterator[tuple[str, Routes]]:
    routes = Routes({f"/{path.replace('__', '/')}": answer for path, answer in answers.items()})
    async with http_server(routes.answer) as url:
        yield url, routes


def models(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"object": "list", "data": list(entries)}


async def test_context_and_slots_of_a_llama_cpp_server_are_detected() -> None:
    async with (
        run_fake_backend("--parallel", "2", "--ctx-size", "8192") as fake,
        attached(fake.base_url, slots=4) as (_, facts),
    ):
        assert (facts.context_tokens, facts.slots) == (4096, 2)
        assert Skill.TOOLS in facts.capabilities.skills


async def test_settings_can_use_less_than_the_server_offers() -> None:
    async with (
        run_fake_backend("--parallel", "8", "--ctx-size", "8192") as fake,
        attached(fake.base_url, slots=3, context_tokens=512) as (_, facts),
    ):
        assert (facts.context_tokens, facts.slots) == (512, 0), "as configured"


async def test_server_with_more_slots_than_the_default_is_sent_that_many_requests() -> None:
    """A llama.cpp server with 256 slots was sent 64 requests at once: the default for servers that say nothing."""
    async with run_fake_backend("--parallel", "256") as fake, attached(fake.base_url) as (_, facts):
        assert facts.slots == 256 > ATTACHED_SLOTS


async def test_concurrency_is_capped_at_the_ceiling_and_logged() -> None:
    props = {"total_slots": 10**6}
    async with serving(v1__models=models({"id": "m"}), props=props) as (url, _):
        with capture_logs() as lines:
            async with attached(url, upstream_model="m") as (_, facts):
                assert facts.slots == MAX_ATTACHED_SLOTS
    (line,) = (line for line in lines if line["event"] == "server processes more concurrent requests than configured")
    assert (line["server_slots"], line["max_slots"]) == (10**6, MAX_ATTACHED_SLOTS)


@pytest.mark.parametrize(
    ("route", "info", "slots"),
    [
        ("server_info", {"vllm_config": {"scheduler_config": {"max_num_seqs": 256}}}, 256),
        ("server_info", {"vllm_config": "model='m', max_num_seqs=256"}, 0),
        ("server_info", {"vllm_config": {"scheduler_config": {"max_num_seqs": True}}}, 0),
        ("server_info", {"internal_states": [{"effective_max_running_requests_per_dp": 128}]}, 128),
        (
            "get_server_info",
            {"dp_size": 2, "internal_states": [{"effective_max_running_requests_per_dp": 128}]},
            256,
        ),
        (
            "get_server_info",
            {"dp_size": 2, "internal_states": [{"effective_max_running_requests_per_dp": 128}] * 2},
            256,
        ),
        ("server_info", {"internal_states": [{}]}, 0),
    ],
)
async def test_slots_of_vllm_and_sglang_are_read_from_their_configuration(
    route: str, info: dict[str, Any], slots: int
) -> None:
    listed = models({"id": "m", "max_model_len": 4096})
    async with (
        serving(v1__models=listed, **{route: info}) as (url, _),
        attached(url, upstream_model="m") as (_, facts),
    ):
        assert facts.slots == slots


async def test_other_servers_are_not_queried_for_vllm_configuration() -> None:
    async with serving(v1__models=models({"id": "m"})) as (url, routes), attached(url, upstream_model="m"):
        assert not any("server_info" in path for path in routes.asked)


@pytest.mark.parametrize(
    ("length", "context"), [(16384, 16384), ("long", 0), (True, 0), (-1, 0), (2**40, 0), (None, 0)]
)
async def test_context_of_vllm_is_read_from_its_model_list(length: Any, context: int) -> None:
    entry = {"id": "qwen", "owned_by": "vllm", "max_model_len": length}
    async with serving(v1__models=models(entry)) as (url, _), attached(url, upstream_model="qwen") as (_, facts):
        assert facts.context_tokens == context
        assert facts.capabilities == UNKNOWN


async def test_ollama_is_queried_for_model_capabilities() -> None:
    listed = models({"id": "llava:latest", "owned_by": "library"}, {"id": "qwen3:8b", "owned_by": "library"})
    show = {"capabilities": ["completion", "vision"]}
    async with (
        serving(v1__models=listed, api__show=show) as (url, routes),
        attached(url, upstream_model="llava") as (
            _,
            facts,
        ),
    ):
        assert facts.capabilities == Capabilities(
            skills=frozenset({Skill.TEXT, Skill.IMAGE}), lacking=frozenset({Skill.TOOLS})
        )
        assert '/api/show {"model":"llava"}' in routes.asked
        assert not any(path.startswith("/props") for path in routes.asked), "its properties would be of no one model"


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([], UNKNOWN),
        (["embedding"], UNKNOWN),
        (
            ["completion", "tools", "audio", "thinking", "new"],
            Capabilities(skills=frozenset({Skill.TEXT, Skill.TOOLS, Skill.AUDIO}), lacking=frozenset({Skill.IMAGE})),
        ),
    ],
)
def test_capabilities_ollama_does_not_list_stay_unknown(capabilities: list[str], expected: Capabilities) -> None:
    assert capabilities_from_ollama(capabilities) == expected


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"v1__models": []},
        {"v1__models": models({"id": "m"}), "props": {"modalities": "none", "total_slots": "x"}},
        {"v1__models": models({"id": "m", "owned_by": "library"}), "api__show": {"capabilities": {"vision": True}}},
    ],
    ids=["no route", "a list of another form", "properties of another form", "capabilities of another form"],
)
async def test_facts_a_server_does_not_report_stay_unknown(answers: dict[str, Any]) -> None:
    async with serving(health="ok", **answers) as (url, _), attached(url, upstream_model="m") as (_, facts):
        assert (facts.context_tokens, facts.slots, facts.capabilities) == (0, 0, UNKNOWN)


async def test_remote_server_is_queried_only_for_its_model_list() -> None:
    async with serving(v1__models=models({"id": "m", "max_model_len": 4096})) as (url, routes):
        async with attached(url, upstream_model="m", remote=True) as (backend, facts):
            assert facts.context_tokens == 0
            assert backend.engine_load is None
        assert set(routes.asked) == {"/v1/models"}


async def test_foreign_requests_on_a_server_are_counted_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_figures, "SAMPLE_SECONDS", 0.05)
    async with (
        run_fake_backend(answer_tokens=0, tokens_per_second=20) as fake,
        attached(fake.base_url) as (backend, _),
        aiohttp.ClientSession(fake.base_url) as other,
        aclosing(backend.generate(chat(), CALL)) as frames,
    ):
        await anext(frames)
        await _until(backend, running_count=1, other_count=0)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with other.post("/v1/chat/completions", json=body):
            await _until(backend, running_count=2, other_count=1)
        await _until(backend, running_count=1, other_count=0)


async def _until(backend: AttachedServer, **figures: int) -> None:
    load = EngineLoad()
    async with asyncio.timeout(SECONDS):
        while any(getattr(load, name) != value for name, value in figures.items()) or not load.HasField("sample_time"):
            await asyncio.sleep(0.01)
            load = backend.engine_load or EngineLoad()
