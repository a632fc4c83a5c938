"""Comments of the protos by full name: descriptions for JSON schemas and pages.

They are read from the .proto files, which are in the package and beside it in a checkout; only when a schema is made.
"""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

import weft

_BLOCK = re.compile(r"(?:message|enum|oneof)\s+(\w+)\s*\{")
_MEMBER = re.compile(r"(?:optional |repeated )?(?:map<[^>]+>|[\w.]+)? ?\b(\w+) = \d+")


def comment_of(file: str, full_name: str) -> str:
    """Returns the comment above a message, an enum, a field or an enum's value of a file; empty: there is none."""
    return _comments(file).get(full_name, "")


@cache
def _comments(file: str) -> Mapping[str, str]:
    package = Path(weft.__file__).parent
    folder = next((each for each in (package / "protos", package.parent / "protos") if (each / file).is_file()), None)
    return MappingProxyType({} if folder is None else dict(_read((folder / file).read_text("utf-8"))))


def _read(text: str) -> Iterator[tuple[str, str]]:
    """Yields the comments of a file by full name. A oneof is no scope: its fields are those of the message."""
    scope: list[str] = []
    comment: list[str] = []
    option_depth = 0
    for line in map(str.strip, text.splitlines()):
        block = _BLOCK.match(line)
        member = None if option_depth else _MEMBER.match(line)
        if line.startswith("//"):
            comment.append(line.removeprefix("//").strip())
            continue
        if line.startswith("package "):
            scope = [line.removeprefix("package ").rstrip(";")]
        elif block is not None and not option_depth:
            yield _name(scope, block[1]), " ".join(comment)
            # An empty block ends where it begins.
            if not line.endswith("}"):
                scope.append("" if line.startswith("oneof") else block[1])
        elif member is not None and not line.startswith("option "):
            yield _name(scope, member[1]), " ".join(comment)
        if block is None:
            option_depth += line.count("{") + line.count("[") - line.count("}") - line.count("]")
        if option_depth < 0:
            option_depth = 0
            scope.pop()
        comment = []


def _name(scope: list[str], name: str) -> str:
    return ".".join([part for part in scope if part] + [name])
