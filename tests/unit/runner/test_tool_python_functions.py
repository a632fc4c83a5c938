import asyncio
import concurrent.futures
import dataclasses
import itertools
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from kit.failures import fails
from pydantic import BaseModel, Field

from runner_svc.tools import python_functions
from runner_svc.tools.port import ToolOutcome, ToolSettings
from runner_svc.tools.python_functions import DaemonThreads
from runner_svc.tools.tool_box import build_tool_box
from weft.kernel.errors.error_tree import FieldError, WeftError

MODULE = "tools_of_this_test"


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Person(BaseModel):
    name: str
    age: int | None = None


def everything(  # noqa: PLR0917
    text: str,
    number: int,
    ratio: float,
    flag: bool,
    items: list[str],
    table: dict[str, int],
    mode: Literal["fast", "slow"],
    point: Point,
    person: Person,
    note: str | None = None,
    size: Annotated[int, Field(ge=1, description="How many.")] = 3,
) -> dict[str, Any]:
    """Take everything.

    Args:
        text: Some text.
    """
    return {
        "kinds": [type(value).__name__ for value in (text, number, ratio, flag, items, table, mode, point, person)],
        "defaults": [note, size],
    }


def positional(a: int, /, b: int, *, json: int = 1, _c: int = 2) -> str:
    """Add up."""
    return f"{a + b + json + _c}"


async def gentle(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def no_parameters() -> None:
    """Do nothing."""


def leave() -> str:
    """Leave."""
    sys.exit("bye")


async def leave_softly() -> str:
    """Leave."""
    sys.exit("bye")


def circular() -> list[Any]:
    """Go round."""
    ring: list[Any] = []
    ring.append(ring)
    return ring


def stop_iteration() -> str:
    """Stop."""
    raise StopIteration("odd")


def cancel() -> str:
    """Cancel."""
    raise concurrent.futures.CancelledError("gave up")


def undocumented(a: int) -> int:
    return a


def unannotated(a) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Guess."""
    return int(a)


def starred(*numbers: int) -> int:
    """Add up."""
    return sum(numbers)


def double_starred(**numbers: int) -> int:
    """Add up."""
    return sum(numbers.values())


def strange(lock: threading.Lock) -> None:
    """Take a lock."""


def piecemeal() -> Iterator[int]:
    """Count for ever."""
    yield from itertools.count()


async def softly_piecemeal() -> AsyncIterator[int]:
    """Say one thing."""
    yield 1


class MuteExit(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def leave_mute() -> str:
    """Leave."""
    raise MuteExit


def dangling(a: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Take what is not there."""


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = ModuleType(MODULE)
    tools.__dict__.update({name: value for name, value in globals().items() if callable(value)})
    monkeypatch.setitem(sys.modules, MODULE, tools)


def tool(function: str, timeout: float = 5.0) -> ToolSettings:
    return ToolSettings(type="python", name="tool", function=f"{MODULE}:{function}", timeout_seconds=timeout)


async def run(function: str, timeout: float = 5.0, **arguments: Any) -> ToolOutcome:
    return await build_tool_box([tool(function, timeout)]).run("tool", arguments)


def test_schema_comes_from_annotations_and_description_from_the_docstring() -> None:
    (picked,) = build_tool_box([tool("everything")]).pick(["tool"])
    properties = picked.parameters["properties"]
    assert picked.description.startswith("Take everything.")
    assert picked.parameters["type"] == "object"
    assert picked.parameters["additionalProperties"] is False
    assert picked.parameters["required"][:2] == ["text", "number"]
    assert "note" not in picked.parameters["required"]
    assert properties["text"] == {"type": "string"}
    assert properties["mode"] == {"type": "string", "enum": ["fast", "slow"]}
    assert properties["size"] == {"type": "integer", "minimum": 1, "default": 3, "description": "How many."}
    assert properties["table"] == {"type": "object", "additionalProperties": {"type": "integer"}}
    assert "title" not in json.dumps(picked.parameters["properties"])


async def test_arguments_have_the_annotated_types() -> None:
    box = build_tool_box([tool("everything")])
    arguments = box.check(
        "tool",
        '{"text": "a", "number": 1, "ratio": 2, "flag": true, "items": ["b"], "table": {"c": 1}, "mode": "fast", '
        '"point": {"x": 1}, "person": {"name": "Ada"}}',
    )
    outcome = await box.run("tool", arguments)
    assert json.loads(outcome.content) == {
        "kinds": ["str", "int", "float", "bool", "list", "dict", "str", "Point", "Person"],
        "defaults": [None, 3],
    }


async def test_parameters_of_every_kind_and_name_are_passed() -> None:
    assert (await run("positional", a=1, b=2)).content == "6"
    assert (await run("positional", a=1, b=2, json=10, _c=20)).content == "33"


async def test_coroutine_function_is_awaited_and_cancelled() -> None:
    assert (await run("gentle", seconds=0)).content == "done"
    assert "within 0.02 s" in (await run("gentle", timeout=0.02, seconds=600)).content


async def test_non_text_results_become_json() -> None:
    assert (await run("no_parameters")).content == "null"


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("leave", "SystemExit: bye"),
        ("leave_softly", "SystemExit: bye"),
        ("leave_mute", "MuteExit: its message cannot be read"),
        ("stop_iteration", "StopIteration: odd"),
        ("cancel", "CancelledError: gave up"),
        ("circular", "ValueError: Circular reference"),
    ],
)
async def test_function_cannot_crash_the_runner(function: str, says: str) -> None:
    outcome = await run(function)
    assert outcome.failed
    assert says in outcome.content


async def test_hanging_threads_are_counted_and_further_calls_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_functions, "MAX_THREADS_PER_TOOL", 2)
    release = threading.Event()

    def hang() -> str:
        """Hang."""
        release.wait(30)
        return "released"

    monkeypatch.setattr(sys.modules[MODULE], "hang", hang, raising=False)
    box = build_tool_box([tool("hang", timeout=0.02)])
    outcomes = [await box.run("tool", {}) for _ in range(3)]
    assert ["within 0.02 s" in outcome.content for outcome in outcomes] == [True, True, False]
    assert "2 earlier calls of tool are still running" in outcomes[2].content
    release.set()
    until = time.monotonic() + 5
    while (outcome := await box.run("tool", {})).failed:
        assert time.monotonic() < until
    assert outcome.content == "released"


async def test_call_without_a_thread_does_not_count_as_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 16 calls at the limit of threads, the tool was never run again."""
    threads = DaemonThreads("tool", 1)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await threads.run(lambda: "answer")
    assert await threads.run(lambda: "answer") == "answer"


async def test_hanging_thread_does_not_prevent_process_exit() -> None:
    program = (
        "import asyncio, sys, time\n"
        "from runner_svc.tools.python_functions import DaemonThreads\n"
        "async def main():\n"
        "    try:\n"
        "        await asyncio.wait_for(DaemonThreads('t', 1).run(lambda: time.sleep(600)), 0.05)\n"
        "    except TimeoutError:\n"
        "        print('left')\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, out) == (0, b"left\n")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("nothing_here", "has no function nothing_here"),
        ("Person", "has no function Person"),
        ("undocumented", "no docstring"),
        ("unannotated", "parameter a has no annotation"),
        ("starred", r"takes \*numbers"),
        ("double_starred", r"takes \*numbers"),
        ("strange", "annotation cannot become a schema|cannot be offered"),
        ("dangling", "annotation cannot become a schema"),
        ("piecemeal", "piecemeal yields"),
        ("softly_piecemeal", "softly_piecemeal yields"),
    ],
)
def test_unsupported_function_is_refused_with_the_field(function: str, says: str) -> None:
    with fails(match=says, field="runners.a.tools.tool.function"):
        build_tool_box([tool(function)], where="runners.a.tools")


@pytest.mark.parametrize("text", ["os.path", "os:", ":join", "no_such_module_here:f", "os:path.nothing"])
def test_reference_to_a_non_function_is_refused(text: str) -> None:
    with fails(field="tools.tool.function"):
        build_tool_box([ToolSettings(type="python", name="tool", function=text)])


def test_module_that_fails_on_import_is_reported_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken_tools_module.py").write_text("import sys\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(FieldError, match="cannot import broken_tools_module: SystemExit: no licence"):
        build_tool_box([ToolSettings(type="python", name="tool", function="broken_tools_module:f")])


def test_invalid_arguments_are_refused_before_the_function_is_called() -> None:
    box = build_tool_box([tool("positional")])
    with pytest.raises(WeftError, match="'b' is a required property"):
        box.check("tool", '{"a": 1}')
    with pytest.raises(WeftError, match="'d' was unexpected"):
        box.check("tool", '{"a": 1, "b": 2, "d": 3}')
