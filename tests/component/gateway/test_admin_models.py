"""/v1/admin/models and /v1/admin/gpu-memory."""

from collections.abc import Mapping
from typing import Any

import pytest
from admin_script import (
    GIB,
    ScriptedInstances,
    ScriptedOperations,
    ScriptedQueues,
    admin_ports,
    described,
    two_replicas,
)
from gateway_script import FixedFleet, serving

from weft.api.registry.v1 import model_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PoolQueue

QUEUE = PoolQueue(pool="qwen", waiting=3, max_waiting=32, running=1)


async def the_model(path: str = "/v1/admin/models/qwen", **ports: Any) -> Any:
    given = {"queues": ScriptedQueues((QUEUE,)), "instances": ScriptedInstances(described()), **ports}
    async with serving(fleet=FixedFleet(two_replicas()), admin=admin_ports(**given)) as gateway:
        return await gateway.read(path)


async def test_model_document_has_definition_state_queue_replicas_capabilities_and_constraints() -> None:
    found = await the_model()
    assert (found["name"], found["state"]) == ("qwen", "ready")
    assert found["definition"] == {
        "operations": ["chat", "embedding"],
        "contextTokens": 2048,
        "remote": False,
        "runtimes": ["llama_server"],
        "modelPaths": ["/models/qwen.gguf"],
    }
    assert found["queue"] == {"waiting": 3, "maxWaiting": 32, "running": 1}
    assert (found["replicas"]["ready"], found["replicas"]["total"]) == (1, 2)
    first, second = found["replicas"]["members"]
    assert (first["model"], first["host"], first["slotsUsed"], first["pinned"]) == ("qwen", "titan", 1, True)
    assert first["memory"]["leasedBytes"] == 5 * GIB
    assert (second["model"], second["state"]) == ("qwen-2", "hibernating")
    assert found["capabilities"] == {
        "modalities": ["text"],
        "streaming": True,
        "multiTurn": True,
        "embeddings": True,
        "cacheIsolation": ["slots"],
        "thinkingModes": [],
    }
    assert [one["name"] for one in found["constraints"]["parameters"]] == ["cache_type_k", "context_tokens"]
    assert found["constraints"]["parameters"][1] == {
        "name": "context_tokens",
        "description": "Context of one slot.",
        "type": "integer",
        "words": [],
        "minimum": 16.0,
        "maximum": 32_768.0,
        "default": 2048,
    }
    assert found["constraints"]["quantizations"] == ["q4_k_m", "q8_0"]


async def test_list_includes_engines_of_unpublished_models() -> None:
    said = described()
    said["r1"]["left"] = runner_service_pb2.InstanceDescription(model="left", process_id=7, restart_count=1)
    said["r1"]["ended"] = runner_service_pb2.InstanceDescription(model="ended")
    (left,) = (await the_model("/v1/admin/models", instances=ScriptedInstances(said)))["unowned"]
    assert (left["model"], left["runner"], left["state"], left["processId"]) == ("left", "r1", "unowned", 7)
    assert "unowned" not in await the_model("/v1/admin/models")


async def test_unreachable_router_omits_only_the_queue() -> None:
    found = await the_model(queues=ScriptedQueues(failure=WeftError(Reason.SERVICE_UNAVAILABLE, "gone")))
    assert "queue" not in found
    assert found["replicas"]["total"] == 2


async def test_unresponsive_runner_omits_only_its_own_details() -> None:
    found = await the_model(instances=ScriptedInstances())
    assert found["constraints"] == {"parameters": [], "quantizations": []}
    assert found["capabilities"]["cacheIsolation"] == []
    assert found["replicas"]["members"][0]["memory"]["leasedBytes"] == 5 * GIB


async def test_image_model_is_reported_as_such() -> None:
    said = described()
    said["r1"]["qwen"].vision_input = True
    said["r1"]["qwen"].cache_isolation = runner_service_pb2.CACHE_ISOLATION_UNSPECIFIED
    found = await the_model(instances=ScriptedInstances(said))
    assert found["capabilities"]["modalities"] == ["text", "image"]
    assert found["capabilities"]["cacheIsolation"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/admin/models/qwen/load", {"quantization": "q2_k"}),
        ("/v1/admin/models", {"source": "hf:acme/tiny:Q4_K_M", "quantization": "q2_k"}),
    ],
)
async def test_unsupported_quantization_of_a_load_is_rejected_immediately(path: str, body: Mapping[str, str]) -> None:
    """It was accepted, and its operation failed."""
    operations = ScriptedOperations()
    async with serving(
        fleet=FixedFleet(two_replicas()), admin=admin_ports(operations, instances=ScriptedInstances(described()))
    ) as gateway:
        refused = (await gateway.request("POST", path, body)).of(400)
    assert refused["error"]["param"] == "quantization", refused
    assert not operations.created


async def test_the_context_of_a_refused_load_by_source_has_the_name_in_the_body() -> None:
    operations = ScriptedOperations(failure=FieldError("parameters.context_tokens", "must be from 16 to 8192"))
    async with serving(fleet=FixedFleet(two_replicas()), admin=admin_ports(operations)) as gateway:
        for given, field in (
            ({"contextTokens": 9000}, "contextTokens"),
            ({"parameters": {"context_tokens": 9000}}, "parameters.context_tokens"),
        ):
            body = {"source": "/models/tiny.gguf", **given}
            refused = (await gateway.request("POST", "/v1/admin/models", body)).of(400)
            assert refused["error"]["param"] == field


async def test_flush_passes_its_scope() -> None:
    operations = ScriptedOperations()
    async with serving(admin=admin_ports(operations)) as gateway:
        body = b'{"scope":"tag","tag":"session-1","tenant":"acme","model":"tiny"}'
        (await gateway.request("POST", "/v1/admin/cache/flush", body)).of(202)
    flush = operations.created[0].action.flush_cache
    assert (flush.scope, flush.tag, flush.tenant, flush.model) == (
        runner_service_pb2.FlushCacheRequest.SCOPE_TAG,
        "session-1",
        "acme",
        "tiny",
    )


@pytest.mark.parametrize("key", ["a b", "a:b", "x" * 129])
async def test_unsafe_idempotency_key_is_rejected(key: str) -> None:
    async with serving(admin=admin_ports()) as gateway:
        raw = await gateway.request("POST", "/v1/admin/models/tiny/unload", headers={"Idempotency-Key": key})
    assert raw.of(400)["error"]["param"] == "Idempotency-Key"


async def test_member_capabilities_are_shown_as_reported_by_their_runner() -> None:
    view = two_replicas()
    state = view.runners["r1"].instances["qwen"]
    state.abilities.skills.extend([model_pb2.MODEL_SKILL_TEXT, model_pb2.MODEL_SKILL_AUDIO])
    state.abilities.lacking.append(model_pb2.MODEL_SKILL_IMAGE)
    state.abilities.thinking_modes.extend([model_pb2.THINKING_MODE_DEFAULT, model_pb2.THINKING_MODE_DISABLED])
    state.abilities.target_languages.append("nl")
    async with serving(fleet=FixedFleet(view), admin=admin_ports()) as gateway:
        found = (await gateway.read("/v1/admin/models/qwen"))["capabilities"]
    assert found["modalities"] == ["text", "audio"]
    assert "tools" not in found, "whether a member calls tools is not known"
    assert found["thinkingModes"] == ["default", "disabled"]
    assert (found["targetLanguages"], "sourceLanguages" in found) == (["nl"], False)


async def test_load_parameter_no_engine_supports_is_rejected_before_an_operation_is_created() -> None:
    operations = ScriptedOperations()
    ports = admin_ports(operations, instances=ScriptedInstances(described()))
    async with serving(fleet=FixedFleet(two_replicas()), admin=ports) as gateway:
        for body, field, words in (
            ({"parameters": {"gpu_layer": 3}}, "parameters.gpu_layer", "these can: cache_type_k, context_tokens"),
            ({"parameters": {"cache_type_k": "q9"}}, "parameters.cache_type_k", "must be one of: f16, q8_0"),
            ({"parameters": {"context_tokens": "much"}}, "parameters.context_tokens", "must be a number"),
            ({"contextTokens": 65_536}, "contextTokens", "must be from 16 to 32768"),
        ):
            error = (await gateway.request("POST", "/v1/admin/models/qwen/load", body)).of(400)["error"]
            assert error["param"] == field
            assert words in error["message"]
            assert operations.created == []
            # The runner of this one cannot be asked.
            (await gateway.request("POST", "/v1/admin/models/qwen-2/load", body)).of(202)
            operations.created.clear()
