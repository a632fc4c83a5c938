"""JSON schemas as clients and their libraries write them, in every draft: all must pass."""

from typing import Any

_STRING: dict[str, Any] = {"type": "string"}
_JSON_SCHEMA = "https://json-schema.org/draft"

CLIENT_SCHEMAS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no arguments": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
    "zod 3 by zod-to-json-schema": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1},
            "twin": {"$ref": "#/properties/name"},
            "age": {"type": "integer", "exclusiveMinimum": 0},
            "mail": {"anyOf": [{"anyOf": [{"not": {}}, {"type": "string", "format": "email"}]}, {"type": "null"}]},
            "pair": {"type": "array", "minItems": 2, "maxItems": 2, "items": [_STRING, {"type": "number"}]},
            "rest": {"type": "array", "items": [_STRING], "additionalItems": {"type": "number"}},
            "kind": {"type": "string", "enum": ["a", "b"], "default": "a"},
            "meta": {"type": "object", "additionalProperties": {}, "propertyNames": {"minLength": 2}},
        },
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
    "zod 3 for OpenAPI": {
        "type": "object",
        "properties": {
            "age": {"type": "number", "exclusiveMinimum": True, "minimum": 0, "nullable": True},
            "when": {"type": "string", "format": "date-time", "nullable": True, "example": "2026-01-01"},
        },
    },
    "zod 4 by toJSONSchema": {
        "$schema": f"{_JSON_SCHEMA}/2020-12/schema",
        "type": "object",
        "properties": {
            "mail": {
                "type": "string",
                "format": "email",
                "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+\\-\\.]*)[A-Za-z0-9_+-]@"
                "([A-Za-z0-9][A-Za-z0-9\\-]*\\.)+[A-Za-z]{2,}$",
            },
            "count": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "tuple": {"type": "array", "prefixItems": [_STRING, {"type": "number"}], "items": {"type": "boolean"}},
            "tree": {"$ref": "#/$defs/__schema0"},
        },
        "$defs": {
            "__schema0": {
                "type": "object",
                "properties": {"children": {"type": "array", "items": {"$ref": "#/$defs/__schema0"}}},
            }
        },
        "required": ["mail"],
        "additionalProperties": False,
    },
    "pydantic 1": {
        "title": "Order",
        "type": "object",
        "properties": {"lines": {"title": "Lines", "type": "array", "items": {"$ref": "#/definitions/Line"}}},
        "required": ["lines"],
        "definitions": {"Line": {"title": "Line", "type": "object", "properties": {"n": {"exclusiveMinimum": 0}}}},
    },
    "pydantic 2 of generics": {
        "$defs": {"Page[int, str]": {"type": "object"}},
        "properties": {"p": {"$ref": "#/$defs/Page%5Bint%2C%20str%5D"}},
    },
    "a union with a discriminator": {
        "$defs": {"Cat": {"type": "object"}, "Dog": {"type": "object"}},
        "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    },
    "TypeScript's generics": {
        "$ref": "#/definitions/Record%3Cstring%2Cnumber%3E",
        "definitions": {"Record<string,number>": {"type": "object", "additionalProperties": {"type": "number"}}},
    },
    "draft 04": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": "http://example.com/product",
        "type": "object",
        "properties": {"price": {"type": "number", "minimum": 0, "exclusiveMinimum": True}},
        "dependencies": {"price": ["name"], "name": {"properties": {"b": {"$ref": "#/definitions/b"}}}},
        "definitions": {"b": {"id": "#b", "type": "boolean"}, "c": {"$ref": "#b"}},
        "required": ["price"],
    },
    "draft 06": {
        "$schema": "http://json-schema.org/draft-06/schema#",
        "$id": "http://example.com/root.json",
        "properties": {"a": {"$id": "#foo", "const": 1}, "b": {"$ref": "#foo"}, "c": True},
        "examples": [{"a": 1}],
    },
    "draft 07": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "if": {"properties": {"country": {"const": "US"}}},
        "then": {"properties": {"code": {"pattern": "[0-9]{5}(-[0-9]{4})?"}}},
        "else": {"properties": {"code": {"contentEncoding": "base64", "contentMediaType": "image/png"}}},
        "$comment": "readOnly and writeOnly",
        "properties": {"a": {"readOnly": True}},
    },
    "draft 2019-09": {
        "$schema": f"{_JSON_SCHEMA}/2019-09/schema",
        "$id": "https://example.com/tree",
        "$recursiveAnchor": True,
        "type": "object",
        "properties": {
            "data": True,
            "children": {"type": "array", "items": {"$recursiveRef": "#"}, "minContains": 0, "contains": _STRING},
        },
        "dependentRequired": {"data": ["children"]},
        "dependentSchemas": {"data": {"required": ["children"]}},
        "unevaluatedProperties": False,
    },
    "draft 2020-12": {
        "$schema": f"{_JSON_SCHEMA}/2020-12/schema",
        "$id": "https://example.com/strict-tree",
        "$dynamicAnchor": "node",
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "$id": "tree",
                "$dynamicAnchor": "node",
                "type": "object",
                "properties": {
                    "children": {"type": "array", "items": {"$dynamicRef": "#node"}},
                    "leaf": {"$ref": "#/$defs/leaf"},
                },
                "$defs": {"leaf": {"$anchor": "leaf", "type": ["string", "null"]}},
            }
        },
    },
    "definitions in a place of one's own": {
        "properties": {"a": {"$ref": "#/components/schemas/A"}},
        "components": {"schemas": {"A": {"type": "object", "properties": {"b": {"$ref": "#/components/schemas/B"}},
                                         "nullable": True}, "B": {"type": "string"}}},
    },
    "a pointer with tilde and slash": {"$ref": "#/$defs/a~1b~0c", "$defs": {"a/b~c": _STRING}},
    "Claude Code, Edit": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "file_path": {"type": "string", "description": "The absolute path to the file to modify"},
            "old_string": {"type": "string", "description": "The text to replace"},
            "new_string": {"type": "string", "description": "The text to replace it with"},
            "replace_all": {"type": "boolean", "default": False, "description": "Replace all occurences"},
        },
        "required": ["file_path", "old_string", "new_string"],
        "additionalProperties": False,
    },
    "Claude Code, WebFetch": {
        "$schema": f"{_JSON_SCHEMA}/2020-12/schema",
        "type": "object",
        "properties": {"url": {"type": "string", "format": "uri"}, "prompt": _STRING},
        "required": ["url", "prompt"],
        "additionalProperties": False,
    },
    "Claude Code, TodoWrite": {
        "type": "object",
        "properties": {
            "todos": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "content": {"type": "string", "minLength": 1},
                        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    },
                    "required": ["content", "status"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["todos"],
    },
    "Codex, shell": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
    "an MCP server of Python": {
        "type": "object",
        "title": "searchArguments",
        "properties": {"q": {"title": "Q", "anyOf": [_STRING, {"type": "null"}], "default": None}},
    },
    "strict, by OpenAI's SDK": {
        "type": "object",
        "properties": {
            "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}},
            "answer": {"anyOf": [_STRING, {"type": "null"}]},
        },
        "$defs": {
            "Step": {
                "type": "object",
                "properties": {"why": _STRING},
                "required": ["why"],
                "additionalProperties": False,
            }
        },
        "required": ["steps", "answer"],
        "additionalProperties": False,
    },
    "names of keywords as properties": {
        "type": "object",
        "properties": {
            "required": {"type": "boolean"}, "$ref": _STRING, "enum": _STRING, "type": _STRING, "pattern": _STRING,
            "properties": {"type": "object"}, "items": {"type": "array", "items": _STRING},
        },
        "required": ["required", "$ref"],
    },
    "the same name twice": {"required": ["a", "a"], "type": ["string", "string"]},
}  # fmt: skip
