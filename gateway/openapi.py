"""Documentation of endpoints and errors in the OpenAPI document.

`gateway.intake` parses the bodies, so FastAPI, which builds the document, does not know their schemas.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from weft.documents.json_schema import DocumentSchema, SchemaSet, record_schema

_REF_TEMPLATE = "#/components/schemas/{model}"
_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        },
        "request_id": {"type": "string"},
    },
}


_ANTHROPIC_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "code"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}, "code": {"type": "string"}},
        },
        "request_id": {"type": "string"},
    },
}


_OLLAMA_ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error", "code"],
    "properties": {
        "error": {"type": "string"},
        "code": {"type": "string"},
        "param": {"type": "string"},
        "request_id": {"type": "string"},
    },
}


EVENT_STREAM = "text/event-stream"
JSON_LINES = "application/x-ndjson"


def _streamed(media_type: str) -> dict[str, Any]:
    return {
        "description": "The answer, or its events with `stream`",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            # No schema: clients would apply it to each event.
            media_type: {},
        },
    }


EVENTS: dict[str, Any] = {
    "description": "Server-sent events",
    "content": {EVENT_STREAM: {}},
}
"""The response of a streaming endpoint."""


Schema = type[BaseModel] | DocumentSchema
"""The schema of a body."""
AnySchema = Schema | type[Message]
"""A schema, or the message that a document shows."""


@dataclass(frozen=True, slots=True)
class OperationDoc:
    """Documentation of an endpoint besides its path, and the schemas that it references."""

    extra: dict[str, Any] = field(default_factory=dict)
    """The `openapi_extra` of the endpoint's route."""
    models: tuple["Schema", ...] = ()
    status: int | None = None
    """The status of a success; None: 200."""

    def __or__(self, other: "OperationDoc") -> "OperationDoc":
        return OperationDoc(self.extra | other.extra, self.models + other.models, other.status or self.status)


def json_body(model: type[BaseModel], *, error: str = "Error", stream: str = EVENT_STREAM) -> OperationDoc:
    """Returns the doc of an endpoint that accepts `model` as JSON.

    `error`: the schema of its failures; `stream`: the media type of its streams, if it has any.
    """
    responses: dict[str, Any] = {"default": _failure(error)}
    if "stream" in model.model_fields:
        responses["200"] = _streamed(stream)
    body = {"required": True, "content": _json(model.__name__)}
    return OperationDoc({"requestBody": body, "responses": responses}, (model,))


def bytes_body(media_type: str) -> OperationDoc:
    """Returns the doc of an endpoint that accepts a file as its body."""
    content = {media_type: {"schema": {"type": "string", "format": "binary"}}}
    return OperationDoc({"requestBody": {"required": True, "content": content}})


def form_body(
    model: type[BaseModel] | None,
    *,
    files: tuple[str, ...],
    choices: Mapping[str, Sequence[str]] | None = None,
    or_json: type[BaseModel] | None = None,
) -> OperationDoc:
    """Returns the doc of an endpoint that accepts a form with these files and the fields of `model`.

    `choices`: further required fields, with their possible values. `or_json`: the schema of the same request as JSON.
    """
    choices = choices or {}
    own: dict[str, Any] = {
        "type": "object",
        "required": [*files, *choices],
        "properties": {
            **{name: {"type": "string", "format": "binary"} for name in files},
            **{name: {"type": "string", "enum": list(values)} for name, values in choices.items()},
        },
    }
    schema = own
    if model is not None:
        schema = {"allOf": [{"$ref": _REF_TEMPLATE.format(model=model.__name__)}, own]}
    content = {"multipart/form-data": {"schema": schema}} | ({} if or_json is None else _json(or_json.__name__))
    responses: dict[str, Any] = {"default": _failure()}
    if model is not None and "stream" in model.model_fields:
        responses["200"] = _streamed(EVENT_STREAM)
    extra = {"requestBody": {"required": True, "content": content}, "responses": responses}
    return OperationDoc(extra, tuple(each for each in (model, or_json) if each is not None))


def json_or_yaml_body(model: Schema) -> OperationDoc:
    """Returns the doc of an endpoint that accepts `model` as JSON, or its documents as YAML."""
    content = _json(_name(model)) | {"application/yaml": {"schema": {"type": "string"}}}
    return OperationDoc({"requestBody": {"required": True, "content": content}}, (model,))


def answers(
    shown: AnySchema | None,
    *,
    query: tuple[str, ...] = (),
    status: int | None = None,
    also: int = 0,
    events: bool = False,
    or_nothing: str = "",
) -> OperationDoc:
    """Returns the doc of an endpoint that answers `shown` with `status`; None: 204 without a body.

    `also`: another status with the same body; `query`: the names of its query parameters. `events`: it may answer
    server-sent events instead. `or_nothing`: the description of an additional answer without a body (204).
    """
    if shown is None:
        return _with_query({"204": {"description": "Done"}, "default": _failure()}, query, (), 204)
    model = record_schema(shown) if isinstance(shown, type) and issubclass(shown, Message) else shown
    content = _json(_name(model)) | (EVENTS["content"] if events else {})
    success = {"description": "Success", "content": content}
    answer: dict[str, Any] = {str(status or 200): success}
    if also:
        answer[str(also)] = success
    if or_nothing:
        answer["204"] = {"description": or_nothing}
    return _with_query({**answer, "default": _failure()}, query, (model,), status)


def fails_as(error: str) -> OperationDoc:
    """Returns the doc of an endpoint without a body that fails with another schema than `Error`."""
    return OperationDoc({"responses": {"default": _failure(error)}})


def answers_events(*, query: tuple[str, ...] = ()) -> OperationDoc:
    """Returns the doc of an endpoint that answers with server-sent events."""
    return _with_query({"200": EVENTS, "default": _failure()}, query)


def binary_content(description: str, *media_types: str, query: tuple[str, ...] = ()) -> OperationDoc:
    """Returns the doc of an endpoint that answers bytes of one of the media types."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {kind: {} if kind == EVENT_STREAM else binary for kind in media_types}
    success = {"description": description, "content": content}
    return _with_query({"200": success, "default": _failure()}, query)


def _with_query(
    responses: dict[str, Any], query: tuple[str, ...], models: tuple[Schema, ...] = (), status: int | None = None
) -> OperationDoc:
    parameters = {"parameters": [_parameter(name, "query") for name in query]} if query else {}
    return OperationDoc({"responses": responses} | parameters, models, status)


def with_path(extra: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route with the parameters in its path."""
    in_path = [_parameter(name, "path") for name in _PATH_PARAMETER.findall(path)]
    return extra | {"parameters": in_path + extra.get("parameters", [])} if in_path else extra


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _failure(schema: str = "Error") -> dict[str, Any]:
    return {"description": "Any failure", "content": _json(schema)}


def _name(schema: Schema) -> str:
    return schema.name if isinstance(schema, DocumentSchema) else schema.__name__


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF_TEMPLATE.format(model=schema)}}}


def add_schemas(document: dict[str, Any], models: Sequence[Schema]) -> None:
    """Adds the schemas of `models` and of errors to a document, and the answer of any failure to each operation."""
    of_messages = SchemaSet(_REF_TEMPLATE)
    for model in models:
        if isinstance(model, DocumentSchema):
            model.add(of_messages)
    of_pydantic = [model for model in models if not isinstance(model, DocumentSchema)]
    _, definitions = models_json_schema([(model, "validation") for model in of_pydantic], ref_template=_REF_TEMPLATE)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    schemas.update(of_messages.definitions)
    schemas["Error"] = _ERROR_SCHEMA
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].setdefault("default", _failure())
    schemas["AnthropicError"] = _ANTHROPIC_ERROR_SCHEMA
    schemas["OllamaError"] = _OLLAMA_ERROR_SCHEMA


_PARAMETER_TYPE = re.compile(r":[a-z]+\}")
_PATH_PARAMETER = re.compile(r"\{(\w+)")


def shown_path(path: str) -> str:
    """Returns the path of an endpoint for people: parameters without their types."""
    return _PARAMETER_TYPE.sub("}", path)
