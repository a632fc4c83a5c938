"""Documents from files: all of them right, or an error that says which one is not, and where."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from weft.documents.document_base import ResourceKind, parse_kind
from weft.documents.documents import DOCUMENT_TYPES, Document, PoolDocument
from weft.documents.yaml_nodes import YamlDocument, yaml_documents
from weft.kernel.errors import FieldError, WeftError, invalid_field
from weft.kernel.reasons import Reason

MAX_DOCUMENTS = 1000
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_INPUT_CHARS = 64
"""So much of a wrong word is repeated in an error."""

_LIST_FIELDS = frozenset({"kind", "items", "nextPageToken"})
_LIST_KINDS = {kind.list_kind: kind for kind in ResourceKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedDocument:
    """A document, and where it came from."""

    document: Document
    where: str
    """Such as "agents.yaml, document 3 (line 41)"."""

    @property
    def label(self) -> str:
        """KIND/NAME."""
        return f"{self.document.kind}/{self.document.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raw:
    """A document as it was parsed: JSON types, not checked yet."""

    value: Any
    source: str
    number: int
    yaml: YamlDocument | None

    def where(self, path: tuple[str | int, ...]) -> str:
        line = f" (line {self.yaml.line(path)})" if self.yaml is not None else ""
        return f"{self.source}, document {self.number}{line}"


def read_documents(text: str, source: str) -> tuple[SourcedDocument, ...]:
    """Every document of a YAML stream or a JSON text; those of a list document (`kind: ModelList`) one by one.

    `status` is dropped. Raises REQUEST_TOO_LARGE, MALFORMED_REQUEST or INVALID_ARGUMENT, each naming `source`, and
    where they are known document, line and field. Then nothing of the text may be used.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_FILE_BYTES:
        raise WeftError(
            Reason.REQUEST_TOO_LARGE, f"{source}: larger than {MAX_FILE_BYTES // 1024**2} MiB; apply it in parts"
        )
    found: list[SourcedDocument] = []
    for raw in _parse(text, source):
        found.extend(_documents_of(raw))
        if len(found) > MAX_DOCUMENTS:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"{source}: more than {MAX_DOCUMENTS:,} documents; apply them in parts"
            )
    return tuple(found)


def parse_document(value: Any, kind: ResourceKind | None = None) -> Document:
    """One document from JSON types; `kind` is what it must be, and may be left out of `value` then.

    Raises INVALID_ARGUMENT naming the field.
    """
    document, path, problem = _checked(value, kind)
    if document is None:
        raise invalid_field(_field_path(path) or "document", problem)
    return document


def refuse_repeats(documents: tuple[SourcedDocument, ...]) -> None:
    """Raise INVALID_ARGUMENT when two documents have one name; only a pool may be called like a model."""
    first: dict[tuple[bool, str], SourcedDocument] = {}
    for sourced in documents:
        is_pool = isinstance(sourced.document, PoolDocument)
        known = first.setdefault((is_pool, sourced.document.name), sourced)
        if known is not sourced:
            raise invalid_field(f"{sourced.where}: name", f"{known.label} has this name already, in {known.where}")


def _parse(text: str, source: str) -> Iterator[_Raw]:
    # JSON is nearly YAML, but not quite: its escapes of characters beyond the first plane are not.
    if text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        try:
            value = json.loads(text.lstrip("\ufeff"), object_pairs_hook=_pairs, parse_constant=_no_constant)
        except RecursionError:
            raise FieldError(f"{source}, document 1", "nested too deep", Reason.MALFORMED_REQUEST) from None
        except _JsonRefusedError as error:
            raise FieldError(f"{source}, document 1", str(error), Reason.MALFORMED_REQUEST) from error
        except ValueError:
            pass
        else:
            yield _Raw(value=value, source=source, number=1, yaml=None)
            return
    yield from _parse_yaml(text, source)


def _parse_yaml(text: str, source: str) -> Iterator[_Raw]:
    documents = yaml_documents(text)
    for number in count(1):
        try:
            found = next(documents)
        except StopIteration:
            return
        except (yaml.YAMLError, ValueError) as error:
            raise _not_yaml(error, f"{source}, document {number}") from error
        if found is not None:
            yield _Raw(value=found.value, source=source, number=number, yaml=found)


def _not_yaml(error: Exception, where: str) -> FieldError:
    mark = getattr(error, "problem_mark", None)
    line = f" (line {mark.line + 1})" if mark is not None else ""
    if isinstance(error, yaml.reader.ReaderError):
        problem = "a character that may not stand in YAML"
    else:
        problem = getattr(error, "problem", None) or "a value that cannot be read"
    return FieldError(f"{where}{line}", problem, Reason.MALFORMED_REQUEST)


def _documents_of(raw: _Raw) -> Iterator[SourcedDocument]:
    value = raw.value
    kind = _LIST_KINDS.get(value["kind"]) if isinstance(value, dict) and isinstance(value.get("kind"), str) else None
    if kind is None:
        yield _sourced(raw, value, (), None)
        return
    items = value.get("items")
    if not isinstance(items, list) or not value.keys() <= _LIST_FIELDS:
        raise invalid_field(f"{raw.where(())}: items", f"a {kind.list_kind} has kind and items, a list")
    for index, item in enumerate(items):
        yield _sourced(raw, item, ("items", index), kind)


def _sourced(raw: _Raw, value: Any, base: tuple[str | int, ...], kind: ResourceKind | None) -> SourcedDocument:
    document, path, problem = _checked(value, kind)
    if document is not None:
        return SourcedDocument(document=document, where=raw.where(base))
    place = (*base, *path)
    field = _field_path(place)
    raise invalid_field(f"{raw.where(place)}: {field}" if field else raw.where(place), problem)


def _checked(value: Any, kind: ResourceKind | None) -> tuple[Document | None, tuple[str | int, ...], str]:
    """The document, or the path to what is wrong with it and the problem in words."""
    if not isinstance(value, dict):
        return None, (), "a document is a mapping of names to values, beginning with kind"
    declared = {key: part for key, part in value.items() if key != "status"}
    word = declared.get("kind", kind.value if kind is not None else None)
    if not isinstance(word, str):
        return None, ("kind",), f"must be one of {', '.join(ResourceKind)}"
    try:
        found = parse_kind(word, "kind")
        if kind is not None and found is not kind:
            return None, ("kind",), f"must be {kind.value} here"
        return (
            DOCUMENT_TYPES[found].model_validate(declared | {"kind": found.value}, by_alias=True, by_name=False),
            (),
            "",
        )
    except FieldError as error:
        return None, ("kind",), error.message.removeprefix("kind: ")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return None, _path(first, value), _problem(first)


def _path(error: ErrorDetails, value: Any) -> tuple[str | int, ...]:
    """The steps of an error's location that are in the document; pydantic adds the branches it took."""
    path: list[str | int] = []
    missing = error["type"] in ("missing", "extra_forbidden")
    for place, step in enumerate(error["loc"]):
        last = place == len(error["loc"]) - 1
        if isinstance(value, dict) and (step in value or (missing and last)):
            path.append(step)
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int):
            path.append(step)
            value = value[step] if step < len(value) else None
    return tuple(path)


def _problem(error: ErrorDetails) -> str:
    match error["type"]:
        case "extra_forbidden":
            return "there is no such field"
        case "missing":
            return "is missing"
        case "too_short" | "too_long":
            # Pydantic speaks of tuples "after validation", which is none of the author's business.
            limit, word = ("min_length", "least") if error["type"] == "too_short" else ("max_length", "most")
            return f"must have at {word} {error['ctx'][limit]}, has {error['ctx']['actual_length']}"
        case _:
            return error["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")


def _field_path(path: tuple[str | int, ...]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step[:MAX_INPUT_CHARS]}"
    return text.removeprefix(".")


class _JsonRefusedError(Exception):
    """It is JSON, but not of the kind that is taken here."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _JsonRefusedError(f"the key {twice[:MAX_INPUT_CHARS]!r} stands twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _JsonRefusedError(f"{name} is not a number")
