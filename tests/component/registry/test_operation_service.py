"""Operations over the wire: every limit of the contract, pages, watches, the audit log."""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from kit.refusals import refused
from kit.serving import served
from kit.waiting import until
from operation_stage import WAIT_LIMIT_SECONDS, Stage, load, loaded, running_stage, said, unload

from registry_svc.operations.actions import MAX_ACTION_BYTES, check_action
from registry_svc.operations.audit_chain import AuditCheck
from registry_svc.operations.governance import Gatekeeper
from registry_svc.operations.policy.loads import PoolMember
from registry_svc.operations.servicer import MAX_AUTHORIZATION_CHARS, OperationServicer
from registry_svc.wire_values import MAX_ACTOR_CHARS, MAX_PARAMETERS
from weft.api.operations.v1 import operation_pb2, operation_service_pb2, operation_service_pb2_grpc
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.kernel.errors.reasons import Reason

if TYPE_CHECKING:
    from weft.api.operations.v1.operation_service_pb2_grpc import OperationServiceAsyncStub

pb = operation_service_pb2
Operation = operation_pb2.Operation
Scope = runner_service_pb2.FlushCacheRequest


@dataclass
class Desk:
    """Operations that answer over gRPC."""

    stage: Stage
    stub: "OperationServiceAsyncStub"

    async def create(
        self, action: operation_pb2.OperationAction, request_id: str = "r1", **more: str
    ) -> operation_pb2.Operation:
        request = pb.CreateOperationRequest(request_id=request_id, action=action, **more)
        return (await self.stub.CreateOperation(request)).operation

    async def watched(self, name: str) -> list[operation_pb2.Operation]:
        async with asyncio.timeout(WAIT_LIMIT_SECONDS):
            call = self.stub.WatchOperation(pb.WatchOperationRequest(name=name))
            return [response.operation async for response in call]


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with running_stage(Gatekeeper()) as stage:
        service = operation_service_pb2_grpc.add_OperationServiceServicer_to_server, OperationServicer(stage.operations)
        async with served(tmp_path / "registry.sock", service) as channel:
            stub = cast("OperationServiceAsyncStub", operation_service_pb2_grpc.OperationServiceStub(channel))
            yield Desk(stage, stub)


async def test_operation_is_watched_from_acceptance_to_result(desk: Desk) -> None:
    made = await desk.create(load(context=8192), requested_by="alice\x1b[31m\nof ops")
    assert made.name.startswith("operations/op-")
    assert (made.action, made.request_id, made.requested_by) == (load(context=8192), "r1", "alice [31m of ops")
    assert made.HasField("create_time")
    following = asyncio.create_task(desk.watched(made.name))
    desk.stage.calls.answer("m1", said("loading", 0.25, eta_seconds=9))
    await desk.stage.until_stage(made.name, "loading")
    now = (await desk.stub.GetOperation(pb.GetOperationRequest(name=made.name))).operation
    assert (now.state, now.stage, now.progress, now.eta.seconds) == (Operation.STATE_RUNNING, "loading", 0.25, 9)
    assert not now.HasField("result")
    await desk.stage.clock.advance(4.0)
    now = (await desk.stub.GetOperation(pb.GetOperationRequest(name=made.name))).operation
    assert now.eta.seconds == 5
    desk.stage.calls.answer("m1", loaded(100, 30))
    end = (await following)[-1]
    assert (end.state, end.runner, end.progress) == (Operation.STATE_SUCCEEDED, "r1", 1.0)
    assert (end.result.memory_bytes, list(end.result.models)) == (100, ["m1"])
    assert end.HasField("start_time")
    assert end.HasField("end_time")
    assert await desk.watched(made.name) == [end]


async def test_repeated_request_is_marked_as_existing(desk: Desk) -> None:
    request = pb.CreateOperationRequest(request_id="r1", action=load())
    first = await desk.stub.CreateOperation(request)
    second = await desk.stub.CreateOperation(request)
    assert (first.existed, second.existed, first.operation.name) == (False, True, second.operation.name)
    with refused(Reason.ALREADY_EXISTS):
        await desk.create(unload(), "r1")


async def test_map_order_does_not_change_the_action(desk: Desk) -> None:
    def with_parameters(*names: str) -> operation_pb2.OperationAction:
        action = load()
        for name in names:
            action.load_model.options.parameters[name].integer = 1
        return action

    names = [f"p{number}" for number in range(40)]
    await desk.create(with_parameters(*names), "r1")
    await desk.create(with_parameters(*reversed(names)), "r1")


async def test_disconnected_watcher_is_removed(desk: Desk) -> None:
    made = await desk.create(load())
    call = desk.stub.WatchOperation(pb.WatchOperationRequest(name=made.name))
    await cast("Any", call).read()
    live = desk.stage.operations._table.get(made.name)
    assert live is not None
    assert len(live.watchers) == 1
    call.cancel()
    await until(lambda: not live.watchers)


async def test_lists_are_newest_first_in_pages(desk: Desk) -> None:
    for number in range(5):
        await desk.create(load("m1" if number % 2 else "m3"), f"r{number}")
    seen, token = [], ""
    while True:
        page = await desk.stub.ListOperations(pb.ListOperationsRequest(page_size=2, page_token=token))
        seen += [operation.request_id for operation in page.operations]
        token = page.next_page_token
        if not token:
            break
    assert seen == ["r4", "r3", "r2", "r1", "r0"]
    desk.stage.calls.answer("m3", loaded())
    await desk.stage.end((await desk.create(load("m3"), "r0")).name)
    unfinished = await desk.stub.ListOperations(pb.ListOperationsRequest(unfinished_only=True))
    assert [operation.request_id for operation in unfinished.operations] == ["r4", "r3", "r2", "r1"]
    assert unfinished.next_page_token == ""


async def test_audit_log_is_verifiable_from_the_grpc_responses(desk: Desk) -> None:
    for number in range(3):
        desk.stage.calls.answer("m1", loaded())
        await desk.watched((await desk.create(load(), f"r{number}", requested_by="Zoë")).name)
    entries: list[pb.AuditEntry] = []
    head = pb.AuditHead()
    while True:
        request = pb.ListAuditEntriesRequest(page_size=4, after_sequence=len(entries))
        page = await desk.stub.ListAuditEntries(request)
        entries += page.entries
        head = page.head
        if len(page.entries) < 4:
            break
    check = AuditCheck(kept=head)
    check.read(entries)
    assert (check.verdict(), head.sequence, len(entries)) == (None, 9, 9)
    assert (entries[0].event, entries[0].actor) == ("operation.accepted", "Zoë")
    assert json.loads(entries[0].detail)["action"] == {"load_model": {"model": "m1"}}
    broken = AuditCheck(kept=pb.AuditHead(sequence=9, hash="0" * 64))
    broken.read(entries)
    assert broken.verdict() is not None


async def test_disabled_governance_is_reported(desk: Desk) -> None:
    rules = await desk.stub.GetGovernance(pb.GetGovernanceRequest())
    assert rules.mode == pb.GetGovernanceResponse.MODE_OFF


def options(**parameters: load_pb2.LoadValue) -> operation_pb2.OperationAction:
    action = load()
    for name, value in parameters.items():
        action.load_model.options.parameters[name].CopyFrom(value)
    return action


def with_options(**changes: Any) -> operation_pb2.OperationAction:
    return operation_pb2.OperationAction(
        load_model=operation_pb2.LoadModel(model="m1", options=load_pb2.LoadOptions(**changes))
    )


def flushing(**changes: Any) -> operation_pb2.OperationAction:
    return operation_pb2.OperationAction(flush_cache=operation_pb2.FlushCache(**changes))


def keep_alive(seconds: int, nanos: int = 0) -> operation_pb2.OperationAction:
    action = load()
    action.load_model.options.keep_alive.seconds = seconds
    action.load_model.options.keep_alive.nanos = nanos
    return action


UNKNOWN_FIELD = operation_pb2.OperationAction.FromString(load().SerializeToString() + b"\xfa\x3e\x01x")
WORD, NUMBER = load_pb2.LoadValue(word="x" * 257), load_pb2.LoadValue(number=float("nan"))
BAD_ACTIONS = [
    (operation_pb2.OperationAction(), "action"),
    (UNKNOWN_FIELD, "action"),
    (with_options(quantization="q" * MAX_ACTION_BYTES), "action"),
    (load(""), "action.load_model.model"),
    (load("../m1"), "action.load_model.model"),
    (load("m1", evict="m1"), "action.load_model.evict_model"),
    (load("m1", evict="no such name!"), "action.load_model.evict_model"),
    (load("m1", replicas=-1), "action.load_model.replicas"),
    (load("m1", replicas=1025), "action.load_model.replicas"),
    (options(a=load_pb2.LoadValue()), "action.load_model.options.parameters.a"),
    (options(a=NUMBER), "action.load_model.options.parameters.a"),
    (options(a=WORD), "action.load_model.options.parameters.a"),
    (options(**{"": load_pb2.LoadValue(flag=True)}), "action.load_model.options.parameters"),
    (options(**{"a\n": load_pb2.LoadValue(flag=True)}), "action.load_model.options.parameters"),
    (options(**{"a" * 65: load_pb2.LoadValue(flag=True)}), "action.load_model.options.parameters"),
    (
        options(**{f"p{number}": load_pb2.LoadValue(integer=1) for number in range(MAX_PARAMETERS + 1)}),
        "action.load_model.options.parameters",
    ),
    (with_options(quantization="q 8"), "action.load_model.options.quantization"),
    (with_options(memory_budget_bytes=-1), "action.load_model.options.memory_budget_bytes"),
    (keep_alive(10**12), "action.load_model.options.keep_alive"),
    (keep_alive(1, -1), "action.load_model.options.keep_alive"),
    (keep_alive(0, 10**9), "action.load_model.options.keep_alive"),
    (unload(""), "action.unload_model.model"),
    (flushing(), "action.flush_cache.scope"),
    (flushing(scope=9), "action.flush_cache.scope"),
    (flushing(scope=Scope.SCOPE_MODEL), "action.flush_cache.model"),
    (flushing(scope=Scope.SCOPE_TENANT), "action.flush_cache.tenant"),
    (flushing(scope=Scope.SCOPE_TENANT, tenant="a b"), "action.flush_cache.tenant"),
    (flushing(scope=Scope.SCOPE_TAG), "action.flush_cache.tag"),
    (flushing(scope=Scope.SCOPE_TAG, tag="t" * 65), "action.flush_cache.tag"),
    (flushing(scope=Scope.SCOPE_ALL, tenant="acme"), "action.flush_cache.tenant"),
    (flushing(scope=Scope.SCOPE_MODEL, model="m1", tag="t"), "action.flush_cache.tag"),
    (flushing(scope=Scope.SCOPE_ALL, runner="r 1"), "action.flush_cache.runner"),
]


@pytest.mark.parametrize(("action", "field"), BAD_ACTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_out_of_range_action_error_names_the_field(action: operation_pb2.OperationAction, field: str) -> None:
    with refused(field=field):
        check_action(action)


async def test_action_that_does_not_suit_the_mesh_error_names_the_field_and_stores_nothing(desk: Desk) -> None:
    desk.stage.directory.pools["p"] = [PoolMember(model=name, reachable=True, loaded=False) for name in ("m1", "m2")]
    for action, field in (
        (load("../m1"), "action.load_model.model"),
        (load("m1", replicas=2), "action.load_model.replicas"),
        (load("p", evict="m1"), "action.load_model.evict_model"),
        (flushing(scope=Scope.SCOPE_MODEL, model="m1", runner="r2"), "action.flush_cache.runner"),
    ):
        with refused(field=field):
            await desk.create(action)
    assert await desk.stage.audit() == []


async def test_unknown_name_is_rejected_immediately(desk: Desk) -> None:
    for action, reason in (
        (load("m9"), Reason.MODEL_NOT_FOUND),
        (load("m1", evict="m9"), Reason.MODEL_NOT_FOUND),
        (unload("m9"), Reason.MODEL_NOT_FOUND),
        (flushing(scope=Scope.SCOPE_MODEL, model="m9"), Reason.MODEL_NOT_FOUND),
        (flushing(scope=Scope.SCOPE_ALL, runner="r9"), Reason.NOT_FOUND),
    ):
        with refused(reason):
            await desk.create(action)
    assert await desk.stage.audit() == []


@pytest.mark.parametrize(
    "action",
    [
        load("m" * 128, evict="n" * 128, replicas=1024),
        options(a=load_pb2.LoadValue(word="x" * 256), b=load_pb2.LoadValue(number=-1.5)),
        options(**{"a" * 64: load_pb2.LoadValue(flag=False)}),
        with_options(quantization="q" * 128),
        with_options(memory_budget_bytes=2**63 - 1, pin=True),
        keep_alive(10 * 365 * 86_400, 999_999_999),
        keep_alive(-1, -1),
        keep_alive(0),
        flushing(scope=Scope.SCOPE_ALL),
        flushing(scope=Scope.SCOPE_TENANT, tenant="t" * 64, model="m" * 128, runner="r" * 128),
        flushing(scope=Scope.SCOPE_TAG, tag="t" * 64, tenant="acme"),
    ],
)
def test_action_within_its_limits_is_valid(action: operation_pb2.OperationAction) -> None:
    check_action(action)


async def test_flush_on_the_runner_of_its_model_is_accepted(desk: Desk) -> None:
    action = flushing(scope=Scope.SCOPE_ALL, model="m1", runner="r1")
    assert (await desk.create(action)).action == action


async def test_unknown_or_malformed_operation_name_is_rejected_by_every_call(desk: Desk) -> None:
    for name, reason in (
        ("operations/op-1", Reason.NOT_FOUND),
        ("", Reason.INVALID_ARGUMENT),
        ("op-1", Reason.INVALID_ARGUMENT),
        ("operations/", Reason.INVALID_ARGUMENT),
        ("operations/a b", Reason.INVALID_ARGUMENT),
        ("operations/" + "x" * 129, Reason.INVALID_ARGUMENT),
    ):
        for call in (
            desk.stub.GetOperation(pb.GetOperationRequest(name=name)),
            desk.stub.CancelOperation(pb.CancelOperationRequest(name=name)),
            desk.watched(name),
        ):
            with refused(reason):
                await cast("Any", call)


async def test_out_of_range_call_error_names_the_field(desk: Desk) -> None:
    for request_id in ("", "r" * 129, "r 1", "r/1", "r1\n"):
        with refused(field="request_id"):
            await desk.create(load(), request_id)
    for field, limit in (("requested_by", MAX_ACTOR_CHARS), ("authorization", MAX_AUTHORIZATION_CHARS)):
        with refused(field=field):
            await desk.create(load(), **{field: "x" * (limit + 1)})


async def test_call_at_its_limits_is_accepted(desk: Desk) -> None:
    at_bounds = {"requested_by": "x" * MAX_ACTOR_CHARS, "authorization": "x" * MAX_AUTHORIZATION_CHARS}
    assert (await desk.create(load(), "-" + "r" * 127, **at_bounds)).requested_by == "x" * MAX_ACTOR_CHARS


async def test_invented_page_token_is_rejected(desk: Desk) -> None:
    for token in (
        "no base64!",
        "bm90IGEgbnVtYmVy",
        "LTE=",
        "OTk5OTk5OTk5OTk5OTk5OTk5OTk=",
        "OTIyMzM3MjAzNjg1NDc3NTgwOA==",
    ):
        with refused(Reason.INVALID_ARGUMENT):
            await desk.stub.ListOperations(pb.ListOperationsRequest(page_token=token))


async def next_of(call: Any) -> Any:
    async with asyncio.timeout(WAIT_LIMIT_SECONDS):
        return await anext(aiter(call))


async def test_watch_of_all_operations_starts_with_the_existing_ones_and_continues_with_changes(desk: Desk) -> None:
    desk.stage.calls.answer("m1", loaded())
    ended = await desk.create(load("m1"), "r1")
    await desk.watched(ended.name)
    waiting = await desk.create(load("m2"), "r2")
    call = desk.stub.WatchOperations(pb.WatchOperationsRequest())
    first = [await next_of(call) for _ in range(3)]
    assert [each.operation.name for each in first[:2]] == [ended.name, waiting.name]
    assert first[0].operation.state == Operation.STATE_SUCCEEDED
    assert first[2].synced
    begun = await desk.create(unload("m1"), "r3")
    seen = {waiting.name: first[1].operation}
    while seen.get(begun.name, Operation()).state != Operation.STATE_SUCCEEDED:
        found = (await next_of(call)).operation
        seen[found.name] = found
    desk.stage.calls.answer("m2", said("loading", 0.5), loaded())
    while seen[waiting.name].state != Operation.STATE_SUCCEEDED:
        found = (await next_of(call)).operation
        seen[found.name] = found
    call.cancel()


async def test_watch_of_all_operations_includes_the_requested_number_of_ended_ones(desk: Desk) -> None:
    for each in range(4):
        desk.stage.calls.answer("m1", loaded())
        await desk.watched((await desk.create(load("m1"), f"r{each}")).name)
    call = desk.stub.WatchOperations(pb.WatchOperationsRequest(past_count=2))
    found = [await next_of(call) for _ in range(3)]
    assert [each.operation.request_id for each in found] == ["r2", "r3", ""]
    assert found[2].synced
    call.cancel()
