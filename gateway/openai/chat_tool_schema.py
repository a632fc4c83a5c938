"""Tools of a chat completion, and which of them must be called."""

from typing import Annotated, Literal

from pydantic import Field, Tag

from gateway.intake.request_model import JsonMap, StopAtFirstError, StrictModel, by_shape

MAX_NAME_CHARS = 64
MAX_FUNCTIONS = 1024

FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS, pattern=r"^[A-Za-z0-9_-]+$")]


class FunctionDefinition(StrictModel):
    """A function the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: JsonMap | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class ToolDefinition(StrictModel):
    """A tool. Types other than `function` are accepted and dropped."""

    type: str
    function: FunctionDefinition | None = None


class NamedFunction(StrictModel):
    """The function that must be called."""

    name: FunctionName


class AllowedTool(StrictModel):
    """One of the tools that may be called."""

    type: str
    function: NamedFunction | None = None


class AllowedTools(StrictModel):
    """The tools of the request that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_FUNCTIONS), StopAtFirstError()]


class ToolChoiceObject(StrictModel):
    """A tool choice by name, or by several names. `custom` is understood, and refused."""

    type: Literal["function", "allowed_tools", "custom"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~text")] | Annotated[ToolChoiceObject, Tag("~object")],
    by_shape("Input should be 'none', 'auto', 'required', a named function or allowed tools"),
]

FunctionChoice = Annotated[
    Annotated[Literal["none", "auto"], Tag("~text")] | Annotated[NamedFunction, Tag("~object")],
    by_shape("Input should be 'none', 'auto' or a named function"),
]
"""`function_call`, the older form of `tool_choice`."""
