"""Load, unload and flush over HTTP, with a scripted registry."""

import asyncio
from typing import Any

import aiohttp
import pytest
from kit.keys import Keys, bearer
from kit.runner_facts import model_facts
from runner_api_stage import Operation, RunnerApiStage, ScriptedOperations, edge, facts, runner_api

from gateway.runner_api.facts import RunnerStage
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

MIB = 1024 * 1024


def done(**result: Any) -> Operation:
    operation = Operation(state=Operation.STATE_SUCCEEDED)
    for name, value in result.items():
        setattr(operation.result, name, value)
    return operation


async def test_load_is_accepted_and_can_be_polled_to_its_end() -> None:
    async with runner_api() as stage:
        accepted = await stage.post("/v1/models/load", {"modelId": "small", "maxContextLength": 4096})
        task = accepted.json["taskId"]
        running = stage.operations.known[f"operations/{task}"]
        assert (accepted.status, accepted.json) == (
            202,
            {"taskId": task, "status": "loading", "progress": 0.0, "eta": None},
        )
        running.state, running.progress = Operation.STATE_RUNNING, 0.45
        polled = await stage.get(f"/v1/models/load/{task}")
        assert (polled.json["status"], polled.json["progress"]) == ("loading", 0.45)
        running.MergeFrom(done(memory_bytes=512 * MIB))
        ended = await stage.get(f"/v1/models/load/{task}")
    assert ended.json == {
        "taskId": task,
        "status": "completed",
        "modelId": "small",
        "gpuMemoryUsedMB": 512,
        "loadTimeMs": None,
    }


async def test_load_with_an_unsupported_context_is_rejected_before_an_operation_is_created() -> None:
    async with runner_api() as stage:
        refused = await stage.post("/v1/models/load", {"modelId": "small", "maxContextLength": 65_536})
    assert (refused.status, stage.operations.asked) == (400, [])
    assert "maxContextLength: must be from 16 to 32768" in refused.json["error"]["message"]


async def test_repeat_with_the_same_key_returns_the_same_task() -> None:
    async with runner_api() as stage:
        body = {"modelId": "small"}
        first = await stage.post("/v1/models/load", body, Idempotency_Key="abc-1")
        second = await stage.post("/v1/models/load", {**body, "requestId": "abc-1"})
        third = await stage.post("/v1/models/load", body)
    assert first.json["taskId"] == second.json["taskId"] != third.json["taskId"]
    assert [request.request_id for request in stage.operations.asked[:2]] == ["abc-1", "abc-1"]


@pytest.mark.parametrize("key", ["-x", ".x", "_x"])
async def test_keys_accepted_by_the_gateway_are_accepted_here(key: str) -> None:
    async with runner_api() as stage:
        assert (await stage.post("/v1/models/load", {"modelId": "small"}, Idempotency_Key=key)).status == 202
        assert (await stage.post("/v1/models/load", {"modelId": "small", "requestId": key})).status == 202
    assert [request.request_id for request in stage.operations.asked] == [key, key]


async def test_two_different_keys_in_one_request_are_rejected() -> None:
    async with runner_api() as stage:
        answer = await stage.post("/v1/models/load", {"modelId": "small", "requestId": "b"}, Idempotency_Key="a")
    assert (answer.status, answer.error["param"]) == (400, "requestId")
    assert stage.operations.asked == []


@pytest.mark.parametrize("key", ["", "has space", "a/b", "x" * 129])
async def test_key_the_registry_would_reject_is_rejected_by_its_header_name(key: str) -> None:
    async with runner_api() as stage:
        answer = await stage.post("/v1/models/load", {"modelId": "small"}, Idempotency_Key=key)
    assert (answer.status, answer.error["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("token", ["eyJ.abc.def", {"opToken": {"nonce": "1"}, "signature": "00"}])
async def test_operation_token_is_forwarded_unchanged(token: object) -> None:
    async with runner_api() as stage:
        await stage.post("/v1/models/load", {"modelId": "small", "verifiedOpToken": token})
    sent = stage.operations.asked[0]
    expected = token if isinstance(token, str) else '{"opToken":{"nonce":"1"},"signature":"00"}'
    assert sent.authorization == expected
    assert sent.requested_by == "HTTP API of runner gpu-0"


async def test_audit_names_the_calling_key_if_auth_is_enabled() -> None:
    keys = Keys(["operations:*"])
    async with runner_api(keys=keys) as stage:
        assert (await stage.post("/v1/models/load", {"modelId": "small"}, **bearer())).status < 300
        task = next(iter(stage.operations.known)).removeprefix("operations/")
        assert (await stage.ask("DELETE", f"/v1/models/load/{task}", headers=bearer())).status < 300
    assert stage.operations.asked[0].requested_by == "key:abcdefghijk1"
    assert stage.operations.cancelled_by == ["key:abcdefghijk1"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/models/load", {"modelId": "small"}),
        ("/v1/models/unload", {"modelId": "small"}),
        ("/v1/cache/flush", {"scope": "all"}),
    ],
)
async def test_refusal_reveals_no_details(path: str, body: object) -> None:
    refusal = WeftError(Reason.OPERATION_REFUSED, "signer alice is revoked")
    async with runner_api(operations=ScriptedOperations(failure=refusal)) as stage:
        answer = await stage.post(path, body)
    assert answer.status == 403
    assert (answer.error["code"], answer.error["message"]) == ("refused", "refused")
    assert "alice" not in answer.text


@pytest.mark.parametrize("path", ["/v1/models/load", "/v1/models/unload"])
async def test_model_of_another_runner_returns_404(path: str) -> None:
    async with runner_api() as stage:
        answer = await stage.post(path, {"modelId": "meta-llama/Llama-3.1-8B"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "modelId")
    assert stage.operations.asked == []


@pytest.mark.parametrize("called", ["acme/tiny-GGUF:Q4_K_M", "/models/old.gguf"])
@pytest.mark.parametrize("path", ["/v1/models/load", "/v1/models/unload"])
async def test_model_is_found_by_hub_id_or_path(path: str, called: str) -> None:
    async with runner_api() as stage:
        stage.operations.ends = done()
        stage.runner.told = facts(
            RunnerStage.SERVING,
            model_facts("tiny", called=frozenset({"hf:acme/tiny-GGUF:Q4_K_M", "acme/tiny-GGUF:Q4_K_M"})),
            model_facts("old", called=frozenset({"/models/old.gguf"})),
        )
        answer = await stage.post(path, {"modelId": called})
    assert answer.status in (200, 202)
    (asked,) = stage.operations.asked
    kind = asked.action.WhichOneof("kind")
    assert kind is not None
    assert getattr(asked.action, kind).model == ("old" if called.startswith("/") else "tiny")


async def test_model_to_evict_must_be_on_this_runner() -> None:
    async with runner_api() as stage:
        answer = await stage.post("/v1/models/load", {"modelId": "small", "evictModel": "elsewhere"})
    assert (answer.status, answer.error["param"]) == (400, "evictModel")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"modelId": "small", "verifiedOpToken": 5}, "verifiedOpToken"),
        ({"modelId": "small", "verifiedOpToken": {"x": "y" * 20_000}}, "verifiedOpToken"),
    ],
)
async def test_invalid_token_is_rejected_by_name(body: object, param: str) -> None:
    async with runner_api() as stage:
        answer = await stage.post("/v1/models/load", body)
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize("task", ["nobody", "%2e%2e", "x" * 200])
async def test_unknown_task_returns_404(task: str) -> None:
    async with runner_api() as stage:
        answer = await stage.get(f"/v1/models/load/{task}")
    assert (answer.status, answer.error["code"]) == (404, "not_found")


async def test_task_of_another_runner_returns_404_and_cannot_be_cancelled() -> None:
    async with runner_api() as stage:
        foreign = Operation(name="operations/op-x", state=Operation.STATE_RUNNING)
        foreign.action.load_model.model = "elsewhere"
        stage.operations.known[foreign.name] = foreign
        assert (await stage.get("/v1/models/load/op-x")).status == 404
        assert (await stage.ask("DELETE", "/v1/models/load/op-x")).status == 404
    assert stage.operations.cancelled == []


async def test_load_can_be_cancelled_repeatedly() -> None:
    async with runner_api() as stage:
        task = (await stage.post("/v1/models/load", {"modelId": "small"})).json["taskId"]
        first = await stage.ask("DELETE", f"/v1/models/load/{task}")
        second = await stage.ask("DELETE", f"/v1/models/load/{task}")
    assert (first.status, first.json["status"], first.json["code"]) == (200, "failed", "cancelled")
    assert second.json == first.json


async def test_unload_returns_the_freed_memory() -> None:
    ends = done(memory_freed_bytes=8200 * MIB, cache_flushed=True)
    async with runner_api(operations=ScriptedOperations(ends)) as stage:
        answer = await stage.post("/v1/models/unload", {"modelId": "tiny"})
    assert (answer.status, answer.json) == (
        200,
        {"modelId": "tiny", "gpuMemoryFreedMB": 8200, "kvCacheFlushed": True},
    )


async def test_slow_unload_can_be_polled_later() -> None:
    async with runner_api() as stage:
        answer = await stage.post("/v1/models/unload", {"modelId": "tiny"}, X_Request_Timeout_Seconds="0.05")
        task = answer.json["taskId"]
        assert (answer.status, answer.json["status"]) == (202, "unloading")
        stage.operations.known[f"operations/{task}"].MergeFrom(done(memory_freed_bytes=MIB))
        ended = await stage.get(f"/v1/models/load/{task}")
    assert ended.json == {
        "taskId": task,
        "status": "completed",
        "modelId": "tiny",
        "gpuMemoryFreedMB": 1,
        "kvCacheFlushed": False,
    }


async def test_failed_unload_has_the_status_of_its_reason() -> None:
    failed = Operation(state=Operation.STATE_FAILED, reason=Reason.UNSUPPORTED_OPERATION.value, detail="not ours")  # type: ignore[arg-type]
    async with runner_api(operations=ScriptedOperations(failed)) as stage:
        answer = await stage.post("/v1/models/unload", {"modelId": "tiny"})
    assert (answer.status, answer.error["code"], answer.error["message"]) == (501, "unsupported_operation", "not ours")
    assert answer.error["taskId"].startswith("op-")


async def test_unload_cancelled_elsewhere_is_a_conflict() -> None:
    async with runner_api(operations=ScriptedOperations(Operation(state=Operation.STATE_CANCELLED))) as stage:
        answer = await stage.post("/v1/models/unload", {"modelId": "tiny"})
    assert (answer.status, answer.error["code"]) == (409, "cancelled")


async def test_flush_targets_only_this_runner_and_returns_what_it_removed() -> None:
    ends = done(entry_count=1234, reusable_bytes=3500 * MIB)
    async with runner_api(operations=ScriptedOperations(ends)) as stage:
        body = {"scope": "tenant", "tenantId": "community-x", "modelId": None}
        answer = await stage.post("/v1/cache/flush", body)
    assert (answer.status, answer.json) == (200, {"flushed": True, "entriesRemoved": 1234, "memoryFreedMB": 3500})
    flush = stage.operations.asked[0].action.flush_cache
    assert (flush.runner, flush.tenant) == ("gpu-0", "community-x")
    assert flush.scope == runner_service_pb2.FlushCacheRequest.SCOPE_TENANT


async def test_cross_origin_page_cannot_change_anything() -> None:
    async with runner_api(config=edge(allowed_hosts=frozenset({"elsewhere.example"}))) as stage:
        for headers in ({"Origin": "http://elsewhere.example"}, {"Host": "elsewhere.example"}):
            answer = await stage.ask("POST", "/v1/models/load", {"modelId": "small"}, headers)
            assert (answer.status, answer.error["code"]) == (403, "permission_denied")
        assert (await stage.get("/health", Origin="http://elsewhere.example")).status == 200
    assert stage.operations.asked == []


async def test_client_disconnect_does_not_stop_the_unload() -> None:
    async with runner_api() as stage:
        with pytest.raises(TimeoutError):
            await unload_with_patience(stage, 0.2)
        (operation,) = stage.operations.known.values()
    assert operation.state == Operation.STATE_PENDING
    assert stage.operations.cancelled == []


async def unload_with_patience(stage: RunnerApiStage, seconds: float) -> None:
    async with asyncio.timeout(seconds), aiohttp.ClientSession() as http:
        await http.post(f"{stage.service.url}/v1/models/unload", json={"modelId": "tiny"})
