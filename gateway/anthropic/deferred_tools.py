"""Tools that a model learns of only once the client's own search has found them (`defer_loading`). Pure."""

from collections.abc import Iterable, Sequence

from gateway.anthropic.schema import (
    CountTokensRequest,
    FunctionTool,
    MessageParam,
    OtherTool,
    ToolParam,
    ToolReferenceBlock,
    ToolResultBlock,
)

_SEARCHES = "tool_search_tool_"
"""Beginning of the types of searches for tools that Anthropic runs."""


def offered(tools: Sequence[tuple[str, ToolParam]], request: CountTokensRequest) -> Iterable[tuple[str, ToolParam]]:
    """Returns the tools that the model learns of: deferred ones behind the others, in the order they were found.

    So the beginning of the prompt remains, and with it the prefix cache. Nothing is deferred if all tools are, or if
    the search is one that a server would run.
    """
    deferred = {
        tool.name: (field, tool) for field, tool in tools if isinstance(tool, FunctionTool) and tool.defer_loading
    }
    has_search = any(isinstance(tool, OtherTool) and tool.type.startswith(_SEARCHES) for _, tool in tools)
    if has_search or not 0 < len(deferred) < len(tools):
        return tools
    found = dict.fromkeys(_references(request.messages))
    if request.tool_choice is not None and request.tool_choice.name is not None:
        found[request.tool_choice.name] = None
    return [
        *(entry for entry in tools if not (isinstance(entry[1], FunctionTool) and entry[1].defer_loading)),
        *(deferred[name] for name in found if name in deferred),
    ]


def _references(messages: Sequence[MessageParam]) -> Iterable[str]:
    """Yields the names of tools that results refer to."""
    for message in messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                yield from (part.tool_name for part in block.content if isinstance(part, ToolReferenceBlock))
