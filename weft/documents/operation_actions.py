"""Operation actions as callers write them: loads with their settings, unloads, flushes."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, PlainValidator, WithJsonSchema

from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import load_pb2, model_store_pb2, runner_service_pb2
from weft.documents.computed import (
    CONTEXT_TOKENS,
    MAX_CONTEXT_TOKENS,
    MAX_LOAD_PARAMETERS,
    MAX_MEMORY_MB,
    MAX_PARAMETER_CHARS,
    MAX_QUANTIZATION_CHARS,
    MAX_WORD_CHARS,
    MIN_CONTEXT_TOKENS,
)
from weft.documents.document_base import DocumentPart
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.models.load_parameters import LoadValue, value_message
from weft.kernel.values.units import keep_alive_seconds

MAX_TAG_CHARS = 64


def _load_value(value: object) -> object:
    """Reports a single error that names the field; a union would report one per member type."""
    if isinstance(value, str) and 0 < len(value) <= MAX_WORD_CHARS:
        return value
    if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise ValueError(f"must be a number, true, false, or a word of at most {MAX_WORD_CHARS} characters")


def _keep_alive(value: object) -> object:
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return value
    raise ValueError('must be seconds, or a length such as "5m"')


CheckedLoadValue = Annotated[
    LoadValue,
    PlainValidator(_load_value),
    WithJsonSchema({"type": ["boolean", "number", "string"], "maxLength": MAX_WORD_CHARS}),
]
KeepAlive = Annotated[
    int | float | str, PlainValidator(_keep_alive), WithJsonSchema({"type": ["number", "string"], "maxLength": 32})
]
FlushScope = Literal["all", "model", "tenant", "tag"]
Form = Literal["gguf", "folder"]
_FORMS: Mapping[Form, model_store_pb2.StoredForm.ValueType] = MappingProxyType(
    {"gguf": model_store_pb2.STORED_FORM_GGUF, "folder": model_store_pb2.STORED_FORM_FOLDER}
)


class LoadSettings(DocumentPart):
    """Options of one load of a model; absent ones are as configured."""

    context_tokens: Annotated[int, Field(ge=MIN_CONTEXT_TOKENS, le=MAX_CONTEXT_TOKENS)] | None = None
    """Context of one slot."""
    quantization: Annotated[str, Field(min_length=1, max_length=MAX_QUANTIZATION_CHARS)] | None = None
    """One of the model's declared variants, such as q8_0."""
    memory_budget_mb: Annotated[int, Field(ge=1, le=MAX_MEMORY_MB)] | None = None
    """Maximum accelerator memory, in MiB."""
    keep_alive: KeepAlive | None = None
    """How long it stays loaded after a request: seconds, a duration such as "5m", 0, or -1 for no limit (the
    default)."""
    pin: bool = False
    """Whether it is never evicted for another model."""
    parameters: dict[Annotated[str, Field(max_length=MAX_PARAMETER_CHARS)], CheckedLoadValue] = Field(
        default={}, max_length=MAX_LOAD_PARAMETERS
    )
    """Further engine settings by name; `GET /v1/admin/models` lists them with their ranges."""


MEBIBYTE = 1024 * 1024
_MAX_INTEGER = 2**63 - 1


def load_options(settings: LoadSettings) -> load_pb2.LoadOptions:
    """Converts settings to a message. Raises INVALID_ARGUMENT naming the setting."""
    options = load_pb2.LoadOptions(quantization=settings.quantization or "", pin=settings.pin)
    options.memory_budget_bytes = (settings.memory_budget_mb or 0) * MEBIBYTE
    if settings.keep_alive is not None:
        seconds = keep_alive_seconds(settings.keep_alive, "keepAlive")
        options.keep_alive.FromNanoseconds(int(seconds * 1e9))
    for name, value in settings.parameters.items():
        options.parameters[name].CopyFrom(_value_message(value, f"parameters.{name}"))
    if settings.context_tokens is not None:
        if CONTEXT_TOKENS in settings.parameters:
            raise invalid_field(f"parameters.{CONTEXT_TOKENS}", "is given as contextTokens as well")
        options.parameters[CONTEXT_TOKENS].integer = settings.context_tokens
    return options


def load_action(
    model: str,
    settings: LoadSettings,
    *,
    evict_model: str = "",
    replicas: int = 0,
    source: str = "",
    runner: str = "",
) -> operation_pb2.OperationAction:
    """Returns the action that loads a model. With a `source`, `runner` serves it under the name `model`."""
    return operation_pb2.OperationAction(
        load_model=operation_pb2.LoadModel(
            model=model,
            options=load_options(settings),
            evict_model=evict_model,
            replicas=replicas,
            source=source,
            runner=runner,
        )
    )


def pull_action(source: str, *, runner: str = "", form: Form | None = None) -> operation_pb2.OperationAction:
    """Returns the action that pulls a model's files into the runner's model store."""
    number = model_store_pb2.STORED_FORM_UNSPECIFIED if form is None else _FORMS[form]
    return operation_pb2.OperationAction(pull_model=operation_pb2.PullModel(source=source, runner=runner, form=number))


def remove_action(model: str) -> operation_pb2.OperationAction:
    """Returns the action that removes a model which was loaded by its source."""
    return operation_pb2.OperationAction(remove_model=operation_pb2.RemoveModel(model=model))


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
        flush_cache=operation_pb2.FlushCache(
            scope=runner_service_pb2.FlushCacheRequest.Scope.Value(f"SCOPE_{scope.upper()}"),
            model=model,
            tenant=tenant,
            tag=tag,
            runner=runner,
        )
    )


def _value_message(value: LoadValue, field: str) -> load_pb2.LoadValue:
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        raise invalid_field(field, "is too large a number")
    return value_message(value)
