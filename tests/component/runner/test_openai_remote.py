"""A model of a provider: what is sent there, what never is, and the errors of its refusals."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trustme
from kit.counting_provider import WORDS, CountingProvider, Reply, counting_provider
from kit.engine_settings import engine_settings
from kit.engines import chat, started
from kit.failures import fails

from runner_svc.backend.port import CallInfo
from runner_svc.openai_upstream.errors import MAX_ERROR_CHARS
from runner_svc.policy import backoff
from runner_svc.runtimes.model_engine import ModelContext
from runner_svc.runtimes.openai_remote.openai_remote_backend import OpenAiRemote
from runner_svc.runtimes.openai_remote.runtime import OpenAiRemoteModel
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, sampling_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft_testing.free_port import free_port

KEY_VARIABLE = "FRONTIER_KEY"
KEY = "sk-very-secret-0123456789"


def _config(base_url: str, **settings: Any) -> tuple[OpenAiRemoteModel, ModelContext]:
    given = {"api_key_env": KEY_VARIABLE, "environment": {KEY_VARIABLE: KEY}, **settings}
    return engine_settings(OpenAiRemoteModel, url=base_url, upstream_model="frontier-4", **given)


@asynccontextmanager
async def _started(base_url: str, **settings: Any) -> AsyncIterator[OpenAiRemote]:
    async with started(OpenAiRemote(*_config(base_url, **settings))) as (backend, _):
        yield backend


@asynccontextmanager
async def _stage(**settings: Any) -> AsyncIterator[tuple[CountingProvider, OpenAiRemote]]:
    async with counting_provider() as provider, _started(provider.base_url, **settings) as backend:
        yield provider, backend


def _call(seconds_left: float | None = None) -> CallInfo:
    answer_by = None if seconds_left is None else asyncio.get_running_loop().time() + seconds_left
    return CallInfo(request_id="req-1", traceparent=new_traceparent(), answer_by=answer_by)


async def _events(backend: OpenAiRemote, payload: Any = None, call: CallInfo | None = None) -> list[Any]:
    frames = backend.generate(payload or chat("Count."), call or _call())
    return [event async for frame in frames for event in frame]


async def _failure(backend: OpenAiRemote, call: CallInfo | None = None) -> WeftError:
    with pytest.raises(WeftError) as failed:
        await _events(backend, call=call)
    return failed.value


def _text(events: list[Any]) -> str:
    return "".join(event.delta.text for event in events if event.HasField("delta"))


@pytest.fixture
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backoff, "FIRST_SERVER_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(backoff, "DEFAULT_BUSY_SECONDS", 0.01)


async def test_headers_of_an_alias_are_sent_with_their_secrets_which_no_error_repeats() -> None:
    secrets = {KEY_VARIABLE: KEY, "secret/team": "hidden-value-0123"}
    call = replace(_call(), provider_headers={"X-Title": "weft", "X-Team": "secret/team"})
    async with _stage(environment=secrets) as (provider, backend):
        await _events(backend, call=call)
        headers = provider.requests[0].headers
        assert (headers["x-title"], headers["x-team"]) == ("weft", "hidden-value-0123")
        assert headers["authorization"] == f"Bearer {KEY}"
        body = json.dumps({"error": {"message": "no hidden-value-0123 here", "type": "x"}}).encode()
        provider.replies.append(Reply(status=400, headers={"Content-Type": "application/json"}, body=body))
        assert "hidden-value" not in (await _failure(backend, call)).message
        missing = replace(call, provider_headers={"X-Team": "secret/other"})
        assert "missing: secret/other" in (await _failure(backend, missing)).message


async def test_secret_header_is_not_sent_to_a_model_whose_author_needed_no_secret() -> None:
    call = replace(_call(), provider_headers={"X-Team": "secret/team"})
    async with _stage(environment={"secret/team": "hidden-value-0123"}, api_key_env=None) as (provider, backend):
        assert "only to models with apiKeyRef" in (await _failure(backend, call)).message
        assert provider.requests == []


async def test_provider_receives_the_request_and_its_key_but_no_mesh_data() -> None:
    async with _stage() as (provider, backend):
        await _events(backend, chat("Count.", sampling=sampling_pb2.SamplingParams(max_tokens=5)))
        (request,) = provider.requests
        assert request.path == "/v7/chat/completions"
        assert request.body == {
            "model": "frontier-4",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 5,
            "messages": [{"role": "user", "content": "Count."}],
        }
        assert dict(request.headers) == {
            "host": f"127.0.0.1:{provider.port}",
            "content-type": "application/json",
            "accept": "*/*",
            "accept-encoding": "identity",
            "user-agent": "weft",
            "authorization": f"Bearer {KEY}",
            "content-length": request.headers["content-length"],
        }


async def test_provider_cookie_is_not_sent_back() -> None:
    async with _stage() as (provider, backend):
        provider.replies.append(Reply(status=500, headers={"Set-Cookie": "who=tenant-a"}))
        await _failure(backend)
        await _events(backend)
        assert all("cookie" not in request.headers for request in provider.requests)


async def test_configured_health_never_calls_the_provider() -> None:
    async with _stage() as (provider, backend):
        assert await backend.responds(0.1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await backend.wait_exit()
        assert (provider.connection_count, provider.byte_count) == (0, 0)
    assert not await backend.responds(0.1)


async def test_model_list_health_check_contains_no_request_data() -> None:
    async with _stage(health_check="models") as (provider, backend):
        (look,) = provider.requests
        assert (look.method, look.path, look.body) == ("GET", "/v7/models", None)
        assert await backend.responds(1.0)


@pytest.mark.parametrize("status", [404, 405, 429, 503])
async def test_provider_without_a_list_or_too_busy_for_it_is_available(status: int) -> None:
    async with counting_provider() as provider:
        provider.list_status = status
        async with _started(provider.base_url, health_check="models") as backend:
            assert _text(await _events(backend))


@pytest.mark.parametrize("status", [401, 403, 500])
async def test_provider_that_refuses_its_list_is_unavailable(status: int) -> None:
    async with counting_provider() as provider:
        provider.list_status = status
        backend = OpenAiRemote(*_config(provider.base_url, health_check="models"))
        with fails(Reason.CONNECT_FAILED) as failed:
            await backend.start()
    assert str(status) in failed.value.message


async def test_provider_is_reported_dead_after_repeated_health_check_failures() -> None:
    looked_at = {"health_check": "models", "probe_interval_seconds": 0.01, "probe_failures": 2}
    async with _stage(**looked_at) as (provider, backend):
        provider.list_status = 500
        async with asyncio.timeout(10.0):
            report = await backend.wait_exit()
    assert (report.reason, report.how) == (Reason.CONNECT_FAILED, "the provider stopped answering")


@pytest.mark.parametrize("value", ["", "  ", "schlüssel"])
async def test_missing_or_invalid_key_error_names_only_its_variable(value: str) -> None:
    async with counting_provider() as provider:
        backend = OpenAiRemote(*_config(provider.base_url, environment={KEY_VARIABLE: value}))
        with fails(Reason.INVALID_ARGUMENT) as failed:
            await backend.start()
        assert provider.connection_count == 0
    assert KEY_VARIABLE in failed.value.message
    assert not value.strip() or value not in failed.value.message


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (400, b'{"error": {"message": "no such field"}}', Reason.BACKEND_REJECTED),
        (400, b'{"error": {"message": "too long", "code": "context_length_exceeded"}}', Reason.CONTEXT_LENGTH_EXCEEDED),
        (401, b'{"error": {"message": "Incorrect key sk-very***6789"}}', Reason.BACKEND_ERROR),
        (402, b"{}", Reason.BACKEND_ERROR),
        (403, b"{}", Reason.BACKEND_ERROR),
        (404, b'{"error": {"message": "no model frontier-4"}}', Reason.BACKEND_ERROR),
        (429, b'{"error": {"type": "insufficient_quota", "code": null}}', Reason.BACKEND_ERROR),
        (429, b'{"error": {"type": "requests", "code": "insufficient_quota"}}', Reason.BACKEND_ERROR),
        (429, b'{"error": {"type": "requests", "code": "rate_limit_exceeded"}}', Reason.RATE_LIMIT_EXCEEDED),
        (429, b"{}", Reason.RATE_LIMIT_EXCEEDED),
        (429, b"x" * 100_000, Reason.RATE_LIMIT_EXCEEDED),
        (400, b"x" * 100_000, Reason.BACKEND_REJECTED),
        (500, b"<html>", Reason.BACKEND_ERROR),
        (503, b"{}", Reason.BACKEND_NOT_READY),
    ],
)
async def test_each_provider_error_has_its_reason(status: int, body: bytes, reason: Reason) -> None:
    async with _stage(max_retries=0) as (provider, backend):
        provider.replies.append(Reply(status=status, body=body))
        error = await _failure(backend)
        assert len(provider.requests) == 1
    assert error.reason is reason
    assert "sk-very" not in error.message


async def test_invalid_key_is_an_operator_error_that_hides_the_key() -> None:
    async with _stage() as (provider, backend):
        provider.replies.append(Reply(status=401, body=b'{"error": {"message": "Incorrect key: sk-ver***789"}}'))
        error = await _failure(backend)
    assert error.message == "the provider rejects the API key (status 401); check `api_key_env` of the model"


@pytest.mark.slow("waits for the second of a Retry-After header")
async def test_busy_provider_receives_no_byte_before_its_retry_time() -> None:
    async with _stage() as (provider, backend):
        provider.replies.append(Reply(status=429, headers={"Retry-After": "1"}))
        told = time.monotonic()
        error = await _failure(backend)
        assert error.reason is Reason.RATE_LIMIT_EXCEEDED
        assert error.retry_after_seconds == pytest.approx(1.0)
        sent = provider.byte_count
        refused = await _failure(backend)
        assert refused.reason is Reason.RATE_LIMIT_EXCEEDED
        assert refused.retry_after_seconds is not None
        assert 0.0 < refused.retry_after_seconds <= 1.0
        assert provider.byte_count == sent
        await asyncio.sleep(refused.retry_after_seconds + 0.01)
        assert time.monotonic() - told >= 1.0
        assert _text(await _events(backend))


async def test_retry_after_date_is_relative_to_the_providers_clock() -> None:
    dates = {"Date": "Sat, 01 Jan 2000 00:00:00 GMT", "Retry-After": "Sat, 01 Jan 2000 00:00:42 GMT"}
    async with _stage() as (provider, backend):
        provider.replies.append(Reply(status=503, headers=dates))
        assert (await _failure(backend)).retry_after_seconds == pytest.approx(42.0)


@pytest.mark.usefixtures("_no_pauses")
async def test_request_is_retried_up_to_the_configured_limit() -> None:
    async with _stage(max_retries=2) as (provider, backend):
        provider.replies += [Reply(status=503), Reply(status=429)]
        events = await _events(backend, chat("Count.", sampling=sampling_pb2.SamplingParams(top_k=3)))
        assert _text(events) == "".join(WORDS)
        assert len(provider.requests) == 3
        warnings = [event for event in events if event.HasField("warning")]
        assert len(warnings) == 1, "a repetition tells nothing twice"
        provider.replies += [Reply(status=503)] * 3
        assert (await _failure(backend)).reason is Reason.BACKEND_NOT_READY
        assert len(provider.requests) == 6


@pytest.mark.usefixtures("_no_pauses")
@pytest.mark.parametrize("reply", [Reply(status=500), Reply(status=400), Reply(drops=True), Reply(status=401)])
async def test_request_the_provider_may_have_processed_is_never_retried(reply: Reply) -> None:
    async with _stage(max_retries=5) as (provider, backend):
        provider.replies.append(reply)
        await _failure(backend)
        assert len(provider.requests) == 1


async def test_request_is_resent_after_401_if_the_key_was_rotated() -> None:
    keys = {KEY_VARIABLE: KEY}
    async with _stage(environment=keys) as (provider, backend):
        provider.replies.append(Reply(status=401, meanwhile=lambda: keys.update({KEY_VARIABLE: "sk-next"})))
        assert _text(await _events(backend)) == "".join(WORDS)
        assert [request.headers["authorization"] for request in provider.requests] == [
            f"Bearer {KEY}",
            "Bearer sk-next",
        ]
        assert provider.bodies[0] == provider.bodies[1]


async def test_request_is_resent_only_once_after_401_however_often_the_key_rotates() -> None:
    keys = {KEY_VARIABLE: KEY}
    async with _stage(environment=keys, max_retries=5) as (provider, backend):
        for number in range(3):
            rotated = {KEY_VARIABLE: f"sk-next-{number}"}
            provider.replies.append(Reply(status=401, meanwhile=partial(keys.update, rotated)))
        error = await _failure(backend)
        assert len(provider.requests) == 2
    assert error.reason is Reason.BACKEND_ERROR
    assert "rejects the API key" in error.message


async def test_request_is_not_resent_after_401_if_the_key_was_removed() -> None:
    keys = {KEY_VARIABLE: KEY}
    async with _stage(environment=keys) as (provider, backend):
        provider.replies.append(Reply(status=401, meanwhile=keys.clear))
        assert "rejects the API key" in (await _failure(backend)).message
        assert len(provider.requests) == 1


async def test_idle_connection_closed_by_the_provider_causes_no_resend() -> None:
    async with _stage(max_retries=5) as (provider, backend):
        await _events(backend)
        provider.replies.append(Reply(drops=True))
        assert (await _failure(backend)).reason is Reason.BACKEND_PROTOCOL_ERROR
        assert (provider.connection_count, len(provider.requests)) == (1, 2)


@pytest.mark.usefixtures("_no_pauses")
async def test_started_answer_is_never_retried() -> None:
    async with _stage(max_retries=5) as (provider, backend):
        provider.replies.append(Reply(breaks_after_words=True))
        assert (await _failure(backend)).reason is Reason.BACKEND_PROTOCOL_ERROR
        assert len(provider.requests) == 1


async def test_silent_provider_times_out() -> None:
    async with _stage(timeout_seconds=0.2) as (provider, backend):
        provider.replies.append(Reply(silent=True))
        error = await _failure(backend)
    assert error.reason is Reason.HEADERS_TIMEOUT
    assert "timeout_seconds, 0.2 s" in error.message


async def test_redirects_are_not_followed() -> None:
    async with counting_provider() as elsewhere, _stage() as (provider, backend):
        provider.replies.append(Reply(status=307, headers={"Location": f"{elsewhere.base_url}/chat/completions"}))
        assert (await _failure(backend)).reason is Reason.BACKEND_ERROR
        assert (elsewhere.connection_count, elsewhere.byte_count) == (0, 0)


async def test_proxy_environment_variables_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with counting_provider() as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        async with _stage() as (provider, backend):
            await _events(backend)
            assert len(provider.requests) == 1
        assert proxy.connection_count == 0


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("https://no-such-host.invalid/v1", "its name is not known"),
        ("https://127.0.0.1:{plain}/v1", "it does not accept connections, or not with TLS"),
        ("https://127.0.0.1:{untrusted}/v1", "TLS failed"),
        ("http://127.0.0.1:{free}/v1", "it does not accept connections"),
    ],
)
async def test_unreachable_provider_fails_to_connect_without_revealing_its_address(place: str, says: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    async with counting_provider() as plain, counting_provider(context) as untrusted:
        url = place.format(plain=plain.port, untrusted=untrusted.port, free=free_port())
        async with _started(url) as backend, asyncio.timeout(15.0):
            error = await _failure(backend)
        assert plain.requests == untrusted.requests == []
    assert error.reason is Reason.CONNECT_FAILED
    assert says in error.message
    for secret in ("no-such-host", str(plain.port), str(untrusted.port), KEY):
        assert secret not in error.message


async def test_address_and_key_quoted_by_the_provider_are_hidden() -> None:
    async with _stage() as (provider, backend):
        words = f"bad call with {KEY} to {provider.base_url} at 127.0.0.1"
        provider.replies.append(Reply(status=400, body=b'{"error": {"message": "%s"}}' % words.encode()))
        error = await _failure(backend)
    assert error.message == "the engine answered 400: bad call with [hidden] to [hidden] at [hidden]"


async def test_field_that_the_provider_names_does_not_quote_the_key() -> None:
    body = json.dumps({"error": {"type": "invalid_field", "message": f"Bearer {KEY}: not with {KEY}"}})
    async with _stage() as (provider, backend):
        provider.replies.append(Reply(status=400, body=body.encode()))
        error = await _failure(backend)
    assert error.reason is Reason.INVALID_ARGUMENT
    assert KEY not in f"{error.message} {error.metadata}"


async def test_key_is_hidden_in_an_error_that_is_cut_within_it() -> None:
    words = "x" * (MAX_ERROR_CHARS - len(KEY)) + f" {KEY}"
    async with _stage() as (provider, backend):
        provider.replies.append(Reply(status=400, body=json.dumps({"error": {"message": words}}).encode()))
        error = await _failure(backend)
    assert error.message.endswith("x [hidden]")


async def test_fields_outside_the_openai_api_are_dropped_with_a_warning() -> None:
    sampling = sampling_pb2.SamplingParams(top_k=40, min_p=0.1, repeat_penalty=1.1, seed=7, temperature=0.5)
    async with _stage() as (provider, backend):
        events = await _events(backend, chat("Count.", sampling=sampling, thinking=True))
        (body,) = provider.bodies
    assert (body["seed"], body["temperature"]) == (7, 0.5)
    assert not {"top_k", "min_p", "repeat_penalty", "thinking", "chat_template_kwargs"} & body.keys()
    warned = [event.warning.field for event in events if event.HasField("warning")]
    assert warned == ["min_p", "repeat_penalty", "top_k", "thinking"]


async def test_passthrough_all_sends_every_field() -> None:
    sampling = sampling_pb2.SamplingParams(top_k=40, max_tokens=9)
    async with _stage(passthrough="all", token_limit_name="max_completion_tokens") as (provider, backend):
        events = await _events(backend, chat("Count.", sampling=sampling))
        (body,) = provider.bodies
    assert (body["top_k"], body["max_completion_tokens"], "max_tokens" in body) == (40, 9, False)
    assert not any(event.HasField("warning") for event in events)


@pytest.mark.parametrize(
    ("configured", "fields", "sent"),
    [
        (False, {}, {"type": "disabled"}),
        (True, {}, {"type": "enabled"}),
        (False, {"thinking": True}, {"type": "enabled"}),
        (True, {"reasoning_effort": chat_pb2.REASONING_EFFORT_NONE}, {"type": "disabled"}),
        (None, {}, None),
        (None, {"reasoning_effort": chat_pb2.REASONING_EFFORT_NONE}, None),
    ],
)
async def test_thinking_uses_the_configured_provider_field(
    configured: bool | None, fields: dict[str, Any], sent: dict[str, str] | None
) -> None:
    async with _stage(thinking=configured) as (provider, backend):
        await _events(backend, chat("Count.", **fields))
        assert provider.bodies[0].get("thinking") == sent


async def test_unsupported_operations_are_rejected_without_sending_a_byte() -> None:
    async with _stage() as (provider, backend):
        prompt = completion_pb2.CompletionPayload(prompts=[completion_pb2.PromptInput(text="Once")])
        with pytest.raises(WeftError) as no_completions:
            await _events(backend, prompt)
        with pytest.raises(WeftError) as no_embeddings:
            await backend.embed(embedding_pb2.EmbeddingPayload(), _call())
        assert provider.connection_count == 0
    assert no_completions.value.reason is no_embeddings.value.reason is Reason.UNSUPPORTED_OPERATION
