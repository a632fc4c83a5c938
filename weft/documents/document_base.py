"""What all documents have in common: camelCase names, nothing unknown, every string bounded."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from weft.kernel.names import MAX_NAME_CHARS, is_name

MAX_INT32 = 2**31 - 1


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
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]


class DocumentPart(BaseModel):
    """A mapping inside a document. Code uses the Python names, documents the camelCase ones."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )
