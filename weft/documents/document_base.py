"""Base class of request and response bodies that no message defines: camelCase names, unknown fields rejected."""

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from weft.kernel.settings.setting_annotations import checked_model_name
from weft.kernel.values.names import MAX_NAME_CHARS, MODEL_NAME_PATTERN, is_name


@cache
def field_docstrings(kind: type) -> Mapping[str, str]:
    """Returns the docstrings of a class's fields by name, including inherited ones; empty if there is no source.

    Read when a schema is built: pydantic (`use_attribute_docstrings`) reads them when a class is defined, which took a
    tenth of the CPU time of a start.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in ("builtins", "pydantic"):
            found |= _of_module(base.__module__).get(base.__name__, {})
    return {name: text for name, text in found.items() if text}


@cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Returns the docstrings by class and field."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (OSError, TypeError):  # a module in C, or without its source
        return {}
    return {node.name: _of_class(node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _of_class(node: ast.ClassDef) -> dict[str, str]:
    """Returns "" for a field without a docstring, which hides the one of a base class."""
    found: dict[str, str] = {}
    for field, text in zip(node.body, [*node.body[1:], None], strict=True):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                found[name] = inspect.cleandoc(words)
            case ast.AnnAssign(target=ast.Name(id=name)), _:
                found[name] = ""
    return found


def _name(text: str) -> str:
    if not is_name(text):
        raise ValueError(
            f"must be 1 to {MAX_NAME_CHARS} letters, digits, '.', '_', ':' or '-', starting with a letter or digit"
        )
    return text


Name = Annotated[
    str,
    AfterValidator(_name),
    Field(json_schema_extra={"pattern": "^[A-Za-z0-9][A-Za-z0-9._:-]*$", "minLength": 1, "maxLength": MAX_NAME_CHARS}),
]


ModelName = Annotated[
    str,
    AfterValidator(checked_model_name),
    Field(json_schema_extra={"pattern": MODEL_NAME_PATTERN, "minLength": 1, "maxLength": MAX_NAME_CHARS}),
]


class DocumentPart(BaseModel):
    """A body or a part of one: camelCase names in JSON, Python names in code, descriptions from the docstrings."""

    model_config = ConfigDict(
        defer_build=True,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        made = handler(core_schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for name, text in field_docstrings(cls).items():
            field = cls.model_fields.get(name)
            shown = properties.get(name) or properties.get("" if field is None else field.alias)
            if shown is not None:
                shown["description"] = text
        return made
