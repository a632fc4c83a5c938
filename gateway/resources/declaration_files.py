"""Bodies of `/api/v1` to documents: all of them right, or an error that says which one is not."""

from collections.abc import Sequence
from typing import Any

from weft.documents.document_base import ResourceKind
from weft.documents.documents import Document
from weft.documents.files import SourcedDocument, parse_document, read_documents, refuse_repeats
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason

_SOURCE = "body"


def documents_of_json(values: Sequence[Any]) -> list[Document]:
    """The documents of an apply request. Raises INVALID_ARGUMENT naming `documents[<index>]` and the field in it."""
    found = []
    for index, value in enumerate(values):
        where = f"documents[{index}]"
        try:
            found.append(SourcedDocument(document=parse_document(value), where=where))
        except FieldError as error:
            field = where if error.field == "document" else f"{where}.{error.field}"
            raise invalid_field(field, error.message.removeprefix(f"{error.field}: ")) from None
    try:
        return _distinct(tuple(found))
    except FieldError as error:
        raise invalid_field(error.field.replace(": ", "."), error.message.removeprefix(f"{error.field}: ")) from None


def documents_of_yaml(raw: bytes) -> list[Document]:
    """The documents of a YAML stream. Raises as `read_documents`, and MALFORMED_REQUEST when there is none."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise WeftError(Reason.MALFORMED_REQUEST, "the body is not valid UTF-8") from None
    documents = _distinct(read_documents(text, _SOURCE))
    if not documents:
        raise WeftError(Reason.MALFORMED_REQUEST, "the body has no document")
    return documents


def the_only_document(documents: Sequence[Document], kind: ResourceKind) -> Document:
    """The document of a body that must hold one of a kind. Raises MALFORMED_REQUEST or INVALID_ARGUMENT."""
    if len(documents) != 1:
        raise WeftError(Reason.MALFORMED_REQUEST, f"the body has {len(documents)} documents; one is expected")
    if documents[0].kind != kind.value:
        raise invalid_field("kind", f"must be {kind.value} here")
    return documents[0]


def _distinct(documents: tuple[SourcedDocument, ...]) -> list[Document]:
    refuse_repeats(documents)
    return [sourced.document for sourced in documents]
