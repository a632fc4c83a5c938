"""What the OpenAPI document says of endpoints and of errors.

`gateway.intake` parses the bodies, so that FastAPI, which builds the document, does not know their schemas.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from weft.documents.json_schema import DocumentSchema, SchemaSet

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
        "description": "The answer; with `stream`, its events",
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
"""The answer of an endpoint that streams."""


Schema = type[BaseModel] | DocumentSchema
"""The schema of a body."""


@dataclass(frozen=True, slots=True)
class OperationDoc:
    """The documentation of one endpoint besides its path, and the schemas that it refers to."""

    extra: dict[str, Any] = field(default_factory=dict)
    """The `openapi_extra` of the endpoint's route."""
    models: tuple["Schema", ...] = ()

    def __or__(self, other: "OperationDoc") -> "OperationDoc":
        return OperationDoc(self.extra | other.extra, self.models + other.models)


def json_body(model: type[BaseModel], *, error: str = "Error", stream: str = EVENT_STREAM) -> OperationDoc:
    """Returns the doc of an endpoint that takes `model` as JSON.

    `error` is the schema of its failures, `stream` the media type of its streams, if it has any.
    """
    responses: dict[str, Any] = {"default": _failure(error)}
    if "stream" in model.model_fields:
        responses["200"] = _streamed(stream)
    body = {"required": True, "content": _json(model.__name__)}
    return OperationDoc({"requestBody": body, "responses": responses}, (model,))


def form_body(
    model: type[BaseModel] | None,
    *,
    files: tuple[str, ...],
    choices: Mapping[str, Sequence[str]] | None = None,
    or_json: type[BaseModel] | None = None,
) -> OperationDoc:
    """Returns the doc of an endpoint that takes a form with these files, and the fields of `model` beside them.

    `choices`: further required fields, with the values that each may have. `or_json`: the schema of the same request as
    JSON, where it is taken too.
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
    """Returns the doc of an endpoint that takes `model` as JSON, or its documents as YAML."""
    content = _json(_name(model)) | {"application/yaml": {"schema": {"type": "string"}}}
    return OperationDoc({"requestBody": {"required": True, "content": content}}, (model,))


def answers(
    model: Schema | None,
    *,
    path: str = "",
    query: tuple[str, ...] = (),
    status: int = 200,
    also: int = 0,
    events: bool = False,
    or_nothing: str = "",
) -> OperationDoc:
    """Returns the doc of an endpoint that answers `model` with `status`; None for no body.

    `also` is another status with the same body, if there is one, `path` the name of its path parameter, if it has one,
    `query` those of its query parameters. `events`: it may answer server-sent events instead. `or_nothing` describes
    its answer without a body (204), if it has one besides.
    """
    success = {"description": "Success", "content": _json(_name(model))} if model is not None else None
    answer: dict[str, Any] = {"204": {"description": "Done"}} if success is None else {str(status): success}
    if also and success is not None:
        answer[str(also)] = success
    if events and success is not None:
        answer[str(status)] = success | {"content": _json("" if model is None else _name(model)) | EVENTS["content"]}
    if or_nothing:
        answer["204"] = {"description": or_nothing}
    return _with_parameters({**answer, "default": _failure()}, path, query, () if model is None else (model,))


def fails_as(error: str) -> OperationDoc:
    """Returns the doc of an endpoint without a body whose failures have another schema than `Error`."""
    return OperationDoc({"responses": {"default": _failure(error)}})


def answers_events(*, path: str = "", query: tuple[str, ...] = ()) -> OperationDoc:
    """Returns the doc of an endpoint that answers with server-sent events."""
    return _with_parameters({"200": EVENTS, "default": _failure()}, path, query)


def binary_content(description: str, *media_types: str, path: str = "", query: tuple[str, ...] = ()) -> OperationDoc:
    """Returns the doc of an endpoint that answers bytes of one of the media types; `path` is its path parameter."""
    binary = {"schema": {"type": "string", "format": "binary"}}
    content: dict[str, Any] = {kind: {} if kind == EVENT_STREAM else binary for kind in media_types}
    success = {"description": description, "content": content}
    return _with_parameters({"200": success, "default": _failure()}, path, query)


def _with_parameters(
    responses: dict[str, Any], path: str, query: tuple[str, ...] = (), models: tuple[Schema, ...] = ()
) -> OperationDoc:
    parameters = [_parameter(name, "query") for name in query]
    if path:
        parameters.insert(0, _parameter(path, "path"))
    return OperationDoc({"responses": responses} | ({"parameters": parameters} if parameters else {}), models)


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _failure(schema: str = "Error") -> dict[str, Any]:
    return {"description": "Any failure", "content": _json(schema)}


def _name(schema: Schema) -> str:
    return schema.name if isinstance(schema, DocumentSchema) else schema.__name__


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF_TEMPLATE.format(model=schema)}}}


def add_schemas(document: dict[str, Any], models: Sequence[Schema]) -> None:
    """Add to a document the schemas of `models` and of errors, and to each operation the answer of any failure."""
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


def shown_path(path: str) -> str:
    """Returns the path of an endpoint for people: parameters without their types."""
    return _PARAMETER_TYPE.sub("}", path)
