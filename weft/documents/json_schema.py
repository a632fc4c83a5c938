"""Generates JSON schemas of messages as documents from descriptors, options and proto comments.

Comments come from the .proto files in the package, or in the checkout beside it, and are read when a schema is made.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message

import weft
from weft.api.common.v1 import document_pb2 as pb
from weft.documents.codec import (
    UNKNOWN,
    FieldPlan,
    default_of,
    is_declared_enum,
    is_map,
    is_of,
    is_typed,
    oneof_words,
    plan_of,
    value_oneof_of,
)
from weft.documents.computed import COMPUTED
from weft.kernel.schemas.field_rules import DURATION, TIMESTAMP, enum_words, rules_of
from weft.kernel.values.names import MAX_NAME_CHARS, MODEL_NAME_PATTERN
from weft.kernel.values.units import MAX_DURATION_CHARS

_BLOCK = re.compile(r"(?:message|enum|oneof)\s+(\w+)\s*\{")
_MEMBER = re.compile(r"(?:optional |repeated )?(?:map<[^>]+>|[\w.]+)? ?\b(\w+) = \d+")


def comment_of(file: str, full_name: str) -> str:
    """Returns the comment above a message, enum, field or enum value; empty: none."""
    return _comments(file).get(full_name, "")


@cache
def _comments(file: str) -> Mapping[str, str]:
    package = Path(weft.__file__).parent
    folder = next((each for each in (package / "protos", package.parent / "protos") if (each / file).is_file()), None)
    return MappingProxyType({} if folder is None else dict(_read((folder / file).read_text("utf-8"))))


def _read(text: str) -> Iterator[tuple[str, str]]:
    """Yields full names and comments of a file. A oneof is no scope: its fields belong to the message."""
    scope: list[str] = []
    comment: list[str] = []
    option_depth = 0
    for line in map(str.strip, text.splitlines()):
        block = _BLOCK.match(line)
        member = None if option_depth else _MEMBER.match(line)
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        if line.startswith("package "):
            scope = [line.removeprefix("package ").rstrip(";")]
        elif block is not None and not option_depth:
            yield _name(scope, block[1]), " ".join(comment)
            # An empty block ends on the line that opens it.
            if not line.endswith("}"):
                scope.append("" if line.startswith("oneof") else block[1])
        elif member is not None and not line.startswith("option "):
            yield _name(scope, member[1]), " ".join(comment)
        if block is None:
            option_depth += line.count("{") + line.count("[") - line.count("}") - line.count("]")
        if option_depth < 0:
            option_depth = 0
            scope.pop()
        comment = []


def _name(scope: list[str], name: str) -> str:
    return ".".join([part for part in scope if part] + [name])


Schema = dict[str, Any]
MAX_INT32, MAX_INT64 = 2**31 - 1, 2**63 - 1


class SchemaSet:
    """Schemas that refer to each other, by name."""

    def __init__(self, ref_template: str = "#/$defs/{model}") -> None:
        self.definitions: dict[str, Schema] = {}
        self._ref_template = ref_template

    def add(self, name: str, build: Callable[[], Schema]) -> Schema:
        """Adds a schema if it is missing; returns the reference to it."""
        if name not in self.definitions:
            self.definitions[name] = {}
            self.definitions[name] = {"title": name} | build()
        return {"$ref": self._ref_template.format(model=name)}

    def of_message(self, descriptor: Descriptor, *, checked: bool = True) -> Schema:
        """Adds the schema of a message and those it refers to; returns the reference, or the schema if it is inline.

        `checked`: whether users write such documents too, so that field rules apply.
        """
        value_oneof = value_oneof_of(descriptor)
        if value_oneof is not None:
            return self._of_value(value_oneof)
        typed = next((oneof for oneof in descriptor.oneofs if is_typed(oneof)), None)
        if typed is not None and not typed.GetOptions().Extensions[pb.document_oneof].merged:
            return {"oneOf": [self._of_variant(typed, field) for field in typed.fields]}
        return self.add(schema_name(descriptor), lambda: self.object_of(descriptor, checked=checked))

    def object_of(self, descriptor: Descriptor, *, checked: bool = True) -> Schema:
        """Returns the schema of a message's document."""
        plan = plan_of(descriptor)
        checked = checked and not descriptor.GetOptions().Extensions[pb.document_message].observed
        properties: dict[str, Schema] = {}
        if plan.kind:
            properties["kind"] = {"const": plan.kind, "type": "string", "description": "Kind of document."}
        required = list(properties)
        for oneof in descriptor.oneofs:
            if is_typed(oneof):
                properties |= self._merged(oneof)
                required.append(oneof.GetOptions().Extensions[pb.document_oneof].type)
        for field in plan.fields:
            if field.type_oneof is None:
                own, own_required = self._properties(field, checked=checked)
                properties |= own
                required += own_required
        computed = COMPUTED.get(descriptor.full_name)
        if computed is not None:
            properties |= {name: _optional(schema) for name, schema in properties.items() if name in computed.left_out}
            properties |= {name: properties.get(name, {}) | schema for name, schema in computed.properties.items()}
            required = [*(name for name in required if name not in computed.left_out), *computed.required]
        return object_schema(properties, required, comment_of(descriptor.file.name, descriptor.full_name))

    def _properties(self, plan: FieldPlan, *, checked: bool) -> tuple[dict[str, Schema], list[str]]:
        """Returns the schemas of a field, several if it is inline, and the names of the required ones."""
        if plan.inline:
            assert plan.field.message_type is not None
            inner = self.object_of(plan.field.message_type, checked=checked)
            always = plan.presence in (pb.PRESENCE_REQUIRED, pb.PRESENCE_ALWAYS)
            found = inner["properties"]
            if always:
                return found, inner.get("required", [])
            return {name: _optional(schema) for name, schema in found.items()}, []
        return {plan.key: self._of_field(plan, checked=checked)}, [
            plan.key
        ] if plan.presence == pb.PRESENCE_REQUIRED else []

    def _of_field(self, plan: FieldPlan, *, checked: bool) -> Schema:
        schema = self._of_value_in(plan.field, checked=checked)
        description = _comment(plan.field)
        if plan.nullable:
            schema = nullable(schema)
        elif plan.presence != pb.PRESENCE_REQUIRED:
            schema = schema | {"default": default_of(plan)}
        return schema | {"description": description}

    def _of_value_in(self, field: FieldDescriptor, *, checked: bool) -> Schema:
        """Returns the schema of a field's value, which may be a list or an object."""
        rules, entry = rules_of(field) if checked else pb.FieldRules(), field.message_type
        if is_map(field) and entry is not None:
            found: Schema = {
                "type": "object",
                "additionalProperties": self._of_item(entry.fields_by_name["value"], rules, checked=checked),
            }
            keys = _text_schema(rules.keys) if rules.HasField("keys") else {}
            keys.pop("type", None)
            return found | ({"propertyNames": keys} if keys else {}) | _limits(rules, "Properties")
        if field.GetOptions().Extensions[pb.document].keyed and entry is not None:
            return {"type": "object", "additionalProperties": self._of_item(entry.fields[1], rules, checked=checked)}
        if field.is_repeated:
            return {"type": "array", "items": self._of_item(field, rules, checked=checked)} | _limits(rules, "Items")
        return self._of_item(field, rules, checked=checked)

    def _of_item(self, field: FieldDescriptor, rules: pb.FieldRules, *, checked: bool = True) -> Schema:
        options = field.GetOptions().Extensions[pb.document]
        if field.message_type is not None:
            return self._of_part(field, rules, field.message_type, checked=checked)
        if field.enum_type is not None:
            return _enum_schema(field.enum_type)
        if options.bool_words:
            return {"type": "string", "enum": list(options.bool_words)}
        return _scalar_schema(field, rules, options.unit or 1)

    def _of_part(self, field: FieldDescriptor, rules: pb.FieldRules, kind: Descriptor, *, checked: bool) -> Schema:
        if is_of(field, TIMESTAMP):
            return {"type": "string", "format": "date-time"}
        if field.GetOptions().Extensions[pb.document].keep_alive:
            return {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": MAX_DURATION_CHARS}]}
        if is_of(field, DURATION):
            return {"type": "number"} | _range(rules)
        return self.of_message(kind, checked=checked)

    def _of_value(self, oneof: OneofDescriptor) -> Schema:
        kinds = {self._of_item(field, rules_of(field))["type"] for field in oneof.fields} - {"integer"}
        return {"type": sorted(kinds)}

    def _of_variant(self, oneof: OneofDescriptor, field: FieldDescriptor) -> Schema:
        kind = field.message_type
        assert kind is not None
        word, key = oneof_words(oneof)[field.name], oneof.GetOptions().Extensions[pb.document_oneof].type

        def build() -> Schema:
            schema = self.object_of(kind)
            own = {key: {"const": word, "type": "string", "description": _comment(field)}}
            return schema | {"properties": own | schema["properties"], "required": [key, *schema.get("required", [])]}

        return self.add(schema_name(kind), build)

    def _merged(self, oneof: OneofDescriptor) -> dict[str, Schema]:
        """Returns the type word and the fields of all variants; each variant's fields are optional."""
        words = [*oneof_words(oneof).values(), UNKNOWN]
        key = oneof.GetOptions().Extensions[pb.document_oneof].type
        found: dict[str, Schema] = {
            key: {"type": "string", "enum": words, "description": "Which of the following apply."}
        }
        for field in oneof.fields:
            assert field.message_type is not None
            for name, schema in self.object_of(field.message_type)["properties"].items():
                found.setdefault(name, _optional(schema))
        return found


def object_schema(properties: Mapping[str, Schema], required: list[str], description: str) -> Schema:
    """Returns the schema of an object without additional properties."""
    titled = {name: {"title": _title(name)} | schema for name, schema in properties.items()}
    found: Schema = {"type": "object", "additionalProperties": False, "description": description, "properties": titled}
    return found | ({"required": required} if required else {})


def _comment(field: FieldDescriptor) -> str:
    assert field.containing_type is not None
    return comment_of(field.containing_type.file.name, field.full_name)


def nullable(schema: Schema) -> Schema:
    """Returns the schema of a value that may be null."""
    kinds = schema["anyOf"] if schema.keys() == {"anyOf"} else [schema]
    return {"anyOf": [*kinds, {"type": "null"}], "default": None}


def schema_name(descriptor: Descriptor) -> str:
    """Returns the name of a message's schema."""
    return str(descriptor.GetOptions().Extensions[pb.document_message].schema or f"{descriptor.name}Document")


def _optional(schema: Schema) -> Schema:
    if "default" in schema and schema["default"] is None:
        return schema
    bare = {name: part for name, part in schema.items() if name not in ("default", "description", "title")}
    return nullable(bare) | {"description": schema.get("description", "")}


def _title(name: str) -> str:
    words = "".join(f" {character}" if character.isupper() else character for character in name)
    return words.replace("_", " ").title()


def _limits(rules: pb.FieldRules, noun: str) -> Schema:
    """Returns the bounds on the number of entries of a list or a map."""
    found = {f"min{noun}": rules.min_items, f"max{noun}": rules.max_items}
    return {name: count for name, count in found.items() if count}


def _range(rules: pb.FieldRules, unit: int = 1) -> Schema:
    found: Schema = {}
    if rules.HasField("minimum"):
        found["exclusiveMinimum" if rules.above_minimum else "minimum"] = _in_units(rules.minimum, unit)
    if rules.HasField("maximum"):
        found["maximum"] = _in_units(rules.maximum, unit)
    return found


def _in_units(number: float, unit: int) -> int | float:
    if unit > 1:
        return math.ceil(number / unit)
    # A double cannot represent the largest int64.
    return min(int(number), MAX_INT64) if number.is_integer() else number


def _enum_schema(enum: EnumDescriptor) -> Schema:
    if enum.GetOptions().Extensions[pb.document_enum].open:
        return {"type": "string"}
    words = list(enum_words(enum).values())
    return {"type": "string", "enum": words if is_declared_enum(enum) else [*dict.fromkeys([*words, UNKNOWN])]}


def _scalar_schema(field: FieldDescriptor, rules: pb.FieldRules, unit: int) -> Schema:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return _text_schema(rules)
        case FieldDescriptor.CPPTYPE_BOOL:
            return {"type": "boolean"}
        case FieldDescriptor.CPPTYPE_INT32 if rules.HasField("minimum"):
            return {"type": "integer", "maximum": MAX_INT32} | _range(rules)
        case FieldDescriptor.CPPTYPE_INT32 | FieldDescriptor.CPPTYPE_INT64:
            return {"type": "integer"} | _range(rules, unit)
        case _:
            return {"type": "number"} | _range(rules)


_PATTERNS: Mapping[int, Schema] = MappingProxyType(
    {
        pb.FORMAT_NAME: {"pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]*$", "minLength": 1, "maxLength": MAX_NAME_CHARS},
        pb.FORMAT_MODEL_NAME: {"pattern": MODEL_NAME_PATTERN, "minLength": 1, "maxLength": MAX_NAME_CHARS},
        pb.FORMAT_SIGNAL_NAME: {"pattern": "^[A-Z][A-Z0-9_]{0,63}$", "minLength": 1, "maxLength": 64},
        pb.FORMAT_DIGEST: {"pattern": "^(sha256:[0-9a-f]{64})?$"},
        pb.FORMAT_WEB_URL: {"pattern": r"^https?://[^\s]+$"},
    }
)


def _text_schema(rules: pb.FieldRules) -> Schema:
    found: Schema = {"type": "string"} | _PATTERNS.get(rules.format, {})
    if rules.words:
        found["enum"] = list(rules.words)
    lengths = {"minLength": rules.min_chars, "maxLength": rules.max_chars}
    return found | {name: length for name, length in lengths.items() if length}


@dataclass(frozen=True, slots=True)
class DocumentSchema:
    """The schema of a response or printed document."""

    name: str
    add: Callable[[SchemaSet], Schema]
    """Adds the schema and those it refers to; returns the reference."""


def built_schema(name: str, build: Callable[[SchemaSet], Schema]) -> DocumentSchema:
    """Returns a schema made by a function, which may refer to other schemas of the set."""
    return DocumentSchema(name, lambda schemas: schemas.add(name, lambda: build(schemas)))


def record_schema(kind: type[Message]) -> DocumentSchema:
    """Returns the schema of a message's document."""
    descriptor: Any = kind.DESCRIPTOR
    return DocumentSchema(schema_name(descriptor), lambda schemas: schemas.of_message(descriptor))
