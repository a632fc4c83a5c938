"""A runner of a provider's models: no byte without a permit, no key in its output, no fault shared by requests."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.counting_provider import CountingProvider, Reply, counting_provider
from runner_harness import RunningRunner, events_of, ready_runner, refusal

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from weft.api.common.v1 import chat_pb2
from weft.api.registry.v1 import model_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors.error_tree import UNSENT
from weft.kernel.errors.reasons import Reason
from weft_app.compose.served_models import runner_context, served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner
from weft_testing.free_port import free_port

KEY_VARIABLE = "FRONTIER_KEY"
KEY = "sk-very-secret-0123456789"


def _model(url: str, name: str = "m", **fields: Any) -> ServedModel:
    model = {"name": name, "url": url, "api_key_env": KEY_VARIABLE, "upstream_model": "frontier-4", **fields}
    section = parse_section(ConfiguredRunner, {"name": "cloud", "runtime": "openai_remote", "models": [model]})
    context = replace(runner_context(section), environment={KEY_VARIABLE: KEY})
    return served_model(section, section.models[0], 5.0, context)


@asynccontextmanager
async def _stage(folder: Path, **fields: Any) -> AsyncIterator[tuple[CountingProvider, RunningRunner]]:
    async with (
        counting_provider() as provider,
        ready_runner(folder, [_model(provider.base_url, **fields)], runtime="openai_remote") as runner,
    ):
        yield provider, runner


async def test_provider_is_sent_no_byte_without_a_permit_and_the_receipt_reports_remote_use(tmp_path: Path) -> None:
    async with _stage(tmp_path) as (provider, runner):
        for _ in range(3):
            assert (await refusal(events_of(runner.generate()))).reason is Reason.TICKET_INVALID
        assert (provider.connection_count, provider.byte_count) == (0, 0)
        receipt = (await events_of(runner.generate(allow_remote=True)))[-1].finished.receipt
        assert receipt.left_premises
        assert (receipt.usage.prompt_tokens, receipt.usage.completion_tokens) == (11, 3)
        assert len(provider.requests) == 1


@pytest.mark.slow("waits for the next report to the registry")
async def test_price_of_the_provider_is_published_once_it_is_known(tmp_path: Path) -> None:
    price = model_pb2.ModelPrice(prompt_dollars=0.5, completion_dollars=2.0)
    async with counting_provider() as provider:
        model = replace(_model(provider.base_url), list_price=lambda: price)
        async with ready_runner(tmp_path, [model], runtime="openai_remote") as runner:
            while runner.registry.opened[-1].models[0].price != price:
                await runner.until_opened(len(runner.registry.opened) + 1)


async def test_form_that_a_provider_wants_is_tried_once_and_then_used(tmp_path: Path) -> None:
    refused = b'{"error": {"message": "reasoning_content: Extra inputs are not permitted"}}'
    thought = chat_pb2.ChatMessage(role=chat_pb2.ROLE_ASSISTANT, reasoning="well")
    async with _stage(tmp_path) as (provider, runner):
        provider.replies.append(Reply(status=400, body=refused))
        for _ in range(2):
            events = await events_of(runner.generate(allow_remote=True, messages=[thought]))
            assert [event.warning.field for event in events if event.HasField("warning")] == ["messages"]
        sent = ["reasoning_content" in body["messages"][0] for body in provider.bodies]
        assert sent == [True, False, False]


async def test_request_within_a_providers_pause_gets_its_cause_and_is_not_reported_as_sent(tmp_path: Path) -> None:
    async with _stage(tmp_path) as (provider, runner):
        limit = b'{"error": {"message": "30 requests per minute are allowed"}}'
        provider.replies.append(Reply(status=429, headers={"retry-after-ms": "90000"}, body=limit))
        for is_asked in (True, False):
            error = await refusal(events_of(runner.generate(allow_remote=True)))
            assert (error.reason, UNSENT in error.metadata) == (Reason.RATE_LIMIT_EXCEEDED, not is_asked)
            assert error.retry_after_seconds == pytest.approx(90.0, abs=5.0)
            assert ("30 requests per minute are allowed" in error.message) is is_asked, "they may quote its prompt"
            assert is_asked or "too many requests" in error.message
        assert len(provider.requests) == 1


async def test_remote_model_is_declared_chat_only_without_a_wake_plan(tmp_path: Path) -> None:
    async with _stage(tmp_path, slots=2, context_tokens=4096) as (_, runner):
        (manifest,) = runner.registry.opened[-1].models
        state = await runner.until(Phase.READY)
    assert manifest.remote
    assert not manifest.HasField("wake")
    assert list(manifest.operations) == [model_pb2.MODEL_OPERATION_CHAT]
    assert (state.slots_total, state.context_tokens) == (2, 4096)


async def test_key_never_appears_in_runner_output_logs_or_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    async with _stage(tmp_path) as (provider, runner):
        provider.replies.append(Reply(status=401, body=b'{"error": {"message": "wrong: %s"}}' % KEY.encode()))
        provider.replies.append(Reply(status=400, body=b'{"error": {"message": "wrong: %s"}}' % KEY.encode()))
        failures = [await refusal(events_of(runner.generate(allow_remote=True))) for _ in range(2)]
        await events_of(runner.generate(allow_remote=True))
        assert all(request.headers["authorization"] == f"Bearer {KEY}" for request in provider.requests)
        described = await runner.control.Describe(runner_service_pb2.DescribeRequest(log_line_count=100))
        (manifest,) = runner.registry.opened[-1].models
        port = str(provider.port)
    out, err = capfd.readouterr()
    told = [str(described), str(manifest), caplog.text, out, err, repr(_model(f"http://127.0.0.1:{port}/v1"))]
    told += [f"{failure.message} {failure.metadata}" for failure in failures]
    assert "attempt failed" in out + err + caplog.text, "the logs are looked at"
    for text in told:
        assert KEY not in text
        assert f"127.0.0.1:{port}" not in text


async def test_one_failed_provider_connection_fails_no_other_request(tmp_path: Path) -> None:
    async with _stage(tmp_path, timeout_seconds=0.5) as (provider, runner):
        provider.replies += [Reply(silent=True), Reply(drops=True)]
        silent = asyncio.create_task(refusal(events_of(runner.generate(allow_remote=True))))
        await provider.until_asked(1)
        assert (await refusal(events_of(runner.generate(allow_remote=True)))).reason is Reason.BACKEND_PROTOCOL_ERROR
        assert (await silent).reason is Reason.HEADERS_TIMEOUT
        described = await runner.described()
        assert (described.restart_count, described.last_restart_reason) == (0, "")
        assert (await events_of(runner.generate(allow_remote=True)))[-1].HasField("finished")


async def test_provider_that_refuses_connections_leaves_its_model_ready(tmp_path: Path) -> None:
    model = _model(f"http://127.0.0.1:{free_port()}/v1")
    async with ready_runner(tmp_path, [model]) as runner:
        for _ in range(3):
            assert (await refusal(events_of(runner.generate(allow_remote=True)))).reason is Reason.CONNECT_FAILED
        phases = {state.phase for beat in runner.registry.beats for state in beat.capability.instances}
        assert Phase.READY.value in phases
        assert phases <= {Phase.IDLE.value, Phase.LOADING.value, Phase.READY.value}


async def test_caller_deadline_limits_the_runner_backoff(tmp_path: Path) -> None:
    async with _stage(tmp_path, max_retries=5) as (provider, runner):
        provider.replies.append(Reply(status=429, headers={"Retry-After": "30"}))
        async with asyncio.timeout(5.0):
            error = await refusal(events_of(runner.generate(allow_remote=True, seconds_left=20.0)))
        assert error.reason is Reason.RATE_LIMIT_EXCEEDED
        assert error.retry_after_seconds == pytest.approx(30.0)
        assert len(provider.requests) == 1
