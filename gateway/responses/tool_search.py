"""The client's search for tools: deferred tools are hidden until an item of the conversation has found them. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator

from pydantic import ValidationError

from gateway.openai.chat_builder import FUNCTION
from gateway.openai.chat_schema import FUNCTION_NAME_PATTERN, MAX_FUNCTION_NAME_CHARS
from gateway.responses.namespaces import NAMESPACE, is_client_search
from gateway.responses.schema import InputItem, ResponsesRequest, ResponseTool

SEARCH_OUTPUT = "tool_search_output"
_NAME = re.compile(rf"(?=.{{1,{MAX_FUNCTION_NAME_CHARS}}}$){FUNCTION_NAME_PATTERN}")


def with_known_tools(request: ResponsesRequest, items: Iterable[InputItem]) -> ResponsesRequest:
    """Returns the request with the tools that the model knows: those not deferred, and those that an item has found.

    Found ones stand behind the others in the order they were found, so that the beginning of the prompt remains.
    """
    tools = request.tools or ()
    if not any(map(is_client_search, tools)):
        return request
    known = [shown for tool in tools if (shown := _part(tool, _is_not_deferred)) is not None]
    names = {(_namespace(tool), each.name) for tool in known for each in _functions(tool)}
    for tool in _found(items):
        if (new := _unknown(tool, names)) is not None:
            known.append(new)
            names |= {(_namespace(tool), each.name) for each in _functions(new)}
    return request.model_copy(update={"tools": known})


def found_names(item: InputItem) -> str:
    """Returns the result of a search as the model reads it."""
    names = [f"{_namespace(tool)} {each.name}".strip() for tool in _found([item]) for each in _functions(tool)]
    return f"Found tools: {', '.join(names)}" if names else "No tools were found."


def _is_not_deferred(tool: ResponseTool) -> bool:
    return not tool.defer_loading


def _unknown(tool: ResponseTool, names: set[tuple[str, str | None]]) -> ResponseTool | None:
    """Returns what is new of a found tool; None: nothing."""
    of = _namespace(tool)
    return _part(tool, lambda each: (of, each.name) not in names and bool(_NAME.fullmatch(each.name or "")))


def _part(tool: ResponseTool, keeps: Callable[[ResponseTool], bool]) -> ResponseTool | None:
    """Returns a function, or a namespace with some of its functions; None: nothing of it is kept."""
    if tool.type == NAMESPACE:
        members = [each for each in tool.tools or () if keeps(each)]
        return tool.model_copy(update={"tools": members}) if members else None
    return tool if tool.type != FUNCTION or keeps(tool) else None


def _namespace(tool: ResponseTool) -> str:
    return (tool.name or "") if tool.type == NAMESPACE else ""


def _functions(tool: ResponseTool) -> Iterable[ResponseTool]:
    return (tool.tools or ()) if tool.type == NAMESPACE else (tool,)


def _found(items: Iterable[InputItem]) -> Iterator[ResponseTool]:
    """Yields the functions and namespaces that searches have found; others, and malformed ones, are left out."""
    for item in items:
        given = (item.model_extra or {}).get("tools") if item.kind == SEARCH_OUTPUT else None
        for each in given if isinstance(given, list) else ():
            try:
                tool = ResponseTool.model_validate(each)
            except ValidationError:
                continue
            if tool.type in {FUNCTION, NAMESPACE}:
                yield tool
