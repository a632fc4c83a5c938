"""Validation of a TaskSpec and its conversion to a new task, for single tasks and batch items."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.task_records import NewTask
from weft.api.router.v1 import task_pb2
from weft.dispatch.agents import name_asked_for, require_model_name
from weft.dispatch.operation_table import operation_of
from weft.dispatch.parameter_checks import client_of, handling_of, may_keep_alive, priority_of, session_of
from weft.durable.batches import MAX_METADATA, MAX_METADATA_NAME_CHARS, MAX_METADATA_VALUE_CHARS
from weft.durable.media import media_parts
from weft.durable.tasks import MAX_ORIGIN_KIND_CHARS, TASK_PREFIX, TaskPayload, payload_of
from weft.kernel.access.principal import MAY_LEAVE, USE_MODELS, Principal
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import TASK_OPERATIONS, Operation, Priority
from weft.kernel.values.names import AGENT_PREFIX, MAX_NAME_CHARS, MAX_REQUEST_ID_CHARS, new_id, require_token

MIN_PENDING_LIMIT_SECONDS = 1.0
MAX_PENDING_LIMIT_SECONDS = 7 * 86_400.0
MAX_ATTEMPTS = 100
MAX_TRACEPARENT_CHARS = 128
MAX_USER_CHARS = 1024
MAX_CALLER_CHARS = 128
_NANOSECONDS = 1e9
_STAND_IN = b"\0"
_PAYLOAD = "payload"
"""Field name of the payload in checks shared with live requests."""


def checked_task(
    spec: task_pb2.TaskSpec,
    limits: TaskLimits,
    field: str,
    *,
    tenant: str,
    caller: str,
    created_at: float,
    idempotency_key: str = "",
) -> NewTask:
    """Returns the new task of a valid spec, with priority DURABLE unless the spec sets another.

    Raises INVALID_ARGUMENT or REQUEST_TOO_LARGE naming `field` or a field in it. The servicer, which knows the caller,
    checks whether remote models are allowed.
    """
    with _within(field):
        _check_sizes(spec, limits)
        model = require_model_name(spec.model, "model")
        operation = _check_payload(spec, limits)
        if model.startswith(AGENT_PREFIX) and operation is not Operation.CHAT:
            raise invalid_field("model", "an agent only chats")
        handling_of(spec.options)
        client_of(spec.options)
        session_of(spec.options)
        band = priority_of(spec.options) if spec.options.priority else Priority.DURABLE
        # Equal specs must have equal bytes and digests.
        serialized = spec.SerializeToString(deterministic=True)
        _check_labels(spec)
        task = task_pb2.Task(
            id=new_id(TASK_PREFIX),
            tenant=tenant,
            state=task_pb2.TASK_STATE_PENDING,
            model=model,
            max_attempts=_max_attempts(spec, limits),
            origin_kind=_printable(spec.origin_kind, "origin_kind", MAX_ORIGIN_KIND_CHARS),
            caller=caller[:MAX_CALLER_CHARS],
            user=spec.user,
            metadata=spec.metadata,
        )
        return NewTask(
            task=task,
            band=band,
            spec=serialized,
            digest=sha256(serialized).digest(),
            idempotency_key=idempotency_key,
            created_at=created_at,
            pending_limit_seconds=_pending_limit_seconds(spec, limits),
        )


def limit_to_caller(spec: task_pb2.TaskSpec, caller: Principal) -> None:
    """Limits a task, which runs later without its caller's key, to what the key allows; its model is resolved.

    Lowers the priority class, and removes a keep-alive that the caller may not set. Raises PERMISSION_DENIED for a
    model that it may not use.
    """
    options = spec.options
    if options.allow_remote:
        caller.require(MAY_LEAVE)
    caller.require_name(USE_MODELS, name_asked_for(spec.model))
    asked = Priority.from_wire(options.priority) if options.priority else None
    if asked is not None:
        options.priority = asked.within(caller.max_priority).wire  # type: ignore[assignment]  # same numbers
    if options.HasField("keep_alive") and not may_keep_alive(caller, spec.model):
        options.ClearField("keep_alive")


def _check_labels(spec: task_pb2.TaskSpec) -> None:
    """Checks user and metadata. Raises INVALID_ARGUMENT naming a field above its bound."""
    if len(spec.user) > MAX_USER_CHARS:
        raise invalid_field("user", f"must have at most {MAX_USER_CHARS} characters")
    if len(spec.metadata) > MAX_METADATA:
        raise invalid_field("metadata", f"must have at most {MAX_METADATA} entries")
    for name, value in spec.metadata.items():
        if len(name) > MAX_METADATA_NAME_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise invalid_field(
                "metadata",
                f"names must have at most {MAX_METADATA_NAME_CHARS} characters, values {MAX_METADATA_VALUE_CHARS}",
            )
    if spec.asked_model:
        require_token(spec.asked_model, "asked_model", MAX_NAME_CHARS)


def _check_sizes(spec: task_pb2.TaskSpec, limits: TaskLimits) -> None:
    if len(spec.origin) > limits.max_origin_bytes:
        raise FieldError("origin", f"must have at most {limits.max_origin_bytes} bytes", Reason.REQUEST_TOO_LARGE)
    # Images and recordings are stored in files with separate bounds.
    media_bytes = sum(len(part.data) for _, part in media_parts(payload_of(spec)))
    if spec.ByteSize() - media_bytes > limits.max_spec_bytes:
        raise FieldError("spec", f"must have at most {limits.max_spec_bytes} bytes", Reason.REQUEST_TOO_LARGE)
    _printable(spec.traceparent, "traceparent", MAX_TRACEPARENT_CHARS)


def _check_payload(spec: task_pb2.TaskSpec, limits: TaskLimits) -> Operation:
    payload = payload_of(spec)
    if payload is None:
        raise invalid_field(_PAYLOAD, "must be a chat, a completion, an embedding, an image, a transcription or speech")
    found = operation_of(payload)
    if found.operation not in TASK_OPERATIONS:
        raise invalid_field(_PAYLOAD, "must be of an operation that can be a task")
    found.check(_with_stand_ins(payload), limits.schemas)
    return found.operation


def _with_stand_ins(payload: TaskPayload) -> TaskPayload:
    """Returns the payload with placeholder data for file ids, as a live request would have it; files are read later."""
    if not any(part.file_id for _, part in media_parts(payload)):
        return payload
    copy = type(payload)()
    copy.CopyFrom(payload)  # type: ignore[arg-type]  # of the same type
    for field, part in media_parts(copy):
        if part.file_id:
            require_token(part.file_id, f"{_PAYLOAD}.{field}.file_id", MAX_REQUEST_ID_CHARS)
            if part.data:
                raise invalid_field(f"{_PAYLOAD}.{field}", "must be data or the id of a file, not both")
            part.ClearField("file_id")
            part.data = _STAND_IN
    return copy


def _max_attempts(spec: task_pb2.TaskSpec, limits: TaskLimits) -> int:
    if not 0 <= spec.max_attempts <= MAX_ATTEMPTS:
        raise invalid_field("max_attempts", f"must be 1 to {MAX_ATTEMPTS}, or 0 for as many as the router gives")
    return spec.max_attempts or limits.max_attempts


def _pending_limit_seconds(spec: task_pb2.TaskSpec, limits: TaskLimits) -> float:
    if not spec.HasField("pending_limit"):
        return limits.pending_limit_seconds
    # Duration.ToSeconds raises for out-of-range values; this computation only makes them too large.
    seconds = spec.pending_limit.seconds + spec.pending_limit.nanos / _NANOSECONDS
    if not MIN_PENDING_LIMIT_SECONDS <= seconds <= MAX_PENDING_LIMIT_SECONDS:
        raise invalid_field(
            "pending_limit", f"must be {MIN_PENDING_LIMIT_SECONDS:g} to {MAX_PENDING_LIMIT_SECONDS:g} seconds"
        )
    return seconds


def _printable(text: str, field: str, max_chars: int) -> str:
    """Returns the text if it is short and printable: PostgreSQL cannot store NUL, and logs must have no line breaks."""
    if len(text) > max_chars or (text and not text.isprintable()):
        raise invalid_field(field, f"must have at most {max_chars} printable characters")
    return text


@contextmanager
def _within(field: str) -> Iterator[None]:
    """Prefixes field names with the caller's name for the spec."""
    try:
        yield
    except FieldError as error:
        inner = error.field
        path = field if inner == "spec" else f"{field}.{inner}"
        raise FieldError(path, error.message.removeprefix(f"{inner}: "), error.reason) from error
