"""Presets of aliases and agents on every API: what the runner is asked, and what the answer reports."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gateway_script import FixedFleet, RunningGateway, ScriptedDispatcher, agent, model, serving
from inference_stage import conversation, outcome, stub_of
from kit.grpc_server import served
from mesh_script import AnsweringRunner, GrantingScheduler, dispatching
from test_quotes_http import ScriptedRouter

from router_svc.inference_servicer import InferenceServicer
from weft.api.common.v1 import chat_pb2, receipt_pb2, sampling_pb2, tokenize_pb2, warning_pb2
from weft.api.registry.v1.alias_pb2 import Alias, AliasManifest
from weft.api.router.v1 import inference_service_pb2
from weft.dispatch.aliases import asked_name
from weft.dispatch.quoter import Quoter
from weft.dispatch.token_counts import PromptCounts
from weft.kernel.schemas.json_schema import SchemaLimits
from weft.kernel.values.names import CENTRAL_RUNNER

MESSAGES = [{"role": "user", "content": "hi"}]
WARNING = {"code": "parameter_changed", "field": "temperature", "message": "was replaced by alias/calm"}


def fleet() -> FixedFleet:
    calm = AliasManifest(name="calm", pattern="calm", target="tiny", removed_params=["top_p"])
    calm.default_params.CopyFrom(sampling_pb2.SamplingParams(max_tokens=33, reasoning_effort="low"))
    calm.forced_params.temperature = 0.25
    calm.provider_headers["x-title"] = "weft"
    wild = AliasManifest(name="wild", pattern="wild-*", target="agent/coder")
    wild.forced_params.CopyFrom(sampling_pb2.SamplingParams(temperature=1.5, thinking=False))
    known = FixedFleet.of(model("tiny"), agents=[agent("coder")])
    aliases = {each.name: Alias(manifest=each) for each in (calm, wild)}
    return FixedFleet(replace(known.view, aliases=aliases))


@asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[tuple[RunningGateway, AnsweringRunner, GrantingScheduler]]:
    async with (
        dispatching(folder, fleet()) as (dispatcher, scheduler, runner),
        serving(dispatcher, fleet=fleet()) as gateway,
    ):
        yield gateway, runner, scheduler


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 33}),
        ("/v1/responses", {"input": "hi"}),
        ("/api/chat", {"messages": MESSAGES, "stream": False, "options": {"temperature": 1, "top_p": 0.5}}),
        ("/api/generate", {"prompt": "hi", "stream": False, "options": {"temperature": 1, "top_p": 0.5}}),
    ],
)
async def test_every_api_applies_the_preset_and_reports_it(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with mesh(tmp_path) as (gateway, runner, scheduler):
        own = {} if "options" in body else {"temperature": 1, "top_p": 0.5}
        answer = (await gateway.request("POST", path, {"model": "calm", **body, **own})).of(200)
    [asked] = runner.asked
    payload = asked.chat if asked.HasField("chat") else asked.completion
    assert payload.sampling == sampling_pb2.SamplingParams(temperature=0.25, max_tokens=33)
    if asked.HasField("chat"):
        assert asked.chat.reasoning_effort == chat_pb2.REASONING_EFFORT_LOW
    assert scheduler.placed[0].max_output_tokens == 33
    removed = {"code": "parameter_changed", "field": "top_p", "message": "was removed by alias/calm"}
    assert answer["warnings"] == [WARNING, removed]


async def test_stream_reports_the_preset_and_a_retry_keeps_it(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (gateway, runner, _):
        body = {"model": "calm", "messages": MESSAGES, "temperature": 1, "stream": True}
        answer = await gateway.request("POST", "/v1/chat/completions", body)
    assert b": warning parameter_changed field=temperature was replaced by alias/calm\n" in answer.body
    assert runner.asked[0].chat.sampling.temperature == 0.25


async def test_two_aliases_of_one_model_differ_and_their_prompts_stay_the_caller_s(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (gateway, runner, scheduler):
        for name in ("calm", "wild-1", "tiny"):
            body = {"model": name, "messages": MESSAGES}
            answer = (await gateway.request("POST", "/v1/chat/completions", body)).of(200)
            assert "warnings" not in answer
    calm, wild, plain = (each.chat for each in runner.asked)
    assert [each.sampling.temperature for each in (calm, wild)] == [0.25, 1.5]
    assert (wild.thinking, wild.HasField("thinking"), wild.messages[0].content[0].text) == (False, True, "Be terse.")
    assert not plain.HasField("sampling")
    assert calm.messages == plain.messages
    assert {each.model for each in scheduler.placed} == {"tiny"}


async def test_grpc_applies_the_preset_and_its_receipt_says_so(tmp_path: Path) -> None:
    async with dispatching(tmp_path, fleet()) as (dispatcher, _, runner):
        servicer = InferenceServicer(dispatcher, 30, SchemaLimits(), asked=partial(asked_name, fleet().view))
        async with served(servicer.add_to_server, address=f"unix:{tmp_path / 'router.sock'}") as channel:
            payload = conversation("hi")
            payload.sampling.temperature = 1
            request = inference_service_pb2.ChatRequest(model="calm", payload=payload)
            events = await outcome(stub_of(channel).Chat(request))
    assert runner.asked[0].chat.sampling.temperature == 0.25
    [warning] = [event.warning for event in events if event.HasField("warning")]
    assert (warning.code, warning.field) == (warning_pb2.WARNING_CODE_PARAMETER_CHANGED, "temperature")
    [changed] = events[-1].finished.receipt.changed_parameters
    assert (changed.name, changed.author, changed.removed) == ("temperature", "alias/calm", False)


async def test_headers_are_sent_to_the_runner_of_central_models_alone(tmp_path: Path) -> None:
    async with mesh(tmp_path) as (gateway, runner, scheduler):
        for name_of_runner in ("r1", CENTRAL_RUNNER):
            scheduler.runner = name_of_runner
            for name in ("calm", "wild-1"):
                body = {"model": name, "messages": MESSAGES}
                (await gateway.request("POST", "/v1/chat/completions", body)).of(200)
    assert [dict(each.options.provider_headers) for each in runner.asked] == [{}, {}, {"x-title": "weft"}, {}]


async def test_quote_counts_the_token_limit_of_the_preset() -> None:
    router = ScriptedRouter()
    quoter = Quoter(router, fleet(), PromptCounts())
    async with serving(fleet=fleet(), quotes=quoter) as gateway:
        (await gateway.request("POST", "/v1/quotes", {"model": "calm", "messages": MESSAGES})).of(200)
    assert [each.max_output_tokens for each in router.asked] == [33]


async def test_count_of_a_prompt_reports_what_its_receipt_says() -> None:
    changed = receipt_pb2.ChangedParameter(name="thinking", author="alias/calm", removed=True)
    dispatcher = ScriptedDispatcher(whole=tokenize_pb2.TokenizeResult(count=7))
    dispatcher.receipt = lambda: receipt_pb2.Receipt(changed_parameters=[changed])  # type: ignore[method-assign]
    async with serving(dispatcher, fleet=fleet()) as gateway:
        body = {"model": "calm", "messages": MESSAGES}
        answer = await gateway.request("POST", "/v1/messages/count_tokens", body)
    assert answer.of(200) == {
        "input_tokens": 7,
        "warnings": [{"code": "parameter_changed", "field": "thinking", "message": "was removed by alias/calm"}],
    }
