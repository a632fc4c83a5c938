"""Reads documents from YAML and JSON files, and writes YAML.

Reading uses safe types only and limits every size before building anything. If any document of a file is invalid, the
error lists the invalid ones with lines and fields. JSON output is complete, with `status`; YAML output has only what
was declared and differs from its default, so that it can be applied again.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NoReturn

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from weft.documents.codec import camel
from weft.documents.kinds import KINDS
from weft.documents.resource_kinds import ResourceKind, parse_kind
from weft.documents.resources import AnyDocument, read_document
from weft.kernel.errors.error_tree import MAX_REFUSALS, FieldError, WeftError, invalid_field, refused_together
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import RuleError

MAX_YAML_NODES = 100_000
"""Maximum number of values in all documents; aliased values count at each use."""
MAX_YAML_DEPTH = 24

_MERGE_TAG = "tag:yaml.org,2002:merge"


class YamlRefusedError(yaml.MarkedYAMLError):
    """YAML that uses a feature not accepted here."""

    def __init__(self, problem: str, node: Node | None = None) -> None:
        super().__init__(problem=problem, problem_mark=node.start_mark if node is not None else None)


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One document of a stream: its value, and the line of each part."""

    value: Any
    root: Node

    def line(self, path: tuple[str | int, ...]) -> int:
        """Returns the line (from 1) of the value at `path`, or of the innermost value that contains it."""
        node, mark = self.root, self.root.start_mark
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            mark, node = found
        return int(mark.line) + 1


def yaml_documents(text: str, *, merge_keys: bool = False) -> Iterator[YamlDocument | None]:
    """Yields the documents of a stream, None for an empty one. Raises yaml.YAMLError."""
    loader = _Loader(text, merge_keys=merge_keys)
    try:
        while loader.check_node():
            root = loader.get_node()
            if root is None:
                return
            loader.refuse_bombs(root)
            value = loader.construct_document(root)
            yield None if value is None else YamlDocument(value, root)
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """The safe loader without duplicate keys, dates, merge keys unless allowed, and oversized or too deep values."""

    def __init__(self, text: str, *, merge_keys: bool) -> None:
        super().__init__(text)
        self._merge_keys = merge_keys
        self._depth = 0
        self._seen_nodes = 0
        self._expanded_nodes = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self._depth += 1
        self._seen_nodes += 1
        if self._depth > MAX_YAML_DEPTH:
            raise YamlRefusedError(f"nested more than {MAX_YAML_DEPTH} deep", parent)
        if self._seen_nodes > MAX_YAML_NODES:
            raise YamlRefusedError(f"more than {MAX_YAML_NODES:,} values", parent)
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def refuse_bombs(self, root: Node) -> None:
        """Raises if the values, counted at each use of an alias, exceed MAX_YAML_NODES."""
        self._expanded_nodes += _expanded_size(root, {}, set())
        if self._expanded_nodes > MAX_YAML_NODES:
            raise YamlRefusedError(f"more than {MAX_YAML_NODES:,} values once its aliases are followed", root)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        # Checked here because construction writes merged keys into the node, where they may duplicate its keys.
        self._refuse_odd_keys(node)
        return node

    def _refuse_odd_keys(self, node: MappingNode) -> None:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG and not self._merge_keys:
                raise YamlRefusedError("merge keys (<<) are not supported", key_node)
            if not isinstance(key_node, ScalarNode):
                raise YamlRefusedError("a key must be a plain word", key_node)
            if (key_node.tag, key_node.value) in seen:
                raise YamlRefusedError(f"the key {key_node.value[:64]!r} appears twice", key_node)
            seen.add((key_node.tag, key_node.value))


def _text_as_it_stands(loader: yaml.SafeLoader, node: ScalarNode) -> Any:
    return loader.construct_scalar(node)


# JSON has no dates: `description: 2026-01-01` is a string.
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _text_as_it_stands)


def _expanded_size(node: Node, known: dict[int, int], around: set[int]) -> int:
    if id(node) in known:
        return known[id(node)]
    if id(node) in around:
        raise YamlRefusedError("an alias inside what it stands for", node)
    if isinstance(node, ScalarNode):
        return 1
    around.add(id(node))
    children: list[Node] = (
        list(node.value) if isinstance(node, SequenceNode) else [part for pair in node.value for part in pair]
    )
    size = 1 + sum(_expanded_size(child, known, around) for child in children)
    around.discard(id(node))
    known[id(node)] = size
    return size


def _child(node: Node, step: str | int) -> tuple[Any, Node] | None:
    if isinstance(node, MappingNode):
        pairs = {key.value: (key.start_mark, value) for key, value in node.value}
        # Fields can be written in either spelling.
        return pairs.get(str(step)) or next((pairs[key] for key in pairs if camel(key) == step), None)
    if isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark, node.value[step]
    return None


MAX_DOCUMENTS = 1000
MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_INPUT_CHARS = 64
"""Maximum length of a wrong word that an error repeats."""

_LIST_FIELDS = frozenset({"kind", "items", "nextPageToken"})
_LIST_KINDS = {kind.list_kind: kind for kind in ResourceKind}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedDocument:
    """A document and its source."""

    document: AnyDocument
    where: str
    """Such as "agents.yaml, document 3 (line 41)"."""

    @property
    def label(self) -> str:
        """Returns KIND/NAME."""
        return self.document.label


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raw:
    """A parsed, unchecked document of JSON types."""

    value: Any
    source: str
    number: int
    yaml: YamlDocument | None

    def where(self, path: tuple[str | int, ...]) -> str:
        line = f" (line {self.yaml.line(path)})" if self.yaml is not None else ""
        return f"{self.source}, document {self.number}{line}"


def read_documents(text: str, source: str) -> tuple[SourcedDocument, ...]:
    """Returns the documents of a YAML stream or a JSON text, including the items of lists (`kind: ModelList`).

    `status` is dropped. Raises as `read_texts`.
    """
    return read_texts([(text, source)])


def read_texts(texts: Iterable[tuple[str, str]]) -> tuple[SourcedDocument, ...]:
    """Like `read_documents`, for several texts with their sources.

    Raises REQUEST_TOO_LARGE, MALFORMED_REQUEST or INVALID_ARGUMENT; the error lists each wrong value with its source
    and, if known, document, line and field. If one text is wrong, nothing is returned.
    """
    found, refused = [], _Refused()
    for text, source in texts:
        if len(text.encode("utf-8", "surrogatepass")) > MAX_FILE_BYTES:
            raise WeftError(
                Reason.REQUEST_TOO_LARGE, f"{source}: larger than {MAX_FILE_BYTES // 1024**2} MiB; apply it in parts"
            )
        try:
            for raw in _parse(text, source):
                for each in _documents_of(raw, refused):
                    found.append(each)
                    _refuse_too_many(len(found) + refused.documents, source)
        except FieldError as error:
            refused.errors.append(error)
    if refused.errors:
        raise refused_together(refused.errors, refused.omitted)
    return tuple(found)


def _refuse_too_many(documents: int, source: str) -> None:
    if documents > MAX_DOCUMENTS:
        raise WeftError(
            Reason.REQUEST_TOO_LARGE, f"{source}: more than {MAX_DOCUMENTS:,} documents; apply them in parts"
        )


@dataclass(slots=True)
class _Refused:
    """Errors found in documents so far."""

    errors: list[FieldError] = field(default_factory=list)
    omitted: int = 0
    """Number of errors beyond those that are listed."""
    documents: int = 0
    """Number of documents with errors."""


def parse_document(value: Any, kind: ResourceKind | None = None) -> AnyDocument:
    """Returns the document in JSON types; `kind` is the required kind, which `value` may then omit.

    Raises INVALID_ARGUMENT naming the first wrong field.
    """
    try:
        return _checked(value, kind)
    except RuleError as error:
        raise invalid_field(_field_path(error.path) or "document", error.problem) from None


def refuse_repeats(documents: tuple[SourcedDocument, ...]) -> None:
    """Raises INVALID_ARGUMENT if two documents have the same name, unless their kinds share no names."""
    first: dict[tuple[ResourceKind | None, str], SourcedDocument] = {}
    repeated = []
    for sourced in documents:
        kind = sourced.document.kind
        space = None if KINDS[kind].shares_namespace else kind
        known = first.setdefault((space, sourced.document.name), sourced)
        if known is not sourced:
            why = f"{known.label} has this name already, in {known.where}"
            repeated.append(invalid_field(f"{sourced.where}: name", why))
    if repeated:
        raise refused_together(repeated)


def _parse(text: str, source: str) -> Iterator[_Raw]:
    # YAML is not a superset of JSON: it reads escapes of characters beyond the basic plane differently.
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
            raise _not_yaml(error, f"{source}, document {number}", text) from error
        if found is not None:
            yield _Raw(value=found.value, source=source, number=number, yaml=found)


_HINTS = (
    ("mapping values are not allowed", "a text with a colon needs quotes; else the line is indented too far"),
    ("expected <block end>", "the line is indented unlike the lines that it belongs to"),
    ("could not find expected ':'", "write `name: value`, with a space after the colon"),
    ("expected ',' or", "a bracket is not closed, or a comma is missing"),
    ("while scanning a quoted scalar", "a quote is not closed"),
    ("found unknown escape character", "in double quotes a backslash begins an escape; use single quotes"),
    ("undefined alias", "a text that begins with * or & needs quotes"),
    ("could not determine a constructor", "tags such as !!python are not supported"),
    ("expected the node content", "a value is missing, or the text ends within a bracket"),
    ("cannot start any token", "a text that begins with this character needs quotes"),
)
"""Parser messages and how to fix the file."""


def yaml_problem(error: Exception, text: str) -> str:
    """Returns what is wrong with an invalid YAML text, and how to fix it if known."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        return "it has a character that may not stand in YAML"
    if mark is not None and _is_indented_by_tab(text, mark.line):
        return "tabs cannot indent; use spaces"
    said = " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
    return next((hint for part, hint in _HINTS if part in said), said) or "a value cannot be read"


def _is_indented_by_tab(text: str, line: int) -> bool:
    lines = text.splitlines()
    found = lines[line] if line < len(lines) else ""
    return "\t" in found[: len(found) - len(found.lstrip())]


def _not_yaml(error: Exception, where: str, text: str) -> FieldError:
    mark = getattr(error, "problem_mark", None)
    line = f" (line {mark.line + 1})" if mark is not None else ""
    refused = error.problem if isinstance(error, YamlRefusedError) else ""
    return FieldError(f"{where}{line}", refused or yaml_problem(error, text), Reason.MALFORMED_REQUEST)


def _documents_of(raw: _Raw, refused: _Refused) -> Iterator[SourcedDocument]:
    """Yields the documents in a parsed one; adds errors to `refused`."""
    value = raw.value
    kind = _LIST_KINDS.get(value["kind"]) if isinstance(value, dict) and isinstance(value.get("kind"), str) else None
    if kind is None:
        yield from _sourced(raw, value, (), None, refused)
        return
    items = value.get("items")
    if not isinstance(items, list) or not value.keys() <= _LIST_FIELDS:
        raise invalid_field(f"{raw.where(())}: items", f"a {kind.list_kind} has kind and items, a list")
    for index, item in enumerate(items):
        yield from _sourced(raw, item, ("items", index), kind, refused)


def _sourced(
    raw: _Raw, value: Any, base: tuple[str | int, ...], kind: ResourceKind | None, refused: _Refused
) -> Iterator[SourcedDocument]:
    try:
        yield SourcedDocument(document=_checked(value, kind), where=raw.where(base))
    except RuleError as error:
        refused.documents += 1
        _refuse_too_many(refused.documents, raw.source)
        named = error.all[: max(0, MAX_REFUSALS - len(refused.errors))]
        refused.errors += [_placed(raw, (*base, *each.path), each.problem) for each in named]
        refused.omitted += error.omitted + len(error.all) - len(named)


def _placed(raw: _Raw, place: tuple[str | int, ...], problem: str) -> FieldError:
    path = _field_path(place)
    return invalid_field(f"{raw.where(place)}: {path}" if path else raw.where(place), problem)


def _checked(value: Any, kind: ResourceKind | None) -> AnyDocument:
    """Returns the document. Raises RuleError with the paths of wrong values."""
    if not isinstance(value, dict):
        raise RuleError("a document is a mapping of names to values, beginning with kind")
    word = value.get("kind", kind.value if kind is not None else None)
    if not isinstance(word, str):
        raise RuleError(f"must be one of {', '.join(ResourceKind)}", "kind")
    try:
        found = parse_kind(word, "kind")
    except FieldError as error:
        raise RuleError(error.message.removeprefix("kind: "), "kind") from None
    if kind is not None and found is not kind:
        raise RuleError(f"must be {kind.value} here", "kind")
    return read_document(found, {key: part for key, part in value.items() if key not in ("kind", "status")})


def _field_path(path: tuple[str | int, ...]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step[:MAX_INPUT_CHARS]}"
    return text.removeprefix(".")


class _JsonRefusedError(Exception):
    """JSON that uses a feature not accepted here."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _JsonRefusedError(f"the key {twice[:MAX_INPUT_CHARS]!r} stands twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise _JsonRefusedError(f"{name} is not a number")


def yaml_text(value: Any) -> str:
    """Returns one YAML document with multi-line strings as blocks."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)


class _Dumper(yaml.SafeDumper):
    """Writes multi-line strings as blocks if they can be read back unchanged, else with escapes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if _fits_a_block(data) else None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


def _fits_a_block(text: str) -> bool:
    # Blocks also break at other line separators, and strip leading and trailing white space.
    lines = text.split("\n")
    plain_lines = all(line.isprintable() and line == line.rstrip() for line in lines)
    return len(lines) > 1 and plain_lines and lines[0] == lines[0].lstrip() != ""


_Dumper.add_representer(str, _Dumper.represent_str)
