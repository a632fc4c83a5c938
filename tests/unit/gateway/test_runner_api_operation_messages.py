"""Bodies to operations and back."""

import pytest
from kit.runner_facts import model_facts

from gateway.intake.json_guard import parse
from gateway.runner_api.facts import RunnerFacts, RunnerStage
from gateway.runner_api.runner_operations import (
    FlushBody,
    LoadBody,
    begun_body,
    concerns,
    flush_action,
    load_action,
    result_body,
    task_body,
)
from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason

Operation = operation_pb2.Operation
MIB = 1024 * 1024
GPU_0 = RunnerFacts(
    name="gpu-0", kind="llama_server-weft-0.1.0", stage=RunnerStage.SERVING, models=(model_facts(), model_facts("old"))
)
GPU_1 = RunnerFacts(name="gpu-1", kind="llama_server-weft-0.1.0", stage=RunnerStage.SERVING)


def load_body(raw: bytes) -> LoadBody:
    return parse(LoadBody, raw, max_depth=8)


def flush_body(raw: bytes) -> FlushBody:
    return parse(FlushBody, raw, max_depth=8)


def operation(state: Operation.State.ValueType, **fields: object) -> Operation:
    action = operation_pb2.OperationAction(load_model=operation_pb2.LoadModel(model="qwen"))
    return Operation(name="operations/op-1", state=state, action=action, **fields)  # type: ignore[arg-type]


def test_load_becomes_an_operation_with_its_options() -> None:
    action = load_action(
        load_body(
            b'{"modelId": "qwen", "quantization": "q8_0", "maxContextLength": 8192, "gpuMemoryBudgetMB": 2,'
            b' "evictModel": "old"}'
        ),
        GPU_0,
    )
    load = action.load_model
    assert (load.model, load.evict_model, load.options.quantization) == ("qwen", "old", "q8_0")
    assert load.options.parameters["context_tokens"].integer == 8192
    assert load.options.memory_budget_bytes == 2 * MIB
    assert not load.options.HasField("keep_alive")


def test_plain_load_sets_no_options() -> None:
    load = load_action(load_body(b'{"modelId": "qwen", "quantization": null}'), GPU_0).load_model
    assert load.options.SerializeToString() == b""


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"{}", "modelId"),
        (b'{"modelId": ""}', "modelId"),
        (b'{"modelId": "a", "maxContextLength": 0}', "maxContextLength"),
        (b'{"modelId": "a", "maxContextLength": 8192.5}', "maxContextLength"),
        (b'{"modelId": "a", "maxContextLength": "8192"}', "maxContextLength"),
        (b'{"modelId": "a", "gpuMemoryBudgetMB": -1}', "gpuMemoryBudgetMB"),
        (b'{"modelId": "a", "gpuMemoryBudgetMb": 1}', "gpuMemoryBudgetMb"),
        (b'{"modelId": "a", "model_id": "b"}', "model_id"),
        (b'{"modelId": "a", "evict": "b"}', "evict"),
        (b'{"modelId": "a", "requestId": "has space"}', "requestId"),
    ],
)
def test_invalid_load_error_names_its_field(raw: bytes, field: str) -> None:
    with pytest.raises(FieldError) as refused:
        load_body(raw)
    assert refused.value.field == field


def test_oversized_token_is_refused() -> None:
    with pytest.raises(FieldError) as refused:
        load_body(b'{"modelId": "a", "verifiedOpToken": "' + b"x" * 16_385 + b'"}')
    assert refused.value.field.startswith("verifiedOpToken")


@pytest.mark.parametrize(
    ("raw", "scope"),
    [
        (b'{"scope": "all", "modelId": null}', "SCOPE_ALL"),
        (b'{"scope": "model", "modelId": "qwen"}', "SCOPE_MODEL"),
        (b'{"scope": "tenant", "tenantId": "community-x"}', "SCOPE_TENANT"),
        (b'{"scope": "tag", "tag": "s-1", "tenantId": "community-x"}', "SCOPE_TAG"),
    ],
)
def test_every_flush_scope_is_limited_to_this_runner(raw: bytes, scope: str) -> None:
    flush = flush_action(flush_body(raw), GPU_0).flush_cache
    assert flush.scope == runner_service_pb2.FlushCacheRequest.Scope.Value(scope)
    assert flush.runner == "gpu-0"


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b'{"scope": "model"}', "modelId"),
        (b'{"scope": "tenant", "tenantId": null}', "tenantId"),
        (b'{"scope": "tag"}', "tag"),
        (b'{"scope": "all", "tag": "x"}', "tag"),
        (b'{"scope": "model", "modelId": "qwen", "tenantId": "x"}', "tenantId"),
    ],
)
def test_flush_with_conflicting_scope_and_fields_is_refused(raw: bytes, field: str) -> None:
    with pytest.raises(FieldError) as refused:
        flush_action(flush_body(raw), GPU_0)
    assert refused.value.field == field


def test_unknown_scope_is_refused() -> None:
    with pytest.raises(FieldError) as refused:
        flush_body(b'{"scope": "everything"}')
    assert refused.value.field == "scope"


def test_pending_operation_has_zero_progress_and_a_running_one_may_be_unknown() -> None:
    waits = begun_body(operation(Operation.STATE_PENDING))
    assert waits == {"taskId": "op-1", "status": "loading", "progress": 0.0, "eta": None}
    assert begun_body(operation(Operation.STATE_RUNNING))["progress"] is None
    half = operation(Operation.STATE_RUNNING, progress=0.5)
    half.eta.FromMilliseconds(12_400)
    assert task_body(half) == {
        "taskId": "op-1",
        "status": "loading",
        "progress": 0.5,
        "eta": 12,
        "stage": None,
    }


def test_completed_load_reports_its_cost() -> None:
    done = operation(Operation.STATE_SUCCEEDED)
    done.result.memory_bytes = 38_500 * MIB
    done.result.memory_measured = True
    done.result.load_time.FromMilliseconds(287_000)
    assert task_body(done) == {
        "taskId": "op-1",
        "status": "completed",
        "modelId": "qwen",
        "gpuMemoryUsedMB": 38_500,
        "loadTimeMs": 287_000,
    }


def test_unmeasured_memory_is_null() -> None:
    assert task_body(operation(Operation.STATE_SUCCEEDED))["gpuMemoryUsedMB"] is None


def test_failed_load_reports_its_reason() -> None:
    failed = operation(
        Operation.STATE_FAILED,
        reason=Reason.INSUFFICIENT_MEMORY.value,
        detail="needs 40 GiB, host-a has 24 GiB",
    )
    assert task_body(failed) == {
        "taskId": "op-1",
        "status": "failed",
        "modelId": "qwen",
        "error": "needs 40 GiB, host-a has 24 GiB",
        "code": "insufficient_memory",
    }


def test_cancelled_load_fails_with_its_own_code() -> None:
    body = task_body(operation(Operation.STATE_CANCELLED))
    assert (body["status"], body["code"], body["error"]) == ("failed", "cancelled", "it was cancelled")


def test_flush_with_unknown_memory_has_null() -> None:
    done = Operation(state=Operation.STATE_SUCCEEDED)
    done.result.entry_count = 12
    assert result_body(done) == {"flushed": True, "entriesRemoved": 12, "memoryFreedMB": None}
    done.result.reusable_bytes = 3500 * MIB
    assert result_body(done)["memoryFreedMB"] == 3500


def test_operation_of_another_runner_is_not_found() -> None:
    flush = Operation(action=operation_pb2.OperationAction(flush_cache=operation_pb2.FlushCache(runner="gpu-1")))
    other = Operation(action=operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model="x")))
    assert concerns(operation(Operation.STATE_PENDING), GPU_0)
    assert not concerns(flush, GPU_0)
    assert concerns(flush, GPU_1)
    assert not concerns(other, GPU_0)
    assert not concerns(Operation(), GPU_0)
