"""Actions of operations as tokens name them. Compared as messages, never as bytes: maps have no order."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2, runner_service_pb2
from weft.kernel.names import MAX_NAME_CHARS, is_token
from weft.signing.strict_json import MalformedToken

LOAD, UNLOAD, FLUSH = "model-load", "model-unload", "cache-flush"
CONTEXT_PARAMETER = "context_tokens"
BYTES_PER_MB = 1024 * 1024

_WORDS: Mapping[str, str] = {"load_model": LOAD, "unload_model": UNLOAD, "flush_cache": FLUSH}
_SCOPES: Mapping[int, str] = {
    runner_service_pb2.FlushCacheRequest.SCOPE_ALL: "all",
    runner_service_pb2.FlushCacheRequest.SCOPE_MODEL: "model",
    runner_service_pb2.FlushCacheRequest.SCOPE_TENANT: "tenant",
    runner_service_pb2.FlushCacheRequest.SCOPE_TAG: "tag",
}


def operation_word(action: operation_pb2.OperationAction) -> str:
    """Return the kind of an action: LOAD, UNLOAD or FLUSH. Raises MalformedToken when it is none."""
    kind = action.WhichOneof("kind")
    if kind is None:
        raise MalformedToken("has an action that does nothing")
    return _WORDS[kind]


def read_action(data: bytes) -> operation_pb2.OperationAction:
    """The action that `data` serializes.

    Raises MalformedToken, also when there is something in it that this version does not know: it might be a condition.
    """
    try:
        action = operation_pb2.OperationAction.FromString(data)
    except DecodeError as error:
        raise MalformedToken("has an action that cannot be read") from error
    known = operation_pb2.OperationAction()
    known.CopyFrom(action)
    known.DiscardUnknownFields()
    if known.ByteSize() != action.ByteSize():
        raise MalformedToken("has an action with a part that this version does not know")
    operation_word(action)
    return action


def same_action(one: operation_pb2.OperationAction, other: operation_pb2.OperationAction) -> bool:
    """Whether both do the same: empty options equal none."""
    return _normal(one) == _normal(other)


def token_fields(action: operation_pb2.OperationAction) -> dict[str, Any]:
    """Return the fields with which an opToken allows exactly this action: JSON types, only what is set."""
    word = operation_word(action)
    if word == LOAD:
        fields = _load_fields(action.load_model)
    elif word == UNLOAD:
        fields = {"modelId": action.unload_model.model}
    else:
        fields = _flush_fields(action.flush_cache)
    return {"operation": word, **{name: value for name, value in fields.items() if value not in (None, "", {})}}


def _load_fields(load: operation_pb2.LoadModel) -> dict[str, Any]:
    options = load.options
    parameters = {name: _plain(value) for name, value in options.parameters.items()}
    context = parameters.get(CONTEXT_PARAMETER)
    if type(context) is int:
        del parameters[CONTEXT_PARAMETER]
    else:
        context = None
    return {
        "modelId": load.model,
        "quantization": options.quantization,
        "maxContextLength": context,
        "gpuMemoryBudgetMB": _whole_if_whole(options.memory_budget_bytes, BYTES_PER_MB) or None,
        "evictModel": load.evict_model,
        "parameters": parameters,
        "keepAlive": _seconds(options) if options.HasField("keep_alive") else None,
        "pin": options.pin or None,
        "replicas": load.replicas or None,
    }


def _flush_fields(flush: operation_pb2.FlushCache) -> dict[str, Any]:
    return {
        "modelId": flush.model,
        "scope": _SCOPES.get(flush.scope),
        "tenantId": flush.tenant,
        "tag": flush.tag,
        "runner": flush.runner,
    }


def _plain(value: load_pb2.LoadValue) -> int | float | str | bool | None:
    kind = value.WhichOneof("kind")
    return None if kind is None else getattr(value, kind)


def _seconds(options: load_pb2.LoadOptions) -> int | float:
    return _whole_if_whole(options.keep_alive.seconds * 10**9 + options.keep_alive.nanos, 10**9)


def _whole_if_whole(value: int, unit: int) -> int | float:
    return value / unit if value % unit else value // unit


def _normal(action: operation_pb2.OperationAction) -> operation_pb2.OperationAction:
    normal = operation_pb2.OperationAction()
    normal.CopyFrom(action)
    if normal.HasField("load_model") and not normal.load_model.options.ByteSize():
        normal.load_model.ClearField("options")
    return normal


_VERBS = {"model-load": "load", "model-unload": "unload", "cache-flush": "flush the cache of"}
_EVERYTHING = "every model"


def in_words(action: operation_pb2.OperationAction) -> list[str]:
    """Return a headline such as "load qwen", then a line `name: value` for each further field that is set.

    Raises MalformedToken for an action that does nothing.
    """
    verb = _VERBS[operation_word(action)]
    work = getattr(action, str(action.WhichOneof("kind")))
    return [f"{verb} {_quoted(work.model) if work.model else _EVERYTHING}", *_lines(work, ("model",))]


def _lines(message: Message, left_out: tuple[str, ...] = ()) -> Iterator[str]:
    for field, value in message.ListFields():
        if field.name not in left_out:
            yield from _told(field, value)


def _told(field: FieldDescriptor, value: Any) -> Iterator[str]:
    if field.message_type is None:
        yield f"{field.name}: {_word(field, value)}"
    elif field.message_type.GetOptions().map_entry:
        for name in sorted(value):
            yield f"{name}: {_value(value[name])}"
    elif isinstance(value, Duration):
        yield f"{field.name}: {value.ToJsonString()}"
    else:
        yield from _lines(value)


def _value(value: Message) -> str:
    return ", ".join(_word(field, inner) for field, inner in value.ListFields()) or "nothing"


def _word(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        found = field.enum_type.values_by_number.get(value)
        return str(value) if found is None else found.name.rpartition("_")[2].lower()
    if isinstance(value, bool):
        return "yes" if value else "no"
    return _quoted(value) if isinstance(value, str) else str(value)


def _quoted(text: str) -> str:
    """Plain names as they are; anything that could be read as something else in quotes."""
    return text if is_token(text, MAX_NAME_CHARS) else json.dumps(text)
