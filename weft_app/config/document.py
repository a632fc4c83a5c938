"""A configuration file as a document: YAML with the line of each value, and the merge of documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from weft.documents.yaml_documents import YamlDocument, YamlRefusedError, yaml_documents, yaml_problem
from weft.kernel.errors.error_tree import FieldError, invalid_field
from weft.kernel.errors.reasons import Reason

Document = dict[str, Any]
"""A mapping in the file. Its values may be `Given`."""
PathSteps = tuple[str | int, ...]
_NAME = "name"
_FIELD = "--config"


@dataclass(frozen=True, slots=True)
class Given:
    """A value of a document and its source."""

    value: Any
    source: str
    """Such as "weft.yaml line 3" or "environment variable LOG_LEVEL"."""


class GivenMapping(dict[str, Any]):
    """A mapping in a file and its position."""

    source = ""


class GivenList(list[Any]):
    """A list in a file and its position."""

    source = ""


def value_of(item: Any) -> Any:
    """Returns a value of a document without its source."""
    return item.value if isinstance(item, Given) else item


def given_by(source: str, value: Any) -> Any:
    """Returns a document with one source for all values."""
    if isinstance(value, dict):
        return {key: given_by(source, item) for key, item in value.items()}
    if isinstance(value, list):
        return [given_by(source, item) for item in value]
    return value if isinstance(value, Given) else Given(value, source)


def sources(item: Any, steps: PathSteps = ()) -> Iterator[tuple[PathSteps, str]]:
    """Yields the path and the source of every value of a document."""
    if isinstance(item, dict):
        for key, value in item.items():
            yield from sources(value, (*steps, key))
    elif isinstance(item, list):
        for index, value in enumerate(item):
            yield from sources(value, (*steps, index))
    elif isinstance(item, Given):
        yield steps, item.source


def location_of(item: Any) -> str:
    """Returns the position of a value; a merged mapping or list has that of its first value."""
    if isinstance(item, (Given, GivenMapping, GivenList)) and item.source:
        return item.source
    return next((source for _, source in sources(item)), "")


def merge(base: Document, over: Document) -> Document:
    """Overrides `base` with `over`: merges mappings by key and lists of named items by name, replaces other values."""
    result = dict(base)
    for key, value in over.items():
        result[key] = _merged(result.get(key), value)
    return result


def _merged(below: Any, value: Any) -> Any:
    if isinstance(below, dict) and isinstance(value, dict):
        return merge(below, value)
    if _is_named(below) and _is_named(value):
        laid = {value_of(item[_NAME]): item for item in value}
        known = {value_of(item[_NAME]) for item in below}
        kept = [merge(item, laid.get(value_of(item[_NAME]), {})) for item in below]
        return [*kept, *(item for item in value if value_of(item[_NAME]) not in known)]
    return value


def _is_named(value: Any) -> bool:
    """Whether a value is a list of items with unique names, such as runners and models."""
    if not isinstance(value, list) or not value:
        return False
    names = [value_of(item.get(_NAME)) if isinstance(item, dict) else None for item in value]
    return all(isinstance(name, str) for name in names) and len(set(names)) == len(names)


def read_file(path: Path) -> Document:
    """Reads a file. Raises INVALID_ARGUMENT or MALFORMED_REQUEST naming the file, the line and what to write."""
    try:
        text = path.read_text("utf-8")
        documents = list(yaml_documents(text, merge_keys=True))
    except OSError as error:
        raise invalid_field(_FIELD, f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _malformed(f"{path} is not YAML: it is not UTF-8 text") from error
    except (yaml.YAMLError, ValueError) as error:
        raise _malformed(f"{path} {_parse_problem(error, text)}") from error
    if not documents:
        return {}
    document, *further = documents
    if further:
        line = "" if further[0] is None else f" (line {further[0].line(())})"
        raise _malformed(f"{path} is not YAML of one document{line}: remove the line `---`")
    if document is None:
        return {}
    if not isinstance(document.value, dict):
        raise invalid_field(_FIELD, f"{path} must be a mapping of names to values{_instead_of_mapping(document)}")
    return dict(_with_lines(document.value, document.root, path, document.root.start_mark.line))


def _malformed(message: str) -> FieldError:
    return FieldError(_FIELD, message, Reason.MALFORMED_REQUEST)


def _parse_problem(error: Exception, text: str) -> str:
    """Returns why a file is not YAML, its line, and the remedy if known."""
    mark = getattr(error, "problem_mark", None)
    line = f" (line {mark.line + 1})" if mark is not None else ""
    if isinstance(error, YamlRefusedError):
        return f"is refused{line}: {error.problem}"
    return f"is not YAML{line}: {yaml_problem(error, text)}"


def _instead_of_mapping(document: YamlDocument) -> str:
    """Returns what the file contains instead of a mapping, and the remedy."""
    line = document.line(())
    if isinstance(document.value, list):
        return f", and line {line} begins a list: runners are the list below `runners:`"
    return f": write `name: value`, with a space after the colon (line {line})"


def _with_lines(value: Any, node: yaml.Node, path: Path, line: int) -> Any:
    """Returns a value with the positions of its content; a mapping or list has its name's `line`, from 0."""
    location = f"{path.name} line {line + 1}"
    if isinstance(value, dict) and isinstance(node, yaml.MappingNode):
        nodes = {key.value: (key.start_mark.line, child) for key, child in node.value}
        mapping = GivenMapping()
        for key, item in value.items():
            at, child = nodes.get(str(key), (line, node))
            mapping[key] = _with_lines(item, child, path, at)
        mapping.source = location
        return mapping
    if isinstance(value, list) and isinstance(node, yaml.SequenceNode):
        items = zip(value, node.value, strict=False)
        found = GivenList(_with_lines(item, child, path, child.start_mark.line) for item, child in items)
        found.source = location
        return found
    return Given(value, f"{path.name} line {node.start_mark.line + 1}")
