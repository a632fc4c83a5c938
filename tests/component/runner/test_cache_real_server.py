"""Many tenants on one real llama.cpp server: no tenant finds the prefix of another."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from kit.engine_settings import engine_settings
from kit.one_model import OneModel, OneModelCache
from runner_harness import RunningRunner, events_of, ready_runner

from runner_svc.backend.port import Backend
from runner_svc.cache.manager import CacheManager
from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel, llama_command
from weft.api.common.v1 import chat_pb2
from weft.api.runner.v1 import ticket_pb2
from weft.dispatch.payload_description import cache_scope, prompt_prefixes
from weft_app.compose.demo import demo_model_path
from weft_testing.conformance.prefix_cache import MODEL, PROMPTS, SEA

pytestmark = pytest.mark.real


@pytest.mark.slow("computes prompts")
async def test_server_resumes_conversations_that_lost_their_slots() -> None:
    suite = TestLlamaServerFromTheWheel()
    async with suite.tenants() as ask:
        prompts = [prompt * 5 for prompt in PROMPTS]
        for prompt in prompts:
            await ask.cached("a", prompt)
        await ask.cached("b", prompts[0])
        found = [await ask.cached("a", f"{prompt} And then?") for prompt in prompts]
        assert min(found) > 200
        assert await ask.cached("c", prompts[0]) == 0


@pytest.mark.slow("computes prompts")
async def test_prompt_survives_an_unload_and_a_restart_of_the_runner(tmp_path: Path) -> None:
    server = TestLlamaServerFromTheWheel().make_backend
    models = [ServedModel(name="m", slots=2, make_backend=server)]
    messages = [_user("Name a colour. " * 60)]
    cached, answers = [], []

    async def ask(runner: RunningRunner) -> None:
        events = await events_of(runner.generate(messages=messages, max_tokens=64))
        cached.append(events[-1].finished.receipt.usage.cached_prompt_tokens)
        answers.append("".join(event.delta.text for event in events))

    async with ready_runner(tmp_path, models, stored_prompts_mb=100) as runner:
        assert (await runner.described()).cache.continues_restored
        await ask(runner)
        await ask(runner)
        await runner.unload()
        await runner.wake()
        await runner.until(Phase.READY)
        await ask(runner)
    async with ready_runner(tmp_path, models, stored_prompts_mb=100) as runner:
        await ask(runner)
    assert cached[0] == 0
    assert cached[1] == cached[2] == cached[3] > 200
    assert answers[1] == answers[2] == answers[3]


@pytest.mark.slow("computes prompts")
async def test_prompt_moved_to_another_runner_continues_with_the_same_tokens(tmp_path: Path) -> None:
    server = TestLlamaServerFromTheWheel().make_backend
    models = [ServedModel(name="m", slots=2, make_backend=server, model_path=demo_model_path())]
    messages = [_user("Name a colour. " * 75)]
    digest = prompt_prefixes(chat_pb2.ChatPayload(messages=messages), cache_scope("", ""))[0][0]
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()

    async def ask(runner: RunningRunner, **claims: Any) -> tuple[int, str]:
        events = await events_of(runner.generate(messages=messages, max_tokens=64, ticket=claims))
        cached = events[-1].finished.receipt.usage.cached_prompt_tokens
        return cached, "".join(event.delta.text for event in events)

    async with ready_runner(folders[0], models, stored_prompts_mb=100) as one:
        await one.until_state(lambda state: bool(state.state_kind))
        await ask(one)
        undisturbed = await ask(one)
        await one.unload()
        await one.until_state(lambda state: state.stores_prompts)
        async with ready_runner(folders[1], models, stored_prompts_mb=100) as two:
            await two.until_state(lambda state: bool(state.state_kind))
            source = ticket_pb2.PromptSource(
                address=f"unix:{folders[0]}/runner.sock",
                ticket=one.ticket(model="m", moved_prefix=digest),
                max_time=Duration(seconds=20),
            )
            moved = await ask(two, prompt_source=source)
    assert moved == undisturbed
    assert moved[0] > 200


@pytest.mark.slow("computes prompts")
async def test_changing_billing_header_of_claude_code_leaves_the_prompt_cached(tmp_path: Path) -> None:
    server = TestLlamaServerFromTheWheel().make_backend
    messages = [chat_pb2.ChatMessage(role=chat_pb2.ROLE_SYSTEM), _user("Name a colour.")]
    cached = []
    async with ready_runner(tmp_path, [ServedModel(name="m", slots=2, make_backend=server)]) as runner:
        for changing in ("a1b2c", "d3e4f", "09876"):
            header = f"x-anthropic-billing-header: cc_version=2.1.37.{changing}; cc_entrypoint=cli; cch={changing};"
            del messages[0].content[:]
            messages[0].content.extend(chat_pb2.ContentPart(text=text) for text in (header, "Be brief. " * 80))
            events = await events_of(runner.generate(messages=messages, max_tokens=4))
            cached.append(events[-1].finished.receipt.usage.cached_prompt_tokens)
            answer = "".join(event.delta.text for event in events)
            parts = [chat_pb2.ContentPart(text=answer)]
            messages += [chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, content=parts), _user("And another?")]
    assert cached[0] == 0
    assert cached[2] > cached[1] > 200


def _user(text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])


@pytest.mark.nightly("repeats test_cache_fake_server on a real engine")
class TestLlamaServerFromTheWheel(OneModelCache):
    slots = 2

    def make_backend(self) -> LlamaServerBackend:
        return LlamaServerBackend(
            *engine_settings(
                LlamaServerModel,
                command=llama_command(()),
                path=demo_model_path(),
                name=MODEL,
                slots=2,
                context_tokens=512,
            )
        )

    def make_desk(self, backend: Backend) -> CacheManager:
        return CacheManager([OneModel(backend, model_path=demo_model_path())])

    async def test_flush_reports_the_reusable_memory(self) -> None:
        """SmolLM2 keeps 2 x 30 layers x 3 heads x 64 numbers of two bytes per token: 23,040 bytes."""
        async with self.tenants() as ask:
            await ask.cached("a", SEA)
            flushed = await ask.flush("all")
            assert flushed.token_count > 20
            assert flushed.reusable_bytes == flushed.token_count * 23_040
