"""Python functions as tools: schemas from annotations, descriptions from docstrings."""

import asyncio
import contextvars
import importlib
import inspect
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_json
from typing_extensions import override

from runner_svc.tools.port import ToolDescription, ToolOutcome, ToolRunner, ToolSettings, described
from runner_svc.tools.schemas import object_schema
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason

MAX_THREADS_PER_TOOL = 16
"""Maximum number of concurrent calls of a synchronous function, including hanging ones."""
MAX_DESCRIPTION_CHARACTERS = 4096
_KEYWORD, _POSITIONAL = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY


class PythonFunction(ToolRunner):
    """A Python function as a ToolRunner.

    A coroutine function is awaited on the runner's event loop and can be cancelled; it must not block. Any other
    function runs on a thread, which continues after a timeout because threads cannot be ended.
    """

    def __init__(self, settings: ToolSettings, field: str) -> None:
        """Imports the function. Raises INVALID_ARGUMENT naming the configuration field, `field`."""
        self.settings = settings
        self._name = settings.name
        self._function = _imported(settings.function or "", field)
        self._parameters = _parameters(self._function, field)
        self._arguments = _arguments_model(self._function, self._parameters, field)
        self._description = ToolDescription(
            name=settings.name,
            description=_docstring(self._function, field),
            parameters=_schema(self._arguments, field),
        )
        self._is_coroutine = inspect.iscoroutinefunction(self._function)
        self._threads = DaemonThreads(settings.name, MAX_THREADS_PER_TOOL)

    async def start(self) -> None:
        """Does nothing: a function is ready once it is imported."""

    async def stop(self) -> None:
        """Does nothing: hanging threads end with the process."""

    @override
    def why_missing(self, name: str) -> str:
        return f"{self._name} is a single function; there is no {name}"

    @override
    def descriptions(self) -> Sequence[ToolDescription]:
        return (self._description,)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        """Calls the function. Raises its exceptions; ValueError for arguments of wrong types."""
        if name != self._name:
            raise ValueError(self.why_missing(name))
        positional, keyword = self._bound(arguments)
        if not self._is_coroutine:
            return ToolOutcome(content=await self._threads.run(lambda: _text(self._function(*positional, **keyword))))
        try:
            return ToolOutcome(content=_text(await self._function(*positional, **keyword)))
        except (Exception, asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - such as SystemExit, which would end the runner's event loop
            raise RuntimeError(described(error)) from None

    def _bound(self, arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        checked = self._arguments.model_validate(dict(arguments))
        values = [getattr(checked, _field(number)) for number in range(len(self._parameters))]
        positional = [value for value, one in zip(values, self._parameters, strict=True) if one.kind is _POSITIONAL]
        keyword = {
            one.name: value for value, one in zip(values, self._parameters, strict=True) if one.kind is not _POSITIONAL
        }
        return positional, keyword


def _imported(reference: str, field: str) -> Callable[..., Any]:
    module_name, separator, path = reference.partition(":")
    if not separator or not module_name or not path:
        raise invalid_field(field, "must be like package.module:function")
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the module's code may raise anything
        raise invalid_field(
            field, f"cannot import {module_name}: {type(error).__name__}: {str(error)[:512]}"
        ) from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found) or inspect.isclass(found):
        raise invalid_field(field, f"{module_name} has no function {path}")
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise invalid_field(field, f"{path} yields; a tool returns its result in one piece")
    return typing.cast("Callable[..., Any]", found)


def _parameters(function: Callable[..., Any], field: str) -> list[inspect.Parameter]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise invalid_field(field, "the function has no readable signature") from error
    for one in parameters:
        if one.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise invalid_field(
                field, f"the function takes *{one.name}, which cannot be described to a model; name each parameter"
            )
        if one.annotation is inspect.Parameter.empty:
            raise invalid_field(field, f"the parameter {one.name} has no annotation, which its schema needs")
    return parameters


def _arguments_model(
    function: Callable[..., Any], parameters: Sequence[inspect.Parameter], field: str
) -> type[BaseModel]:
    """Returns a pydantic model of the parameters. Their names are field aliases, so that `json` or `_x` work."""
    fields: dict[str, Any] = {}
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        for number, one in enumerate(parameters):
            default = ... if one.default is inspect.Parameter.empty else one.default
            fields[_field(number)] = (hints[one.name], Field(default, alias=one.name))
        return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
    except (NameError, TypeError, PydanticUserError) as error:
        raise invalid_field(field, f"an annotation cannot become a schema: {str(error)[:512]}") from error


def _schema(arguments: type[BaseModel], field: str) -> dict[str, Any]:
    try:
        schema = arguments.model_json_schema(by_alias=True, schema_generator=_WithoutTitles)
        schema.pop("title", None)
        return object_schema(schema)
    except (PydanticUserError, ValueError) as error:
        raise invalid_field(field, f"the function cannot be offered: {str(error)[:512]}") from error


class _WithoutTitles(GenerateJsonSchema):
    """Schema generator without titles, which only repeat names and cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> Literal[False]:  # noqa: ARG002 - pydantic's hook
        return False


def _docstring(function: Callable[..., Any], field: str) -> str:
    text = inspect.getdoc(function)
    if not text:
        raise invalid_field(field, "the function has no docstring, which is its description for the model")
    return text[:MAX_DESCRIPTION_CHARACTERS]


def _field(number: int) -> str:
    return f"argument_{number}"


def _text(value: Any) -> str:
    """Returns a result as text: strings unchanged, other values as JSON."""
    return value if isinstance(value, str) else to_json(value, inf_nan_mode="strings").decode()


class DaemonThreads:
    """A bounded number of daemon threads, one per call.

    Not an executor: a hanging thread cannot be ended, and executors wait for their threads when the process exits.
    """

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._free = threading.Semaphore(max_threads)

    async def run(self, function: Callable[[], str]) -> str:
        """Runs a function; returns or raises as it does. Raises TOO_MANY_RESOURCES if all threads are busy or hang.

        The thread of a cancelled call continues, and counts until it has ended.
        """
        if not self._free.acquire(blocking=False):
            raise WeftError(
                Reason.TOO_MANY_RESOURCES,
                f"{self._max_threads} earlier calls of {self._name} are still running; it was not run again",
            )
        future = Future[str]()
        future.set_running_or_notify_cancel()
        context = contextvars.copy_context()

        def work() -> None:
            result, fault = "", None
            try:
                result = context.run(function)
            except BaseException as error:  # noqa: BLE001 - a tool that calls sys.exit() must not end the thread unnoticed
                # Others are exceptions that asyncio does not pass on, or that would stop it.
                passes = isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError)
                fault = error if passes else RuntimeError(described(error))
            self._free.release()
            if fault is None:
                future.set_result(result)
            else:
                future.set_exception(fault)

        try:
            threading.Thread(target=work, name=f"tool {self._name}", daemon=True).start()
        except RuntimeError:  # the limit of threads is reached
            self._free.release()
            raise
        return await asyncio.wrap_future(future)
