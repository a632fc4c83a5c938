"""The OpenAPI document. `gateway.intake.json_guard` parses the bodies, so the framework does not know their schemas."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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


_STREAMED: dict[str, Any] = {
    "description": "The answer, or with `stream` its events",
    "content": {
        "application/json": {"schema": {"type": "object"}},
        # No schema: it would be taken for that of each event.
        "text/event-stream": {},
    },
}


EVENTS: dict[str, Any] = {
    "description": "Server-sent events",
    "content": {"text/event-stream": {}},
}
"""The answer of a route that streams."""


def json_body(model: type[BaseModel], *, error: str = "Error") -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model` as JSON; `error` is the schema of its failures."""
    responses: dict[str, Any] = {"default": _failure(error)}
    if "stream" in model.model_fields:
        responses["200"] = _STREAMED
    return {"requestBody": {"required": True, "content": _json(model.__name__)}, "responses": responses}


def form_body(model: type[BaseModel] | None, *, files: tuple[str, ...]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes a form with these files, and the fields of `model` beside them."""
    of_files: dict[str, Any] = {
        "type": "object",
        "required": list(files),
        "properties": {name: {"type": "string", "format": "binary"} for name in files},
    }
    schema = of_files
    if model is not None:
        schema = {"allOf": [{"$ref": _REF_TEMPLATE.format(model=model.__name__)}, of_files]}
    content = {"multipart/form-data": {"schema": schema}}
    return {"requestBody": {"required": True, "content": content}, "responses": {"default": _failure()}}


def json_or_yaml_body(model: type[BaseModel]) -> dict[str, Any]:
    """The part of `openapi_extra` for a route that takes `model` as JSON, or its documents as YAML."""
    content = _json(model.__name__) | {"application/yaml": {"schema": {"type": "string"}}}
    return {"requestBody": {"required": True, "content": content}}


def answers(
    model: type[BaseModel] | None, *, path: str = "", query: tuple[str, ...] = (), status: int = 200, also: int = 0
) -> dict[str, Any]:
    """The part of `openapi_extra` for a route that answers `model` with `status`; None for no body.

    `also` is another status with the same body, if there is one, `path` the name of its path parameter, if it has one,
    `query` those of its query parameters.
    """
    success = {"description": "Success", "content": _json(model.__name__)} if model is not None else None
    answer: dict[str, Any] = {"204": {"description": "Done"}} if success is None else {str(status): success}
    if also and success is not None:
        answer[str(also)] = success
    parameters = [_parameter(name, "query") for name in query]
    if path:
        parameters.insert(0, _parameter(path, "path"))
    return {"responses": {**answer, "default": _failure()}} | ({"parameters": parameters} if parameters else {})


def file_content(*, path: str) -> dict[str, Any]:
    """The part of `openapi_extra` for a route that answers the bytes of a file, which `path` names."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    success = {"description": "What is in the file", "content": content}
    return {"responses": {"200": success, "default": _failure()}, "parameters": [_parameter(path, "path")]}


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}


def _failure(schema: str = "Error") -> dict[str, Any]:
    return {"description": "Any failure", "content": _json(schema)}


def _json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF_TEMPLATE.format(model=schema)}}}


def publish_schemas(app: FastAPI, published: Sequence[type[BaseModel]]) -> None:
    """Build the document and add the schemas that `json_body` refers to."""
    _, definitions = models_json_schema([(model, "validation") for model in published], ref_template=_REF_TEMPLATE)
    schemas = app.openapi().setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    schemas["Error"] = _ERROR_SCHEMA
    for operations in app.openapi()["paths"].values():
        for operation in operations.values():
            operation["responses"].setdefault("default", _failure())
    schemas["AnthropicError"] = _ANTHROPIC_ERROR_SCHEMA
