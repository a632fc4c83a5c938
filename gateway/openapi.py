"""The OpenAPI document. Bodies are parsed by `gateway.json_guard`, so the framework has to be told what they are."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from gateway.schemas import ChatRequest, CompletionRequest, EmbeddingRequest

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
        }
    },
}


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that takes `model` as JSON."""
    schema = {"$ref": _REF_TEMPLATE.format(model=model.__name__)}
    failure = {
        "description": "Any failure",
        "content": {"application/json": {"schema": {"$ref": _REF_TEMPLATE.format(model="Error")}}},
    }
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {"default": failure},
    }


def publish_schemas(app: FastAPI) -> None:
    """Build the document and add the schemas that `json_body` refers to."""
    requests: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest, EmbeddingRequest)
    _, definitions = models_json_schema([(model, "validation") for model in requests], ref_template=_REF_TEMPLATE)
    schemas = app.openapi().setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions["$defs"])
    schemas["Error"] = _ERROR_SCHEMA
