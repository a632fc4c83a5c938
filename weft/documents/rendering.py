"""Documents as JSON and YAML text.

JSON is for programs: complete, with `status`. YAML is for files: what was declared and differs from its default, so
that it can be kept and applied again, a virtual resource as a public one too.
"""

import sys
from collections.abc import Iterable
from typing import Any

import yaml

from weft.documents.documents import Document, EventDocument


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
