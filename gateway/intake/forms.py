"""The fields and files of a form, by name, and fields as a request model: with errors that name them."""

from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from gateway.intake.json_guard import field_path
from gateway.intake.multipart import Part
from weft.kernel.errors import invalid_field

Model = TypeVar("Model", bound=BaseModel)

_MAX_MESSAGE_CHARS = 500
LIST_MARK = "[]"
"""At the end of a field's name: it may be given several times."""


class Form:
    """A form with files."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts

    def files(self, name: str) -> list[Part]:
        """The files of this name, in order. Raises INVALID_ARGUMENT for a value that should be one."""
        found = [part for part in self._parts if part.name == name]
        if any(part.filename is None for part in found):
            raise invalid_field(name, "must be a file")
        return found

    def file(self, name: str) -> Part:
        """The one file of this name. Raises INVALID_ARGUMENT for none, for several and for an empty one."""
        found = self.files(name)
        if len(found) != 1:
            raise invalid_field(name, "must be one file")
        if not found[0].data:
            raise invalid_field(name, "must not be empty")
        return found[0]

    def words(self, name: str, known: frozenset[str]) -> list[str]:
        """The values of a field that may be given several times. Raises INVALID_ARGUMENT for one that is not known."""
        found = [part.text() for part in self._parts if part.name == name + LIST_MARK]
        if not known.issuperset(found):
            raise invalid_field(name, f"must be one of {', '.join(sorted(known))}")
        return found

    def read(self, model: type[Model], *, file_fields: frozenset[str]) -> Model:
        """The fields that are no files, and come once, as a request. Raises INVALID_ARGUMENT naming the field."""
        values: dict[str, str] = {}
        for part in self._parts:
            name = part.name
            if name in file_fields or name.endswith(LIST_MARK):
                continue
            if name in values:
                raise invalid_field(name, "is given twice")
            values[name] = part.text()
        try:
            return model.model_validate_strings(values)
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise invalid_field(field_path(found["loc"]) or "body", found["msg"][:_MAX_MESSAGE_CHARS])
