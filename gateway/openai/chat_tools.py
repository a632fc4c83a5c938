"""Tools and tool choice of a chat request, in the current form and the older one of functions."""

from gateway.config import RequestLimits
from gateway.openai.chat_schema import AllowedTools, ChatRequest, FunctionDefinition, NamedFunction, ToolChoiceObject
from weft.api.common.v1 import chat_pb2
from weft.dispatch.schema_guard import SchemaGuard
from weft.kernel.errors import invalid_field
from weft.kernel.json_objects import to_json_object

_TOOL_MODES: dict[str, chat_pb2.ToolChoice.Mode.ValueType] = {
    "none": chat_pb2.ToolChoice.MODE_NONE,
    "auto": chat_pb2.ToolChoice.MODE_AUTO,
    "required": chat_pb2.ToolChoice.MODE_REQUIRED,
}


def uses_functions(request: ChatRequest) -> bool:
    """Whether the answer must use the older form of calls, `function_call`."""
    return bool(request.functions)


def fill_tools(payload: chat_pb2.ChatPayload, request: ChatRequest, limits: RequestLimits) -> None:
    """Add tools and tool choice to a payload. Raises INVALID_ARGUMENT naming the wrong field."""
    if request.functions is not None or request.function_call is not None:
        _fill_functions(payload, request, limits)
        return
    tools = request.tools or []
    if len(tools) > limits.max_tools:
        raise invalid_field("tools", f"must have at most {limits.max_tools} entries")
    guard = SchemaGuard(limits.schemas)
    for index, tool in enumerate(tools):
        # Tools of a vendor's platform are left out, so that the model cannot call them.
        if tool.type != "function":
            continue
        field = f"tools[{index}].function"
        if tool.function is None:
            raise invalid_field(field, "is required for a tool of type 'function'")
        _fill_function(payload.tools.add().function, tool.function, field, guard)
    if request.tool_choice is not None:
        _fill_choice(payload, request.tool_choice)
    if request.parallel_tool_calls is not None:
        payload.parallel_tool_calls = request.parallel_tool_calls


def _fill_functions(payload: chat_pb2.ChatPayload, request: ChatRequest, limits: RequestLimits) -> None:
    functions, choice = request.functions or [], request.function_call
    if request.tools or request.tool_choice is not None:
        raise invalid_field("functions", "is the older form of 'tools': a request has one of the two")
    if len(functions) > limits.max_tools:
        raise invalid_field("functions", f"must have at most {limits.max_tools} entries")
    guard = SchemaGuard(limits.schemas)
    for index, function in enumerate(functions):
        _fill_function(payload.tools.add().function, function, f"functions[{index}]", guard)
    if isinstance(choice, NamedFunction):
        _require_named(payload, choice.name, "function_call.name")
        payload.tool_choice.function_name = choice.name
    elif choice is not None:
        payload.tool_choice.mode = _TOOL_MODES[choice]
    if functions:
        # The older form allows one call.
        payload.parallel_tool_calls = False


def _fill_function(target: chat_pb2.FunctionTool, function: FunctionDefinition, field: str, guard: SchemaGuard) -> None:
    target.name = function.name
    if function.description is not None:
        target.description = function.description
    if function.parameters is not None:
        schema = guard.require_safe(function.parameters, f"{field}.parameters")
        target.parameters.CopyFrom(to_json_object(schema, f"{field}.parameters"))
    if function.strict is not None:
        target.strict = function.strict


def _fill_choice(payload: chat_pb2.ChatPayload, choice: str | ToolChoiceObject) -> None:
    if isinstance(choice, str):
        if choice == "required" and not payload.tools:
            raise invalid_field("tool_choice", "cannot be 'required' without a tool of type 'function'")
        payload.tool_choice.mode = _TOOL_MODES[choice]
    elif choice.type == "custom":
        raise invalid_field("tool_choice.type", "cannot be 'custom': models here call tools of type 'function' only")
    elif choice.type == "function":
        if choice.function is None:
            raise invalid_field("tool_choice.function", "is required for type 'function'")
        _require_named(payload, choice.function.name, "tool_choice.function.name")
        payload.tool_choice.function_name = choice.function.name
    elif choice.allowed_tools is None:
        raise invalid_field("tool_choice.allowed_tools", "is required for type 'allowed_tools'")
    else:
        _fill_allowed(payload, choice.allowed_tools)


def _fill_allowed(payload: chat_pb2.ChatPayload, allowed: AllowedTools) -> None:
    """Adds only the allowed tools: engines have no such choice."""
    names: set[str] = set()
    for index, tool in enumerate(allowed.tools):
        if tool.type == "function" and tool.function is not None:
            field = f"tool_choice.allowed_tools.tools[{index}].function.name"
            _require_named(payload, tool.function.name, field)
            names.add(tool.function.name)
    if not names:
        raise invalid_field("tool_choice.allowed_tools.tools", "must have a tool of type 'function'")
    kept = [tool for tool in payload.tools if tool.function.name in names]
    del payload.tools[:]
    payload.tools.extend(kept)
    payload.tool_choice.mode = _TOOL_MODES[allowed.mode]


def _require_named(payload: chat_pb2.ChatPayload, name: str, field: str) -> None:
    if all(tool.function.name != name for tool in payload.tools):
        raise invalid_field(field, "names none of the tools")
