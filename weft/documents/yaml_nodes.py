"""YAML of documents: safe types only, every size bounded before anything is built, each value with its line; and back.

JSON is for programs: complete, with `status`. YAML is for files: what was declared and differs from its default, so
that it can be kept and applied again, a virtual resource as a public one too.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from weft.documents.documents import Document, EventDocument

MAX_YAML_NODES = 100_000
"""Values of all documents together, each counted as often as aliases repeat it."""
MAX_YAML_DEPTH = 24

_MERGE_TAG = "tag:yaml.org,2002:merge"


class YamlRefusedError(yaml.MarkedYAMLError):
    """It is YAML, but not of the kind that is taken here."""

    def __init__(self, problem: str, node: Node | None = None) -> None:
        super().__init__(problem=problem, problem_mark=node.start_mark if node is not None else None)


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One document of a stream: its value, and where each part of it stands."""

    value: Any
    root: Node

    def line(self, path: tuple[str | int, ...]) -> int:
        """The line, from 1, of the value at `path`, or of the innermost value around it."""
        node, mark = self.root, self.root.start_mark
        for step in path:
            found = _child(node, step)
            if found is None:
                break
            mark, node = found
        return int(mark.line) + 1


def yaml_documents(text: str, *, merge_keys: bool = False) -> Iterator[YamlDocument | None]:
    """The documents of a stream, None for an empty one; `merge_keys` are taken or not. Raises yaml.YAMLError."""
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
    """The safe loader, without duplicate keys and dates, unwanted merge keys, and anything too large or too deep."""

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
        """Count every value as often as aliases repeat it."""
        self._expanded_nodes += _expanded_size(root, {}, set())
        if self._expanded_nodes > MAX_YAML_NODES:
            raise YamlRefusedError(f"more than {MAX_YAML_NODES:,} values once its aliases are followed", root)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        # Not when it is built: merging writes what is merged into the nodes, and then keys do stand there twice.
        self._refuse_odd_keys(node)
        return node

    def _refuse_odd_keys(self, node: MappingNode) -> None:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE_TAG and not self._merge_keys:
                raise YamlRefusedError("merge keys (<<) are not taken", key_node)
            if not isinstance(key_node, ScalarNode):
                raise YamlRefusedError("a key must be a plain word", key_node)
            if (key_node.tag, key_node.value) in seen:
                raise YamlRefusedError(f"the key {key_node.value[:64]!r} stands here twice", key_node)
            seen.add((key_node.tag, key_node.value))


def _text_as_it_stands(loader: yaml.SafeLoader, node: ScalarNode) -> Any:
    return loader.construct_scalar(node)


# JSON has no dates, so there are none here: `description: 2026-01-01` is a text.
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
        for key, value in node.value:
            if key.value == str(step):
                return key.start_mark, value
    elif isinstance(node, SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step].start_mark, node.value[step]
    return None


def plain(document: Document | EventDocument) -> dict[str, Any]:
    """The whole document as JSON types; what is not set is left out."""
    return document.model_dump(mode="json", by_alias=True, exclude_none=True)


def declared(document: Document) -> dict[str, Any]:
    """What the document declares as JSON types: without `status`, and without what is as it would be anyway."""
    return document.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"status"})


def to_yaml(documents: Iterable[Document]) -> str:
    """A stream of YAML documents that `apply` takes; empty for none."""
    return "---\n".join(yaml_text(declared(document)) for document in documents)


def yaml_text(value: Any) -> str:
    """One YAML document, texts of several lines as blocks."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=sys.maxsize)


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks where that is read back as it was, else with escapes."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if _fits_a_block(data) else None if data.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


def _fits_a_block(text: str) -> bool:
    # Blocks know more line breaks than "\n", and take white space at either end for layout.
    lines = text.split("\n")
    plain_lines = all(line.isprintable() and line == line.rstrip() for line in lines)
    return len(lines) > 1 and plain_lines and lines[0] == lines[0].lstrip() != ""


_Dumper.add_representer(str, _Dumper.represent_str)
