"""Conversion between operation documents and messages."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

from weft.api.common.v1 import priority_pb2
from weft.api.operations.v1 import operation_pb2, operation_service_pb2
from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.documents.operation_documents import (
    AuditEntryDocument,
    DeviceDocument,
    FlushScope,
    HostMemoryDocument,
    LeaseDocument,
    LoadParameterDocument,
    LoadSettings,
    LoadValue,
    OperationActionDocument,
    OperationDocument,
    OperationResultDocument,
)
from weft.kernel.errors import invalid_field
from weft.kernel.reasons import Reason
from weft.kernel.units import keep_alive_seconds

if TYPE_CHECKING:
    from google.protobuf.timestamp_pb2 import Timestamp

MEBIBYTE = 1024 * 1024
CONTEXT_TOKENS = "context_tokens"
_MAX_INTEGER = 2**63 - 1
_SCOPES = {
    "all": runner_service_pb2.FlushCacheRequest.SCOPE_ALL,
    "model": runner_service_pb2.FlushCacheRequest.SCOPE_MODEL,
    "tenant": runner_service_pb2.FlushCacheRequest.SCOPE_TENANT,
    "tag": runner_service_pb2.FlushCacheRequest.SCOPE_TAG,
}


def load_options(settings: LoadSettings, field: str = "") -> load_pb2.LoadOptions:
    """Converts settings to their message. Raises INVALID_ARGUMENT naming the setting below `field`."""
    where = f"{field}." if field else ""
    options = load_pb2.LoadOptions(quantization=settings.quantization or "", pin=settings.pin)
    options.memory_budget_bytes = (settings.memory_budget_mb or 0) * MEBIBYTE
    if settings.keep_alive is not None:
        seconds = keep_alive_seconds(settings.keep_alive, f"{where}keepAlive")
        options.keep_alive.FromNanoseconds(int(seconds * 1e9))
    for name, value in settings.parameters.items():
        options.parameters[name].CopyFrom(_load_value(value, f"{where}parameters.{name}"))
    if settings.context_tokens is not None:
        if CONTEXT_TOKENS in settings.parameters:
            raise invalid_field(f"{where}parameters.{CONTEXT_TOKENS}", "is given as contextTokens as well")
        options.parameters[CONTEXT_TOKENS].integer = settings.context_tokens
    return options


def load_action(
    model: str, settings: LoadSettings, *, evict_model: str = "", replicas: int = 0, field: str = ""
) -> operation_pb2.OperationAction:
    """Returns the action that loads a model."""
    return operation_pb2.OperationAction(
        load_model=operation_pb2.LoadModel(
            model=model, options=load_options(settings, field), evict_model=evict_model, replicas=replicas
        )
    )


def unload_action(model: str) -> operation_pb2.OperationAction:
    """Returns the action that unloads a model."""
    return operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model=model))


def flush_action(
    scope: FlushScope, *, model: str = "", tenant: str = "", tag: str = "", runner: str = ""
) -> operation_pb2.OperationAction:
    """Returns the action that flushes cached prefixes. Raises INVALID_ARGUMENT naming a wrong field of the scope."""
    needed = {"model": model, "tenant": tenant, "tag": tag}.get(scope, scope)
    if not needed:
        raise invalid_field(scope, f"must be given where the scope is {scope}")
    return operation_pb2.OperationAction(
        flush_cache=operation_pb2.FlushCache(scope=_SCOPES[scope], model=model, tenant=tenant, tag=tag, runner=runner)
    )


def operation_document(operation: operation_pb2.Operation) -> OperationDocument:
    """Converts an operation."""
    return OperationDocument(
        kind="operation",
        name=operation.name,
        state=cast("Any", _last_word(operation_pb2.Operation.State, operation.state)),
        action=action_document(operation.action),
        progress=operation.progress if operation.HasField("progress") else None,
        stage=operation.stage or None,
        detail=operation.detail or None,
        reason=_reason(operation.reason),
        eta_seconds=operation.eta.ToNanoseconds() / 1e9 if operation.HasField("eta") else None,
        runner=operation.runner or None,
        requested_by=operation.requested_by or None,
        signers=tuple(operation.signers),
        request_id=operation.request_id,
        created_at=_moment(operation, "create_time"),
        started_at=_moment(operation, "start_time"),
        ended_at=_moment(operation, "end_time"),
        result=_result(operation) if operation.HasField("result") else None,
    )


def action_document(action: operation_pb2.OperationAction) -> OperationActionDocument:
    """Converts an action."""
    match action.WhichOneof("kind"):
        case "load_model":
            load = action.load_model
            return OperationActionDocument(
                type="load",
                model=load.model,
                settings=settings_document(load.options),
                evict_model=load.evict_model or None,
                replicas=load.replicas or None,
            )
        case "unload_model":
            return OperationActionDocument(type="unload", model=action.unload_model.model)
        case "flush_cache":
            flush = action.flush_cache
            scope = next((word for word, number in _SCOPES.items() if number == flush.scope), None)
            return OperationActionDocument(
                type="flush",
                model=flush.model or None,
                scope=cast("Any", scope),
                tenant=flush.tenant or None,
                tag=flush.tag or None,
                runner=flush.runner or None,
            )
        case _:
            return OperationActionDocument(type="unknown")


def settings_document(options: load_pb2.LoadOptions) -> LoadSettings:
    """Converts load options; `load_options` is the inverse."""
    parameters = {name: load_value(value) for name, value in sorted(options.parameters.items())}
    context = cast("int | None", parameters.pop(CONTEXT_TOKENS, None))
    keep_alive = options.keep_alive.ToNanoseconds() / 1e9 if options.HasField("keep_alive") else None
    return LoadSettings.model_construct(
        context_tokens=context,
        quantization=options.quantization or None,
        memory_budget_mb=-(-options.memory_budget_bytes // MEBIBYTE) or None,
        keep_alive=keep_alive,
        pin=options.pin,
        parameters=parameters,
    )


def parameter_document(parameter: load_pb2.LoadParameter) -> LoadParameterDocument:
    """Converts a load parameter."""
    kind = "word" if parameter.words else "flag" if parameter.flag else "integer" if parameter.integer else "number"
    return LoadParameterDocument(
        name=parameter.name,
        description=parameter.description,
        type=cast("Any", kind),
        words=tuple(parameter.words),
        minimum=parameter.minimum if parameter.HasField("minimum") else None,
        maximum=parameter.maximum if parameter.HasField("maximum") else None,
        default=load_value(parameter.default) if parameter.HasField("default") else None,
    )


def load_value(value: load_pb2.LoadValue) -> LoadValue:
    """Converts a value; unset: an empty text."""
    kind = value.WhichOneof("kind")
    return "" if kind is None else cast("LoadValue", getattr(value, kind))


def host_memory_document(memory: lease_service_pb2.HostMemory) -> HostMemoryDocument:
    """Converts the memory of a host."""
    source = _last_word(lease_pb2.HostSighting.Source, memory.source)
    return HostMemoryDocument(
        host=memory.host,
        source=cast("Any", source),
        seen_at=_moment(memory, "sighting_time"),
        devices=tuple(_device(device) for device in memory.devices),
        leases=tuple(_lease(lease) for lease in memory.leases),
        waiting_count=memory.waiting_count,
    )


def audit_document(entry: operation_service_pb2.AuditEntry) -> AuditEntryDocument:
    """Converts an entry of the audit log."""
    return AuditEntryDocument(
        sequence=entry.sequence,
        time=entry.time.ToDatetime(tzinfo=UTC),
        event=entry.event,
        actor=entry.actor,
        operation=entry.operation or None,
        detail=entry.detail,
        previous_hash=entry.previous_hash,
        hash=entry.hash,
    )


def _load_value(value: LoadValue, field: str) -> load_pb2.LoadValue:
    if isinstance(value, bool):
        return load_pb2.LoadValue(flag=value)
    if isinstance(value, int):
        if abs(value) > _MAX_INTEGER:
            raise invalid_field(field, "is too large a number")
        return load_pb2.LoadValue(integer=value)
    return load_pb2.LoadValue(number=value) if isinstance(value, float) else load_pb2.LoadValue(word=value)


def _result(operation: operation_pb2.Operation) -> OperationResultDocument:
    result, kind = operation.result, operation.action.WhichOneof("kind")
    models = tuple(result.models)
    if kind == "load_model":
        return OperationResultDocument(
            models=models,
            memory_bytes=result.memory_bytes,
            memory_measured=result.memory_measured,
            load_seconds=result.load_time.ToNanoseconds() / 1e9,
            memory_freed_bytes=result.memory_freed_bytes or None,
        )
    if kind == "unload_model":
        return OperationResultDocument(
            models=models, memory_freed_bytes=result.memory_freed_bytes, cache_flushed=result.cache_flushed
        )
    return OperationResultDocument(
        models=models,
        entry_count=result.entry_count,
        token_count=result.token_count if result.HasField("token_count") else None,
        reusable_bytes=result.reusable_bytes if result.HasField("reusable_bytes") else None,
    )


def _device(memory: lease_service_pb2.DeviceMemory) -> DeviceDocument:
    device = memory.device
    return DeviceDocument(
        index=device.index,
        id=device.id,
        name=device.name,
        total_bytes=device.total_bytes,
        used_bytes=device.used_bytes if device.HasField("used_bytes") else None,
        booked_bytes=memory.booked_bytes,
        foreign_bytes=memory.foreign_bytes if memory.HasField("foreign_bytes") else None,
        free_bytes=memory.free_bytes,
        margin_bytes=memory.margin_bytes,
        utilization=device.utilization if device.HasField("utilization") else None,
    )


def _lease(lease: lease_pb2.Lease) -> LeaseDocument:
    return LeaseDocument(
        lease_id=lease.lease_id,
        fencing_number=lease.fencing_number,
        holder_kind=cast("Any", _last_word(lease_pb2.LeaseHolder.Kind, lease.holder.kind)),
        holder=lease.holder.name,
        purpose=lease.purpose,
        state=cast("Any", _last_word(lease_pb2.Lease.State, lease.state)),
        bytes_by_device={str(share.device_index): share.bytes for share in lease.shares},
        seen_bytes=lease.seen_bytes if lease.HasField("seen_bytes") else None,
        priority=cast("Any", _last_word(priority_pb2.Priority, lease.priority or priority_pb2.PRIORITY_NORMAL)),
        pinned=lease.pinned,
        active_requests=lease.active_requests,
        created_at=_moment(lease, "create_time"),
        last_used_at=_moment(lease, "last_used_time"),
    )


def _last_word(enum: Any, number: int) -> str:
    """Returns an enum value as text: STATE_RUNNING is "running"; an unset or unknown number is "unknown"."""
    names: dict[int, str] = {value: name for name, value in enum.items() if value}
    return names.get(number, "").partition("_")[2].lower() or "unknown"


def _reason(number: int) -> str | None:
    if not number:
        return None
    try:
        return Reason(number).name.lower()
    except ValueError:
        return "unknown"


def _moment(message: Any, field: str) -> datetime | None:
    if not message.HasField(field):
        return None
    moment: Timestamp = getattr(message, field)
    return moment.ToDatetime(tzinfo=UTC)
