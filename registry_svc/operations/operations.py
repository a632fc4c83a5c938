"""Operations for callers: accept, read, watch, cancel, and unload before a forced delete; housekeeping."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

from registry_svc.mesh.core import RegistryCore
from registry_svc.mesh.runner_calls import RunnerCalls
from registry_svc.operations.actions import action_bytes, action_summary, check_action
from registry_svc.operations.audit_log import AuditLog, action_detail, action_hash
from registry_svc.operations.executor import Executor, cancelled_operation, end_step
from registry_svc.operations.governance import Admission, Gatekeeper
from registry_svc.operations.job import JobDeps
from registry_svc.operations.live_operations import (
    ENDED,
    OPERATION_PREFIX,
    LiveOperation,
    OperationTable,
    OperationWatcher,
)
from registry_svc.operations.operation_spans import OperationSpans
from registry_svc.operations.operation_store import NonceUsed, OperationStore, RequestKnown, Saved
from registry_svc.operations.policy.governance import Refused
from registry_svc.operations.policy.loads import LoadTimes
from registry_svc.operations.runner_presence import RunnerPresence
from registry_svc.operations.targets import RunnerDirectory, load_target, require_known, subjects_of
from registry_svc.registry_config import OperationLimits
from registry_svc.watchers import Watcher
from registry_svc.writer import SingleWriter
from weft.api.operations.v1.operation_pb2 import (
    LoadModel,
    Operation,
    OperationAction,
    RemoveModel,
    UnloadModel,
)
from weft.api.operations.v1.operation_service_pb2 import (
    AuditEntry,
    AuditHead,
    CreateOperationRequest,
    GetGovernanceResponse,
)
from weft.documents.load_values import require_loadable
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.telemetry.tracing import NO_TRACING, Tracing
from weft.kernel.time.timestamps import stamp_of
from weft.kernel.values.names import new_id
from weft.sql.store import Store
from weft.sql.sweeper import Sweeper

AUDIT_HEAD_INTERVAL_SECONDS = 3_600.0
"""How often the head of the audit log is written to the process's log, so that truncation can be detected."""
log = get_logger("weft.registry.operations")

MAX_WAITING_WRITES = 256
LEARNED_FROM = 1_000
"""Number of the newest operations from which load times are learned at a start."""
RETRY_AFTER_SECONDS = 1.0
HOUSEKEEPING_INTERVAL_SECONDS = 60.0
MAX_UNLOAD_WAIT_SECONDS = 110.0
"""How long a forced delete waits for an unload, which lets running requests finish."""
_NOTHING_TO_UNLOAD = frozenset({Reason.UNSUPPORTED_OPERATION, Reason.MODEL_NOT_FOUND, Reason.WORKER_RESTARTED})
"""Answers of a runner that has nothing loaded, or cannot stop the engine because it did not start it."""


class Operations:
    """All operations of one registry. Calls before `start` or after `stop` fail with SHUTTING_DOWN."""

    def __init__(
        self,
        store: OperationStore,
        deps: JobDeps,
        gatekeeper: Gatekeeper,
        settings: OperationLimits,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self._store = store
        self._deps = deps
        self._clock = deps.clock
        self._gatekeeper = gatekeeper
        self._settings = settings
        self._table = OperationTable(deps.clock)
        self._writer = SingleWriter(lambda: store.is_in_doubt)
        self.audit = AuditLog(store, deps.clock, settings.max_audit_entries)
        self._spans = OperationSpans(tracing)
        self._executor = Executor(deps, store, self.audit, self._table, self._writer, settings, self._spans)
        self._open = False
        self._may_expire = True
        """Whether the store may have operations or nonces that expire; otherwise housekeeping does nothing."""

    async def start(self) -> None:
        """Resumes the operations of the previous process. Call it once the database is open and the mesh is loaded."""
        self._gatekeeper.recall(await self._store.newest_issued_at())
        await self.audit.start()
        for operation in reversed(await self._store.page(before_number=None, size=LEARNED_FROM)):
            self._learn(operation)
        for operation in await self._store.load_unfinished():
            self._take(operation, resumed=True)
        self._open = True
        log.info("operations open", unfinished=len(self._table), audit_entries=self.audit.head.sequence)
        self.audit.tell_head()
        self._executor.pump()

    async def stop(self, grace_seconds: float) -> None:
        """Leaves operations unfinished; the next process resumes them. Call it before the database is closed."""
        if not self._open:
            return
        self._open = False
        await self._executor.stop()
        await self._writer.drain(grace_seconds)
        self._table.clear()
        try:
            await self.audit.close_window(immediately=True)
        except WeftError:
            log.warning("the count of refusals was lost")
        self.audit.tell_head()

    async def create(self, request: CreateOperationRequest, traceparent: str = "") -> tuple[Operation, bool]:
        """Accepts an operation. Returns it, and whether an earlier call with the same request id created it.

        `traceparent` is the caller's valid one, or "". Acceptance completes even if the caller is gone.

        Raises ALREADY_EXISTS, OPERATION_REFUSED, TOO_MANY_RESOURCES, QUEUE_FULL and SERVICE_UNAVAILABLE, and what
        `require_known` raises.
        """
        self._require_open()
        self._require_turn()
        await self._require_options(request.action.load_model)
        return await self._writer.run(lambda: self._accept(request, traceparent))

    async def get(self, name: str) -> Operation:
        """Returns an operation. Raises NOT_FOUND."""
        self._require_open()
        live = self._table.get(name)
        operation = await self._store.get(name) if live is None else live.operation
        if operation is None:
            raise WeftError(
                Reason.NOT_FOUND, "there is no operation with this name; ended operations are kept for a limited time"
            )
        return self._table.shown(operation)

    async def page(self, *, before_number: int | None, size: int, unfinished_only: bool) -> list[Operation]:
        """Returns at most `size` operations, newest first, accepted before `before_number`."""
        self._require_open()
        found = await self._store.page(before_number=before_number, size=size, unfinished_only=unfinished_only)
        return [self._table.shown(operation) for operation in found]

    async def watch(self, name: str) -> Operation | OperationWatcher:
        """Returns a watcher, or the final state of an ended operation. Raises NOT_FOUND and TOO_MANY_RESOURCES."""
        operation = await self.get(name)
        live = self._table.get(name)
        if live is not None:
            return self._table.watch(live)
        # It may have ended during the lookup.
        return operation if operation.state in ENDED else await self.get(name)

    def watch_all(self) -> Watcher[Operation]:
        """Returns a watcher for changes of all operations from now on. Raises TOO_MANY_RESOURCES."""
        self._require_open()
        return self._table.watched.subscribe()

    async def present(self, past_count: int) -> list[Operation]:
        """Returns unfinished operations and the newest `past_count` ended ones, oldest first."""
        unfinished = await self.page(before_number=None, size=self._settings.max_unfinished, unfinished_only=True)
        newest = await self.page(before_number=None, size=past_count + len(unfinished), unfinished_only=False)
        ended = [each for each in newest if each.state in ENDED][:past_count]
        found = {each.name: each for each in (*unfinished, *ended)}
        return sorted(found.values(), key=lambda each: each.number)

    async def cancel(self, name: str, requested_by: str) -> Operation:
        """Requests the cancellation of an operation, which becomes CANCELLED later.

        Raises NOT_FOUND, QUEUE_FULL and SERVICE_UNAVAILABLE.
        """
        operation = await self.get(name)
        if operation.state in ENDED or operation.cancel_requested:
            return operation
        self._require_turn()
        return await self._writer.run(lambda: self._cancel(name, requested_by))

    async def record(self, write: Callable[[], Awaitable[None]]) -> None:
        """Writes to the audit log in turn. Raises QUEUE_FULL and SERVICE_UNAVAILABLE."""
        self._require_open()
        self._require_turn()
        await self._writer.run(write)

    async def record_request(self, event: str, detail: Mapping[str, object], requested_by: str) -> None:
        """Records in the audit log that an operator requests something besides operations.

        Raises TOO_MANY_RESOURCES if the log is full, QUEUE_FULL and SERVICE_UNAVAILABLE.
        """
        self._require_open()
        self.audit.require_room(len(self._table))
        await self.record(lambda: self.audit.write(event, requested_by, dict(detail)))

    async def audit_page(self, after_sequence: int, size: int) -> tuple[list[AuditEntry], AuditHead]:
        """Returns at most `size` entries after a sequence number, oldest first, and the head of the log."""
        self._require_open()
        # Read the head before the page, so that the last page never lacks the head's entry.
        head = self.audit.head
        return await self._store.page_audit(after_sequence=after_sequence, size=size), head

    def rules(self) -> GetGovernanceResponse:
        """Returns the governance rules."""
        return self._gatekeeper.describe()

    async def housekeep(self) -> None:
        """Deletes expired operations and nonces, and writes counted refusals. Raises SERVICE_UNAVAILABLE."""
        self._require_open()
        await self._writer.run(self._delete_expired)
        await self._writer.run(self.audit.close_window)

    async def tell_head(self) -> None:
        """Writes the head of the audit log to the process's log."""
        self.audit.tell_head()

    async def _delete_expired(self) -> None:
        if not self._may_expire:
            return
        now = self._clock.utc_now()
        ended_before = now - timedelta(seconds=self._settings.keep_seconds)
        self._may_expire = await self._store.delete_expired(ended_before=ended_before, now=now)

    async def _accept(self, request: CreateOperationRequest, traceparent: str) -> tuple[Operation, bool]:
        self._require_open()
        live = self._table.of_request(request.request_id)
        earlier = live.operation if live is not None else await self._store.of_request(request.request_id)
        if earlier is not None:
            return self._adopted(earlier, request), True
        # Checked after repeats, which are answered even if the model is gone.
        require_known(request.action, self._deps.directory)
        admission = await self._admitted(request)
        if len(self._table) >= self._settings.max_unfinished:
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._settings.max_unfinished} operations wait or run already; try again when some have ended",
                metadata={"limit": str(self._settings.max_unfinished)},
            )
        self.audit.require_room(len(self._table))
        self._may_expire = True
        match await self._store.save_new(*self._new(request, admission), admission):
            case Saved(operation, head):
                self.audit.moved(head)
                self._take(operation, resumed=False, traceparent=traceparent)
                self._executor.pump()
                return self._table.shown(operation), False
            case RequestKnown(earlier):
                return self._adopted(earlier, request), True
            case NonceUsed():
                refused = Refused("its nonce was used before")
                raise await self._refusal(refused, request)

    async def _require_options(self, load: LoadModel) -> None:
        """Raises INVALID_ARGUMENT naming a parameter that no engine for the load's source is known to have."""
        if not (load.source and load.options.parameters):
            return
        try:
            target = load_target(load, self._deps.directory)
            if target.is_server:
                return
            engines = await self._deps.calls.source_engines(target.runner, load.source)
        except WeftError as error:
            # Other faults are found when the operation is accepted or executed.
            log.info("options not checked before the load", source=load.source, why=error.message)
            return
        require_loadable(load.options, engines, field="action.load_model.options.parameters")

    async def _admitted(self, request: CreateOperationRequest) -> Admission:
        try:
            return self._gatekeeper.admit(request.action, request.authorization, self._clock.utc_now())
        except Refused as refused:
            raise await self._refusal(refused, request) from None

    async def _refusal(self, refused: Refused, request: CreateOperationRequest) -> WeftError:
        """Records the reason in the audit log only."""
        await self.audit.refused(refused, request.action, request.requested_by)
        return WeftError(Reason.OPERATION_REFUSED, "refused")

    def _new(self, request: CreateOperationRequest, admission: Admission) -> tuple[Operation, list[AuditEntry]]:
        operation = Operation(
            name=OPERATION_PREFIX + new_id("op"),
            state=Operation.STATE_PENDING,
            request_id=request.request_id,
            action=request.action,
            requested_by=request.requested_by,
            signers=admission.signers,
            create_time=stamp_of(self._clock.utc_now()),
        )
        detail: dict[str, object] = {
            "action": action_detail(request.action),
            "action_sha256": action_hash(action_bytes(request.action)),
            "request_id": request.request_id,
            "signers": list(admission.signers),
        }
        if admission.issued_at is not None:
            detail["issued_at"] = admission.issued_at.isoformat()
        return operation, [self.audit.drafted("operation.accepted", operation, request.requested_by, **detail)]

    async def _cancel(self, name: str, requested_by: str) -> Operation:
        self._require_open()
        live = self._table.get(name)
        if live is None:
            return await self.get(name)
        if live.operation.cancel_requested:
            return self._table.shown(live.operation)
        drafts = [self.audit.drafted("operation.cancel_requested", live.operation, requested_by)]
        if live.task is None and live.operation.state == Operation.STATE_PENDING:
            ending = cancelled_operation("it had not begun")
            ending.cancel_requested = True
            drafts.append(self.audit.drafted("operation.cancelled", live.operation, "", detail=ending.detail))
            await self._executor.change(live, end_step(ending, self._clock.utc_now()), drafts)
            self._executor.pump()
        else:
            await self._executor.change(live, lambda each: each.MergeFrom(Operation(cancel_requested=True)), drafts)
            live.cancel_requested.set()
        return self._table.shown(live.operation)

    def _adopted(self, earlier: Operation, request: CreateOperationRequest) -> Operation:
        """Returns an earlier operation. Resumes it if its acceptance was stored but reported as failed.

        Raises ALREADY_EXISTS if its request id is used for another action.
        """
        if action_bytes(earlier.action) != action_bytes(request.action):
            raise WeftError(
                Reason.ALREADY_EXISTS,
                "this request_id was used for another operation; use a different one for each",
                metadata={"operation": earlier.name},
            )
        if self._table.get(earlier.name) is None and earlier.state not in ENDED:
            self._take(earlier, resumed=True)
            self._executor.pump()
        return self._table.shown(earlier)

    def _take(self, operation: Operation, *, resumed: bool, traceparent: str = "") -> LiveOperation:
        live = LiveOperation(
            operation=operation,
            subjects=subjects_of(operation.action, self._deps.directory),
            resumed=resumed,
            trace=self._spans.begin(operation.name.removeprefix(OPERATION_PREFIX), traceparent),
        )
        if operation.cancel_requested:
            live.cancel_requested.set()
        self._table.add(live)
        self._table.publish(live)
        log.info("operation accepted", operation=operation.name, work=action_summary(operation.action), resumed=resumed)
        return live

    def _learn(self, operation: Operation) -> None:
        """Learns the duration of a stored load. Call it in the order of acceptance."""
        result = operation.result
        if operation.state == Operation.STATE_SUCCEEDED and len(result.models) == 1 and result.HasField("load_time"):
            self._deps.times.learn(result.models[0], result.load_time.ToNanoseconds() / 1e9)

    def _require_turn(self) -> None:
        if self._writer.waiting >= MAX_WAITING_WRITES:
            raise WeftError(
                Reason.QUEUE_FULL,
                f"{MAX_WAITING_WRITES} operations wait to be accepted or cancelled; try again",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )

    def _require_open(self) -> None:
        if not self._open:
            raise WeftError(
                Reason.SHUTTING_DOWN, "the registry is not running", retry_after_seconds=RETRY_AFTER_SECONDS
            )


class OperationUnloader:
    """See `registry_svc.mesh.declarations.Unloader`."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    async def unload(self, model: str, requested_by: str) -> None:
        """Unloads a model and waits for the end. Raises OPERATION_REFUSED, DEADLINE_EXCEEDED, or its failure."""
        if self._operations.rules().mode != GetGovernanceResponse.MODE_OFF:
            raise WeftError(
                Reason.OPERATION_REFUSED,
                f"{model} is loaded, and governance is on: unload it with an authorization first "
                f"(`weft unload {model} --token FILE`), then delete it",
                metadata={"model": model},
            )
        action = OperationAction(unload_model=UnloadModel(model=model))
        await self._carry_out(action, model, requested_by)

    async def remove(self, model: str, requested_by: str) -> None:
        """Removes a model that was added by its source and waits for the end. Raises as `unload`."""
        if self._operations.rules().mode != GetGovernanceResponse.MODE_OFF:
            raise WeftError(
                Reason.OPERATION_REFUSED,
                f"governance is on: remove {model} with an authorization (POST /v1/admin/models/{model}/remove)",
                metadata={"model": model},
            )
        action = OperationAction(remove_model=RemoveModel(model=model))
        await self._carry_out(action, model, requested_by)

    async def _carry_out(self, action: OperationAction, model: str, requested_by: str) -> None:
        check_action(action)
        request = CreateOperationRequest(request_id=new_id("del"), action=action, requested_by=requested_by)
        operation, _ = await self._operations.create(request)
        try:
            async with asyncio.timeout(MAX_UNLOAD_WAIT_SECONDS):
                operation = await self._ended(operation)
        except TimeoutError:
            raise WeftError(
                Reason.DEADLINE_EXCEEDED,
                f"{model} did not unload within {MAX_UNLOAD_WAIT_SECONDS:.0f} s; {operation.name} continues, and "
                "nothing was deleted: delete it again when that has ended",
                metadata={"model": model, "operation": operation.name},
            ) from None
        if operation.state == Operation.STATE_SUCCEEDED or Reason(operation.reason) in _NOTHING_TO_UNLOAD:
            return
        raise WeftError(
            Reason.CANCELLED if operation.state == Operation.STATE_CANCELLED else Reason(operation.reason),
            f"{model} was not unloaded, and nothing was deleted: {operation.detail or 'the unload was cancelled'}",
            metadata={"model": model, "operation": operation.name},
        )

    async def _ended(self, operation: Operation) -> Operation:
        followed = await self._operations.watch(operation.name)
        if isinstance(followed, Operation):
            return followed
        with followed:
            return [each async for each in followed][-1]


class OperationService:
    """The operations of one registry, on the database of its core. Start it after the core, and stop it before."""

    def __init__(
        self,
        core: RegistryCore,
        database: Store,
        calls: RunnerCalls,
        gatekeeper: Gatekeeper,
        settings: OperationLimits,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        directory = RunnerDirectory(core)
        deps = JobDeps(
            calls=calls,
            directory=directory,
            clock=core.clock,
            times=LoadTimes(),
            presence=RunnerPresence(directory, core.clock),
        )
        self.operations = Operations(OperationStore(database), deps, gatekeeper, settings, tracing)
        self.unloader = OperationUnloader(self.operations)
        self._sweepers = [
            Sweeper(name, {name: sweep}, seconds, core.clock)
            for name, sweep, seconds in (
                ("operations-housekeeping", self.operations.housekeep, HOUSEKEEPING_INTERVAL_SECONDS),
                ("audit-head", self.operations.tell_head, AUDIT_HEAD_INTERVAL_SECONDS),
            )
        ]

    async def start(self) -> None:
        """Resumes the operations of the previous process. Raises SERVICE_UNAVAILABLE."""
        await self.operations.start()
        for sweeper in self._sweepers:
            sweeper.start()

    async def stop(self, grace_seconds: float) -> None:
        """Leaves operations unfinished. Safe to call twice, or when never started."""
        for sweeper in self._sweepers:
            await sweeper.stop()
        await self.operations.stop(grace_seconds)
