"""Names of functions in `namespace` tools, which clients use to group the tools of one MCP server. Pure.

Engines have no namespaces: a function is offered under a flat name, and its calls get namespace and name back.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from gateway.openai.chat_builder import FUNCTION
from gateway.openai.chat_schema import MAX_NAME_CHARS
from gateway.responses.schema import ResponseTool

NAMESPACE = "namespace"
"""The type of a tool that groups others."""
SEARCH = "tool_search"
"""The type of a search for tools, and its name for the model."""
_SEPARATOR = "__"
_DIGEST_CHARS = 8
_UNUSABLE = re.compile(r"[^A-Za-z0-9_-]")


class Member(NamedTuple):
    """A function of a namespace."""

    namespace: str
    name: str


CLIENT_SEARCH = Member("", "")
"""Stands for the client's search for tools among the functions of namespaces."""


def is_client_search(tool: ResponseTool) -> bool:
    """Whether a tool is the client's search for tools."""
    return tool.type == SEARCH and tool.execution == "client"


def flat_name(member: Member) -> str:
    """Returns the name of a function for engines, such as `mcp__files__read`; long names end with a digest."""
    separator = "" if member.namespace.endswith(_SEPARATOR) else _SEPARATOR
    plain = f"{member.namespace}{separator}{member.name}"
    flat = _UNUSABLE.sub("_", plain)
    return flat if len(flat) <= MAX_NAME_CHARS else _digested(flat, plain)


def _digested(flat: str, plain: str) -> str:
    digest = hashlib.sha256(plain.encode("utf-8", "replace")).hexdigest()[:_DIGEST_CHARS]
    return f"{flat[: MAX_NAME_CHARS - _DIGEST_CHARS - 1]}_{digest}"


def members_by_flat_name(tools: Sequence[ResponseTool] | None) -> Mapping[str, Member]:
    """Returns the functions of all namespaces by the unique names under which they are offered.

    The client's search for tools is `CLIENT_SEARCH`, unless a function has its name.
    """
    taken = {tool.name for tool in tools or () if tool.type == FUNCTION}
    found: dict[str, Member] = {}
    for tool in tools or ():
        for _, function in functions_of(tool, ""):
            member = Member(tool.name or "", function.name or "")
            flat = flat_name(member)
            if flat in taken or found.get(flat, member) != member:
                flat = _digested(flat, "\0".join(member))
            found[flat] = member
    if SEARCH not in taken and any(map(is_client_search, tools or ())):
        found[SEARCH] = CLIENT_SEARCH
    return found


def functions_of(tool: ResponseTool, field: str) -> Iterator[tuple[str, ResponseTool]]:
    """Yields the functions of a namespace, with their paths in the request."""
    for index, function in enumerate((tool.tools if tool.type == NAMESPACE else None) or ()):
        if function.type == FUNCTION and function.name:
            yield f"{field}.tools[{index}]", function
