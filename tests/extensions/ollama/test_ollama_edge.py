"""Ollama's API at the edge: answers, streams of JSON lines, models, loads, and refusals."""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from admin_script import ScriptedOperations, admin_ports, an_operation, two_replicas
from gateway_script import (
    FixedFleet,
    RawResponse,
    ScriptedDispatcher,
    Step,
    agent,
    delta,
    finished,
    hello,
    model,
    queued,
    sample_receipt,
    serving,
    started,
    usage,
)
from kit.fleet import runner_view
from kit.keys import Keys, bearer

from gateway.gateway_config import GatewayConfig
from weft.api.common.v1 import error_reason_pb2, event_pb2, receipt_pb2, signal_pb2, warning_pb2
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1 import operation_service_pb2 as pb
from weft.api.registry.v1 import model_pb2
from weft.api.registry.v1.runner_pb2 import InstanceMemory, InstanceState
from weft.dispatch.fleet import FleetView
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.short_names import SHORT_NAMES
from weft_testing.fake_clock import FakeClock

JSON = "application/json; charset=utf-8"
"""As Ollama sends what is no stream."""
QUICK = GatewayConfig(port=0, headers_within_seconds=0.02, sse_keepalive_seconds=0.02)
CHAT, GENERATE = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "Hi"}]


def body(**fields: object) -> bytes:
    """A request as JSON: a chat, or a prompt if it has one."""
    given = {"model": "tiny", **({} if "prompt" in fields else {"messages": HI}), **fields}
    return json.dumps(given).encode()


def lines(answer: RawResponse) -> list[Any]:
    """The objects of a stream."""
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert answer.body.endswith(b"\n")
    return [json.loads(line) for line in answer.body.splitlines()]


def timed_receipt() -> receipt_pb2.Receipt:
    receipt = sample_receipt()
    receipt.total_time.FromMilliseconds(900)
    receipt.load_wait.FromMilliseconds(0)
    receipt.engine_timings.prefill_time.FromMilliseconds(20)
    receipt.engine_timings.decode_time.FromMilliseconds(60)
    return receipt


def timed_hello() -> list[Step]:
    end = event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=timed_receipt()))
    return [*hello()[:-1], [delta(finish="STOP"), usage(cached=5), end]]


async def test_chat_streams_lines_unless_disabled() -> None:
    async with serving(ScriptedDispatcher(timed_hello())) as gateway:
        found = lines(await gateway.request("POST", CHAT, body()))
    assert [one["message"]["content"] for one in found] == ["Hello", ", ", "world", ""]
    assert [one["done"] for one in found] == [False, False, False, True]
    assert all(one["model"] == "tiny" and one["created_at"].endswith("Z") for one in found)
    last = found[-1]
    assert (last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == ("stop", 7, 3)
    assert (last["total_duration"], last["load_duration"]) == (900_000_000, 0)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (20_000_000, 60_000_000)
    assert last["receipt"] == {
        "queue_wait_ms": 150,
        "load_wait_ms": 0,
        "gpu_time_ms": 450,
        "gpu_time_source": "engine",
        "cache_hit": True,
        "cache_tokens_reused": 5,
        "left_premises": False,
    }


async def test_warnings_and_signals_are_in_the_last_line() -> None:
    warning = warning_pb2.Warning(code=warning_pb2.WARNING_CODE_UNSUPPORTED_PARAMETER, field="mirostat", message="no")
    signal = signal_pb2.Signal(name="escalate")
    steps: list[Step] = [
        [queued()],
        [started(), event_pb2.InferenceEvent(warning=warning)],
        [delta("Hi"), event_pb2.InferenceEvent(signal=signal)],
        [delta(finish="STOP"), usage(), finished()],
    ]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        found = lines(await gateway.request("POST", CHAT, body(options={"num_gpu": 1})))
    assert len(found) == 2
    assert [one["field"] for one in found[-1]["warnings"]] == ["options.num_gpu", "mirostat"]
    assert [one["name"] for one in found[-1]["signals"]] == ["escalate"]


FORM = {"Content-Type": "application/x-www-form-urlencoded"}


async def test_curl_examples_of_the_ollama_docs_work() -> None:
    """curl -d declares a form, and was refused with 400."""
    async with serving(ScriptedDispatcher(timed_hello())) as gateway:
        for headers in (FORM, {"Content-Type": "text/plain"}, {"Content-Type": ""}):
            answer = await gateway.request("POST", CHAT, body(stream=False), headers=headers)
            assert answer.of(200)["message"] == {"role": "assistant", "content": "Hello, world"}


async def test_browser_page_must_send_json_and_thus_a_preflight() -> None:
    async with serving() as gateway:
        for name, value in {
            "Origin": "http://localhost:3000",
            "Referer": "http://a/",
            "Sec-Fetch-Site": "same-origin",
        }.items():
            for path in (CHAT, GENERATE, "/api/show"):
                for headers in (FORM, {"Content-Type": "text/plain"}):
                    answer = await gateway.request("POST", path, body(), headers={**headers, name: value})
                    assert "Content-Type must be application/json" in answer.of(400)["error"]


async def test_embed_normalizes_vectors_and_the_older_endpoint_does_not() -> None:
    async with serving(ScriptedDispatcher(vectors=[[3.0, 4.0], [0.0, 0.0]])) as gateway:
        answer = await gateway.request("POST", "/api/embed", {"model": "tiny", "input": ["a", "b"]})
    found = answer.json
    assert found["embeddings"] == [[0.6, 0.8], [0.0, 0.0]]
    assert (found["model"], found["prompt_eval_count"]) == ("tiny", 7)
    assert "warnings" not in found
    async with serving(ScriptedDispatcher(vectors=[[3.0, 4.0]])) as gateway:
        old = await gateway.request("POST", "/api/embeddings", {"model": "tiny", "prompt": "a"})
        asked = {"model": "tiny:latest", "input": "a", "truncate": True, "dimensions": 2, "options": {"seed": 1}}
        told = (await gateway.request("POST", "/api/embed", asked)).json
        assert [context.model for context in gateway.dispatcher.contexts] == ["tiny", "tiny"]
    assert old.json == {"embedding": [3.0, 4.0]}
    assert [one["field"] for one in told["warnings"]] == ["options.seed", "truncate"]


async def test_unservable_model_is_listed_as_failed_and_a_pool_by_its_best_member() -> None:
    """It was listed as active."""
    fleet = FixedFleet.of(
        model("llama", active=False, failed=True),
        model("one", pool="chat", active=False, failed=True),
        model("two", pool="chat", active=False, hibernating=True),
        agents=[agent("reviewer", "llama")],
    )
    async with serving(fleet=fleet) as gateway:
        tags = (await gateway.request("GET", "/api/tags")).json["models"]
        listed = (await gateway.request("GET", "/v1/models")).json["data"]
        one = (await gateway.request("GET", "/v1/models/llama")).json
    expected = {"llama": "failed", "chat": "hibernating", "agent/reviewer": "failed"}
    assert {each["name"]: each["meta"]["status"] for each in tags} == expected
    assert {each["id"]: each["meta"]["status"] for each in listed} == expected
    assert one["meta"]["status"] == "failed"


def with_files(*files: model_pb2.ModelFile, pool: str = "") -> FixedFleet:
    """Models m0, m1, ... whose runner reports these files."""
    models = {f"m{number}": model(f"m{number}", pool=pool) for number in range(len(files))}
    states = {name: InstanceState(model=name, model_file=file) for name, file in zip(models, files, strict=True)}
    return FixedFleet(FleetView(1, {"r1": runner_view("r1", instances=states)}, models))


async def test_model_is_described_from_its_file() -> None:
    file = model_pb2.ModelFile(
        format="gguf", architecture="llama", parameter_count=134_515_008, quantization="q4_k_m", size_bytes=105_000_000
    )
    async with serving(fleet=with_files(file)) as gateway:
        answer = await gateway.request("GET", "/api/tags")
        shown = (await gateway.request("POST", "/api/show", b'{"model":"m0"}')).json
    (listed,) = answer.json["models"]
    assert answer.headers["content-type"] == JSON
    assert (listed["size"], listed["details"]) == (105_000_000, shown["details"])
    assert shown["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "quantization_level": "Q4_K_M",
    }
    information = shown["model_info"]
    assert (information["general.architecture"], information["llama.context_length"]) == ("llama", 4096)
    assert information["general.parameter_count"] == 134_515_008


async def test_parameter_count_is_formatted_as_in_ollama() -> None:
    counts = (0, 999, 22_000, 7_000_000, 8_000_000_000, 8_030_261_248)
    async with serving(fleet=with_files(*(model_pb2.ModelFile(parameter_count=count) for count in counts))) as gateway:
        found = (await gateway.request("GET", "/api/tags")).json["models"]
    assert [each["details"]["parameter_size"] for each in found] == ["", "999", "22K", "7M", "8B", "8.0B"]


async def test_details_that_differ_between_pool_members_are_empty() -> None:
    small = model_pb2.ModelFile(format="gguf", architecture="qwen3", quantization="q4_k_m", size_bytes=1)
    large = model_pb2.ModelFile(format="gguf", architecture="qwen3", quantization="q8_0", size_bytes=2)
    async with serving(fleet=with_files(small, large, pool="chat")) as gateway:
        (found,) = (await gateway.request("GET", "/api/tags")).json["models"]
    details = found["details"]
    assert (details["format"], details["family"], details["quantization_level"]) == ("gguf", "qwen3", "")
    assert "size" not in found


async def test_context_length_is_shown_in_the_field_clients_read() -> None:
    async with serving() as gateway:
        found = {}
        for raw in (b'{"model":"tiny:latest"}', b'{"name":"tiny"}', b'{"model":"small"}'):
            answer = await gateway.request("POST", "/api/show", raw)
            assert answer.status == 200
            found = answer.json
        missing = await gateway.request("POST", "/api/show", b'{"model":"nope"}')
        unnamed = await gateway.request("POST", "/api/show", b"{}")
    information = found["model_info"]
    assert information[f"{information['general.architecture']}.context_length"] == 4096
    assert found["capabilities"] == ["completion"]
    assert (missing.status, missing.json["code"]) == (404, "model_not_found")
    assert (unnamed.status, unnamed.json["param"]) == (400, "model")


async def test_cpu_only_model_shows_its_memory_and_expiry() -> None:
    view = two_replicas()
    shown = view.runners["r1"].instances["qwen"]
    shown.memory.CopyFrom(InstanceMemory(resident_bytes=3 * 1024**3))
    shown.keep_alive.FromSeconds(2)
    async with serving(fleet=FixedFleet(view)) as gateway:
        (found,) = (await gateway.request("GET", "/api/ps")).json["models"]
    assert (found["size"], found["size_vram"]) == (3 * 1024**3, 0)
    assert "expires_at" in found, "it is processing a request, and is kept for 2 s after it"


async def test_expiry_of_a_busy_model_is_counted_on_the_gateway_clock() -> None:
    """It was counted on the machine's."""
    view = two_replicas()
    view.runners["r1"].instances["qwen"].keep_alive.FromSeconds(2)
    async with serving(
        fleet=FixedFleet(view), clock=FakeClock(utc=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    ) as gateway:
        (found,) = (await gateway.request("GET", "/api/ps")).json["models"]
    assert found["expires_at"] == "2026-01-02T03:04:07Z"


async def test_fallback_digest_is_stable_across_restarts() -> None:
    digests = set()
    for created in (1_700_000_000, 1_800_000_000):
        async with serving(fleet=FixedFleet.of(replace(model("tiny"), created_at_seconds=created))) as gateway:
            (found,) = (await gateway.request("GET", "/api/tags")).json["models"]
            digests.add(found["digest"])
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("path", "raw", "states", "action", "reason"),
    [
        (CHAT, {"messages": []}, ("RUNNING", "SUCCEEDED"), "load_model", "load"),
        (GENERATE, {"keep_alive": "10m"}, ("SUCCEEDED",), "load_model", "load"),
        (GENERATE, {"prompt": "", "keep_alive": 0}, ("SUCCEEDED",), "unload_model", "unload"),
        (CHAT, {"keep_alive": "0s", "stream": False}, ("SUCCEEDED",), "unload_model", "unload"),
    ],
)
async def test_request_without_a_prompt_loads_or_unloads_the_model(
    path: str, raw: dict[str, Any], states: tuple[str, ...], action: str, reason: str
) -> None:
    operations = ScriptedOperations(watch_states=states)
    async with serving(admin=admin_ports(operations)) as gateway:
        answer = await gateway.request("POST", path, {"model": "tiny:latest", **raw})
        assert gateway.dispatcher.calls == []
    found = answer.json
    assert (answer.status, found["done"], found["done_reason"]) == (200, True, reason)
    (created,) = operations.created
    assert created.action.WhichOneof("kind") == action
    assert getattr(created.action, action).model == "tiny"


async def test_unload_needs_the_scope_for_the_model_and_keep_alive_of_a_chat_is_ignored_without_it() -> None:
    keys = Keys(["inference:create", "operations/mine:create"])
    operations = ScriptedOperations(watch_states=("SUCCEEDED",))
    async with serving(admin=admin_ports(operations), keys=keys) as gateway:
        unload = {"prompt": "", "keep_alive": 0}
        refused = await gateway.request("POST", GENERATE, {"model": "tiny", **unload}, bearer())
        own = await gateway.request("POST", GENERATE, {"model": "mine", **unload}, bearer())
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "keep_alive": 0}
        answered = await gateway.request("POST", CHAT, chat, bearer())
        (context,) = gateway.dispatcher.contexts
    assert (refused.status, "operations/tiny:create" in refused.error) == (403, True)
    assert (own.status, answered.status) == (200, 200)
    assert (context.handling.keep_alive_seconds, context.handling.keep_alive_ignored) == (None, True)
    assert [created.action.unload_model.model for created in operations.created] == ["mine"]


@pytest.mark.parametrize(
    ("path", "raw", "named"), [(CHAT, {"model": "nope"}, "name"), ("/api/pull", {"model": "hf:a/b"}, "source")]
)
async def test_registry_error_names_the_submitted_field(path: str, raw: dict[str, Any], named: str) -> None:
    refusal = WeftError(Reason.MODEL_NOT_FOUND, "no model of this name is known", metadata={"field": named})
    async with serving(admin=admin_ports(ScriptedOperations(failure=refusal))) as gateway:
        answer = await gateway.request("POST", path, raw)
    assert (answer.status, answer.json["param"]) == (404, "model")


async def test_load_by_empty_request_reports_failure_missing_scope_or_no_support() -> None:
    raw = json.dumps({"model": "tiny"}).encode()
    async with serving(admin=admin_ports(ScriptedOperations(watch_states=("FAILED",)))) as gateway:
        failed = await gateway.request("POST", CHAT, raw)
    async with serving() as gateway:
        none = await gateway.request("POST", CHAT, raw)
    limited = Keys(["inference:create"])
    operations = ScriptedOperations()
    async with serving(admin=admin_ports(operations), keys=limited) as gateway:
        denied = await gateway.request("POST", CHAT, raw, bearer())
    assert failed.status >= 400
    assert (none.status, none.json["code"]) == (501, "unsupported_operation")
    assert (denied.status, denied.json["code"]) == (403, "permission_denied")
    assert operations.created == []


@dataclass
class LostOperations(ScriptedOperations):
    """The watch of a running operation is lost."""

    async def watch(self, name: str) -> AsyncGenerator[operation_pb2.Operation]:
        yield an_operation("RUNNING")
        raise WeftError(Reason.SERVICE_UNAVAILABLE, "the registry ended the watch; the operation continues")


async def test_load_whose_registry_is_lost_is_unavailable() -> None:
    """Regression: it was answered as a load that took too long."""
    async with serving(admin=admin_ports(LostOperations())) as gateway:
        answer = await gateway.request("POST", CHAT, {"model": "tiny"})
    assert (answer.status, answer.json["code"]) == (503, "service_unavailable")


PULL = "/api/pull"


@dataclass
class PullingOperations(ScriptedOperations):
    """A pull: its progress, its result, and whether it goes on until `gate` is set."""

    gate: asyncio.Event | None = None
    was_watched: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    async def cancel(self, name: str, requested_by: str) -> operation_pb2.Operation:
        self.was_cancelled.set()
        return await super().cancel(name, requested_by)

    async def watch(self, name: str) -> AsyncGenerator[operation_pb2.Operation]:
        self.was_watched.set()
        for state in self.watch_states:
            found = an_operation(state)
            found.detail = "pulling 1.0 MiB of 2.0 MiB" if state == "RUNNING" else ""
            if state == "RUNNING":
                found.done_bytes, found.total_bytes, found.digest = 1_048_576, 2_097_152, "sha256:ab"
            if state == "SUCCEEDED":
                found.result.pulled.source, found.result.pulled.size_bytes = "hf:a/b", 2_097_152
            if state == "FAILED":
                found.reason, found.detail = error_reason_pb2.ERROR_REASON_NOT_FOUND, "the hub has no such repository"
            yield found
        if self.gate is not None:
            await self.gate.wait()


@dataclass
class SlowCreation(PullingOperations):
    """Creates the operation, and answers when it may."""

    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def create(self, request: pb.CreateOperationRequest, traceparent: str = "") -> operation_pb2.Operation:
        made = await super().create(request, traceparent)
        self.was_asked.set()
        await self.may_answer.wait()
        return made


@pytest.mark.parametrize("name", ["hf.co/a/b:Q4_K_M", "hf:a/b", "a/b", "hf.co/a/b:latest"])
async def test_pull_is_an_operation_with_streamed_progress_lines(name: str) -> None:
    operations = PullingOperations(watch_states=("RUNNING", "RUNNING", "SUCCEEDED"))
    async with serving(admin=admin_ports(operations)) as gateway:
        found = lines(await gateway.request("POST", PULL, {"model": name}))
        whole = await gateway.request("POST", PULL, {"name": name, "stream": False})
    assert [one["status"] for one in found] == ["pulling 1.0 MiB of 2.0 MiB", "pulled hf:a/b", "success"]
    assert (found[0]["progress"], found[0]["completed"], found[0]["total"]) == (0.5, 1_048_576, 2_097_152)
    assert found[0]["digest"] == "sha256:ab"
    assert (found[1]["total"], found[1]["completed"]) == (2_097_152, 2_097_152)
    assert whole.json == {"status": "success"}
    assert whole.headers["content-type"] == JSON
    assert {created.action.pull_model.source for created in operations.created} == {name.removesuffix(":latest")}


@pytest.mark.parametrize("name", ["qwen3:0.6b", "QWEN3:0.6b", "llama3.2", "llama3.2:latest"])
async def test_library_name_is_pulled_from_the_configured_source(name: str) -> None:
    sources = {"qwen3:0.6b": "hf:a/b:Q8_0", "llama3.2:latest": "/models/llama.gguf"}
    operations = PullingOperations(watch_states=("SUCCEEDED",))
    keys = Keys(["operations:create"])
    config = GatewayConfig(port=0, ollama_sources=sources)
    async with serving(admin=admin_ports(operations), config=config, keys=keys) as gateway:
        answer = await gateway.request("POST", PULL, {"model": name}, bearer())
        other = await gateway.request("POST", PULL, b'{"model":"qwen3:8b"}', bearer())
    assert lines(answer)[-1] == {"status": "success"}
    (created,) = operations.created
    wanted = "hf:a/b:Q8_0" if name.lower().startswith("qwen") else "/models/llama.gguf"
    assert created.action.pull_model.source == wanted
    assert (other.status, "gateway.ollama_sources" in other.error) == (400, True)


@pytest.mark.parametrize("name", ["llama3.2:1b", "LLAMA3.2:1b"])
async def test_short_name_is_pulled_without_configuration(name: str) -> None:
    operations = PullingOperations(watch_states=("SUCCEEDED",))
    keys = Keys(["operations:create"])
    async with serving(admin=admin_ports(operations), keys=keys) as gateway:
        answer = await gateway.request("POST", PULL, {"model": name}, bearer())
        other = await gateway.request("POST", PULL, b'{"model":"lama3.2"}', bearer())
    assert lines(answer)[-1] == {"status": "success"}
    (created,) = operations.created
    assert created.action.pull_model.source == SHORT_NAMES["llama3.2:1b"]
    assert (other.status, "did you mean llama3.2" in other.error) == (400, True)


async def test_failed_pull_ends_with_its_reason() -> None:
    operations = PullingOperations(watch_states=("RUNNING", "FAILED"))
    async with serving(admin=admin_ports(operations)) as gateway:
        last = lines(await gateway.request("POST", PULL, b'{"model":"hf:a/b"}'))[-1]
        whole = await gateway.request("POST", PULL, b'{"model":"hf:a/b","stream":false}')
    assert (last["error"], last["code"]) == ("the hub has no such repository", "not_found")
    assert (whole.status, whole.json["code"]) == (404, "not_found")


@pytest.mark.parametrize("stream", [True, False])
async def test_client_disconnect_cancels_its_pull(*, stream: bool) -> None:
    operations = PullingOperations(watch_states=("RUNNING",), gate=asyncio.Event())
    async with serving(admin=admin_ports(operations), config=QUICK) as gateway:
        async with gateway.connection() as (reader, writer):
            writer.write(gateway.post(PULL, {"model": "hf:a/b", "stream": stream}))
            if stream:
                await reader.readuntil(b"pulling 1.0 MiB")
            async with asyncio.timeout(20):
                await operations.was_watched.wait()
        async with asyncio.timeout(20):
            await operations.was_cancelled.wait()
    assert ("cancel", "operations/op-1", "http:ollama") in operations.asked


@pytest.mark.parametrize("stream", [True, False])
async def test_pull_whose_caller_leaves_during_its_creation_is_cancelled(*, stream: bool) -> None:
    operations = SlowCreation(watch_states=("RUNNING",), gate=asyncio.Event())
    async with serving(admin=admin_ports(operations), config=QUICK) as gateway:
        async with gateway.connection() as (_, writer):
            writer.write(gateway.post(PULL, {"model": "hf:a/b", "stream": stream}))
            async with asyncio.timeout(20):
                await operations.was_asked.wait()
        # By its answer, the gateway has read the end of the earlier connection.
        await gateway.request("GET", "/api/version")
        operations.may_answer.set()
        async with asyncio.timeout(20):
            await operations.was_cancelled.wait()
    assert ("cancel", "operations/op-1", "http:ollama") in operations.asked


async def test_unstreamed_pull_that_outlasts_the_deadline_is_named() -> None:
    operations = PullingOperations(watch_states=("RUNNING",), gate=asyncio.Event())
    config = replace(QUICK, request_timeout_seconds=0.05)
    async with serving(admin=admin_ports(operations), config=config) as gateway:
        answer = await gateway.request("POST", PULL, {"model": "hf:a/b", "stream": False})
    assert (answer.status, answer.json["code"]) == (504, "deadline_exceeded")
    assert "it continues as operations/op-1" in answer.error
    assert not operations.was_cancelled.is_set()


async def test_invalid_source_is_not_pulled() -> None:
    operations = PullingOperations()
    async with serving(admin=admin_ports(operations)) as gateway:
        for asked, field in (
            ({"model": "llama9"}, "model"),
            ({"model": "llama3.2:1t"}, "model"),
            ({}, "model"),
            ({"model": "hf:a"}, "model"),
            ({"model": "hf:a/b", "insecure": True}, "insecure"),
        ):
            answer = await gateway.request("POST", PULL, asked)
            assert (answer.status, answer.json["param"]) == (400, field)
    assert operations.created == []


@pytest.mark.parametrize("source", ["/etc/weft/secret.gguf", "https://elsewhere.example/model.gguf"])
async def test_pull_of_a_path_or_url_needs_the_model_edit_scope(source: str) -> None:
    raw = json.dumps({"model": source}).encode()
    for scopes, status in ((["operations:create"], 403), (["operations:create", "models:edit"], 200)):
        operations = PullingOperations()
        keys = Keys(scopes)
        async with serving(admin=admin_ports(operations), keys=keys) as gateway:
            answer = await gateway.request("POST", PULL, raw, bearer())
        assert (answer.status, len(operations.created)) == (status, int(status == 200))


async def test_blob_with_a_valid_digest_is_rejected_with_the_alternative() -> None:
    async with serving() as gateway:
        answer = await gateway.request("POST", f"/api/blobs/sha256:{'0' * 64}", b"x")
    assert (answer.status, answer.json["code"]) == (501, "unsupported_operation")
    assert "weft pull" in answer.error
