"""Base class of request and response bodies that no message defines: camelCase names, unknown fields rejected."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from weft.kernel.field_docstrings import field_docstrings
from weft.kernel.names import MAX_NAME_CHARS, MODEL_NAME_PATTERN, MODEL_NAME_WORDS, ascii_name, is_model_name, is_name


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


def _model_name(text: str) -> str:
    name = ascii_name(text)
    if not is_model_name(name):
        raise ValueError(f"must be {MODEL_NAME_WORDS}")
    return name


ModelName = Annotated[
    str,
    AfterValidator(_model_name),
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
