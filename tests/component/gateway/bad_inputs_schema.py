"""JSON schemas and names of tools that must not reach an engine, in every place of a request."""

from typing import Any

from bad_inputs_stage import Case, Endpoint, Send, later, of_kind, request, with_fields

_WITH_TOOLS = of_kind("chat", "messages", "responses")
_WITH_A_FORM = of_kind("chat", "messages", "responses")


def _tool(kind: str, schema: Any, name: str = "f") -> dict[str, Any]:
    if kind == "messages":
        return {"tools": [{"name": name, "input_schema": schema}]}
    if kind == "responses":
        return {"tools": [{"type": "function", "name": name, "parameters": schema}]}
    return {"tools": [{"type": "function", "function": {"name": name, "parameters": schema}}]}


def _form(kind: str, schema: Any) -> dict[str, Any]:
    if kind == "messages":
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if kind == "responses":
        return {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}


def _as_tool(schema: Any, name: str = "f") -> Send:
    return lambda endpoint: with_fields(_tool(endpoint.kind, schema, name))(endpoint)


def _as_form(schema: Any) -> Send:
    return lambda endpoint: with_fields(_form(endpoint.kind, schema))(endpoint)


def _deep(endpoint: Endpoint) -> bytes:
    schema = b'{"items":' * 10_000 + b"{}" + b"}" * 10_000
    return request(endpoint, b'{"model":"tiny","tools":[{"parameters":' + schema + b"}]}")


def _either(count: int) -> dict[str, Any]:
    return {"anyOf": [{"const": n} for n in range(count)]}


_SCHEMAS: dict[str, Any] = {
    "S3 $ref to a file": {"properties": {"a": {"$ref": "file:///etc/passwd"}}},
    "S3 $ref to a server": {"$ref": "http://169.254.169.254/latest"},
    "S4 enum of 5,000": {"properties": {"a": {"enum": list(range(5_000))}}},
    "S5 minItems": {"properties": {"a": {"type": "array", "minItems": 10**9}}},
    "S5 minLength": {"properties": {"a": {"type": "string", "minLength": 10**9}}},
    "S5 negative upper bound": {"properties": {"a": {"type": "string", "maxLength": -1}}},
    "S5 negative": {"properties": {"a": {"type": "string", "minLength": -1}}},
    "S7 back-reference": {"properties": {"a": {"type": "string", "pattern": r"(a+)\1"}}},
    "S7 look-ahead": {"properties": {"a": {"type": "string", "pattern": "^(?=(a+)+$)"}}},
    "S7 pattern that grows": {"properties": {"a": {"type": "string", "pattern": "((a{100}){100}){100}"}}},
    "S7 pattern of 10 KB": {"properties": {"a": {"type": "string", "pattern": "a" * 10_000}}},
    "S7 pattern of a property": {"patternProperties": {"(": {}}},
    "S8 2^20 combinations": {"allOf": [_either(2)] * 20},
    "S9 unknown type": {"properties": {"a": {"type": "strnig"}}},
    "S9 type a number": {"properties": {"a": {"type": 7}}},
    "S12 defined by itself": {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}]}}},
    "S15 $ref to nothing": {"properties": {"a": {"$ref": "#/$defs/nowhere"}}},
    "S15 $ref to an anchor that is not there": {"$ref": "#nowhere"},
    "S15 required no list": {"type": "object", "required": "a"},
    "S15 required a flag": {"properties": {"a": {"type": "string", "required": True}}},
    "S15 required of numbers": {"type": "object", "required": [1]},
    "S15 properties no object": {"type": "object", "properties": []},
    "S15 a property no schema": {"type": "object", "properties": {"a": "string"}},
    "S15 items no schema": {"type": "array", "items": "string"},
    "S15 anyOf no list": {"anyOf": {"type": "string"}},
    "S15 allOf of nothing": {"allOf": []},
    "S15 enum no list": {"properties": {"a": {"enum": "a"}}},
    "S15 enum of nothing": {"properties": {"a": {"enum": []}}},
    "S15 pattern a number": {"properties": {"a": {"pattern": 7}}},
    "S15 minimum a text": {"properties": {"a": {"minimum": "0"}}},
    "S15 not itself": {"not": {"$ref": "#"}},
    "S15 wrong where only a $ref leads": {"$ref": "#/x", "x": {"required": 1}},
    "S13 3,000 properties": {"properties": {f"p{n}": {} for n in range(3000)}},
}
_LONG, _TEXT = "S13 70 KB", {"description": "x" * 70_000}
_WIDE = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 10**9}}}
_GOOD = {
    "draft 04": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "properties": {"price": {"type": "number", "minimum": 0, "exclusiveMinimum": True}},
        "required": ["price"],
    },
    "draft 2019-09": {"properties": {"children": {"type": "array", "items": {"$recursiveRef": "#"}}}},
    "zod's address of mail": {"properties": {"a": {"type": "string", "format": "email", "pattern": "^(?!a)b$"}}},
    "a pair": {"type": "array", "items": [{"type": "string"}, {"type": "null"}], "nullable": True},
    "a name that is escaped": {"$ref": "#/$defs/P%5Bint%5D", "$defs": {"P[int]": {"type": "object"}}},
}
_NO_SCHEMAS: tuple[Any, ...] = ([], "x", 7, True)
CASES = (
    Case("S1 depth of 10,000", _deep, applies=_WITH_TOOLS),
    # What no engine can follow is left out of a tool, with a warning: a tool of many does not end a conversation.
    *(
        Case(f"{name} in a tool", _as_tool(schema), frozenset({200}), _WITH_TOOLS, in_envelope=False)
        for name, schema in _SCHEMAS.items()
    ),
    Case(f"{_LONG} in a tool", _as_tool(_TEXT), applies=_WITH_TOOLS),
    Case(f"{_LONG} in the form", _as_form(_TEXT), applies=_WITH_A_FORM),
    *(Case(f"{name} in the form", _as_form(schema), applies=_WITH_A_FORM) for name, schema in _SCHEMAS.items()),
    *(
        Case(f"S16 {name} in a {place}", send(schema), frozenset({200}), applies, in_envelope=False)
        for name, schema in _GOOD.items()
        for place, send, applies in (("tool", _as_tool, _WITH_TOOLS), ("form", _as_form, _WITH_A_FORM))
    ),
    # Agents limit the text of a file by its size: that limit is not passed to the engine.
    Case("S5 maxLength in a tool", _as_tool(_WIDE), frozenset({200}), _WITH_TOOLS, in_envelope=False),
    Case("S5 maxLength in the form", _as_form(_WIDE), frozenset({200}), _WITH_A_FORM, in_envelope=False),
    Case("S4 enum of 10^6 in a tool", later(lambda: _as_tool({"enum": [1] * 1_000_000})), applies=_WITH_TOOLS),
    Case("S7 pattern of 1 MB in a tool", later(lambda: _as_tool({"pattern": "a" * 1_000_000})), applies=_WITH_TOOLS),
    *(Case(f"S14 schema {schema!r}", _as_tool(schema), applies=_WITH_TOOLS) for schema in _NO_SCHEMAS),
    *(
        Case(f"S10 name {name[:12]!r}", _as_tool({}, name), applies=_WITH_TOOLS)
        for name in ("a\nb", "x" * 10_000, "", "../x", "a b", "a\u202eb", "$(id)")
    ),
)
