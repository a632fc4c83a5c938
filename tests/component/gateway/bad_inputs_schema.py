"""JSON schemas and names of tools that no engine should see, wherever a request may hold one."""

from typing import Any

from bad_inputs_stage import Case, Endpoint, Send, later, of_kind, request, with_fields

_WITH_TOOLS = of_kind("chat", "messages", "responses")
_WITH_A_FORM = of_kind("chat", "responses")


def _tool(kind: str, schema: Any, name: str = "f") -> dict[str, Any]:
    if kind == "messages":
        return {"tools": [{"name": name, "input_schema": schema}]}
    if kind == "responses":
        return {"tools": [{"type": "function", "name": name, "parameters": schema}]}
    return {"tools": [{"type": "function", "function": {"name": name, "parameters": schema}}]}


def _form(kind: str, schema: Any) -> dict[str, Any]:
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
    "S13 70 KB": {"description": "x" * 70_000},
    "S13 3,000 properties": {"properties": {f"p{n}": {} for n in range(3000)}},
}
_WIDE = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 10**9}}}
_NO_SCHEMAS: tuple[Any, ...] = ([], "x", 7, True)
CASES = (
    Case("S1 depth of 10,000", _deep, applies=_WITH_TOOLS),
    *(Case(f"{name} in a tool", _as_tool(schema), applies=_WITH_TOOLS) for name, schema in _SCHEMAS.items()),
    *(Case(f"{name} in the form", _as_form(schema), applies=_WITH_A_FORM) for name, schema in _SCHEMAS.items()),
    # Agents bound the text of a file by its size: the bound is left out of what an engine sees.
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
