import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import fails

from runner_svc.tools import tool_box as box_module
from runner_svc.tools.port import MAX_FAILURE_BYTES, ToolDescription, ToolOutcome, ToolRunner, ToolSettings, bounded
from runner_svc.tools.tool_box import ToolBox, wire_names
from weft.kernel.errors.reasons import Reason

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


class Scripted(ToolRunner):
    def __init__(
        self, *names: str, source: str = "files", work: Callable[[], Awaitable[str]] | None = None, **limits: Any
    ) -> None:
        self.settings = ToolSettings(type="python", name=source, function="scripted:tool", **limits)
        self.names = names
        self.work = work
        self.down: str | None = None
        self.events: list[str] = []

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self) -> None:
        self.events.append("stop")

    def why_missing(self, name: str) -> str:
        return self.down or f"no {name}"

    def descriptions(self) -> Sequence[ToolDescription]:
        if self.down:
            return ()
        return [ToolDescription(name=name, description="", parameters=SCHEMA) for name in self.names]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolOutcome:
        assert self.work is not None
        return ToolOutcome(content=await self.work())


async def run(work: Callable[[], Awaitable[str]], timeout: float = 5.0, max_bytes: int = 1000) -> ToolOutcome:
    source = Scripted("files.read", work=work, timeout_seconds=timeout, max_output_bytes=max_bytes)
    return await ToolBox([source]).run("files.read", {})


async def test_tool_outside_the_permitted_names_is_neither_listed_nor_run() -> None:
    async def work() -> str:
        return "read"

    box = ToolBox([Scripted("files.read", "files.write", work=work)], only={"files.read"})
    assert box.names() == ("files.read",)
    assert [tool.name for tool in box.pick(["files.read"])] == ["files.read"]
    with fails(Reason.TOOL_UNAVAILABLE):
        box.pick(["files.write"])
    assert (await box.run("files.read", {})).content == "read"
    assert (await box.run("files.write", {})).failed


def test_available_tools_are_listed_without_those_of_an_offline_source() -> None:
    lost = Scripted("web.search", source="web")
    box = ToolBox(
        [
            lost,
            Scripted("files.write", "files.read", source="files"),
            Scripted("files.deep.read", source="files.deep"),
        ]
    )
    assert box.names() == ("files.deep.read", "files.read", "files.write", "web.search")
    assert len(box.pick(box.names())) == 4
    lost.down = "its server is down"
    assert box.names() == ("files.deep.read", "files.read", "files.write")


def test_picked_tools_have_unique_wire_names_distinct_from_taken_ones() -> None:
    both = ToolBox(
        [
            Scripted("files.read", "files.write", source="files"),
            Scripted("files_read", source="files_read"),
        ]
    )
    picked = both.pick(["files.read", "files_read", "files.write", "files.read"], taken={"files_write"})
    assert [(tool.name, tool.wire_name) for tool in picked] == [
        ("files.read", "files_read"),
        ("files_read", "files_read_2"),
        ("files.write", "files_write_2"),
    ]


@pytest.mark.parametrize(
    ("name", "down", "says"),
    [
        ("mail.send", None, "this runner does not have it"),
        ("filesystem", None, "this runner does not have it"),
        ("files.delete", None, "no files.delete"),
        ("files.read", "its server has ended", "its server has ended"),
    ],
)
def test_unusable_tool_is_reported_with_the_reason(name: str, down: str | None, says: str) -> None:
    source = Scripted("files.read")
    source.down = down
    with fails(Reason.TOOL_UNAVAILABLE, match=says) as caught:
        ToolBox([source]).pick([name])
    assert caught.value.metadata == {"tool": name}


def test_longest_matching_source_name_owns_a_tool() -> None:
    nested = ToolBox(
        [
            Scripted("files.read", source="files"),
            Scripted("files.old.read", source="files.old"),
        ]
    )
    assert [tool.name for tool in nested.pick(["files.old.read", "files.read"])] == ["files.old.read", "files.read"]


def test_arguments_are_validated_even_after_the_server_went_down() -> None:
    source = Scripted("files.read")
    box = ToolBox([source])
    box.pick(["files.read"])
    source.down = "gone"
    assert box.check("files.read", '{"n": 1}') == {"n": 1}
    with fails(Reason.TOOL_CALL_INVALID):
        box.check("files.read", '{"n": "x"}')
    with fails(Reason.TOOL_UNAVAILABLE):
        box.check("files.write", "{}")


async def test_tool_result_is_returned() -> None:
    async def answer() -> str:
        return "42"

    assert await run(answer) == ToolOutcome(content="42")


async def test_hanging_tool_times_out_and_the_model_is_informed() -> None:
    ended = asyncio.Event()

    async def hang() -> str:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return ""

    outcome = await run(hang, timeout=0.02)
    assert outcome.failed
    assert "within 0.02 s" in outcome.content
    assert ended.is_set()


async def test_tools_that_ignore_cancellation_are_abandoned_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_module, "CANCEL_GRACE_SECONDS", 0.01)
    monkeypatch.setattr(box_module, "MAX_ABANDONED_CALLS", 2)
    release = asyncio.Event()

    async def stubborn() -> str:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "too late"

    box = ToolBox([Scripted("files.read", work=stubborn, timeout_seconds=0.01)])
    outcomes = [await box.run("files.read", {}) for _ in range(3)]
    assert [outcome.failed for outcome in outcomes] == [True] * 3
    assert "did not answer" in outcomes[1].content
    assert "too many earlier tool calls" in outcomes[2].content
    release.set()
    await asyncio.sleep(0.01)
    assert not box._abandoned
    assert (await box.run("files.read", {})).content == "too late"


async def test_tool_exception_is_reported_without_a_traceback_and_bounded() -> None:
    async def fail() -> str:
        raise KeyError("x" * 10_000)

    outcome = await run(fail)
    assert outcome.failed
    assert outcome.content.startswith("The tool failed: KeyError: 'xxx")
    assert len(outcome.content) < MAX_FAILURE_BYTES + 100
    assert "Traceback" not in outcome.content


async def test_exception_without_a_message_is_reported_by_its_type() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    async def fail() -> str:
        raise MuteError

    assert (await run(fail)).content == "The tool failed: MuteError: its message cannot be read"


async def test_tool_that_cancels_itself_has_failed() -> None:
    async def cancel() -> str:
        raise asyncio.CancelledError

    assert (await run(cancel)).content == "The tool failed: it cancelled itself"


async def test_tool_that_raises_generator_exit_has_failed() -> None:
    async def leave() -> str:
        raise GeneratorExit

    assert (await run(leave)).content == "The tool failed: GeneratorExit: "


async def test_str_subclass_with_overridden_methods_is_plain_text() -> None:
    class Text(str):
        __slots__ = ()

        def encode(self, *_: object) -> bytes:
            raise RuntimeError("not so")

    async def answer() -> str:
        return Text("found")

    assert (await run(answer)).content == "found"


async def test_cancelling_the_run_cancels_the_tool() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def hang() -> str:
        started.set()
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()
        return ""

    task = asyncio.create_task(run(hang))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_fifty_megabyte_output_is_truncated_to_the_limit_and_the_model_is_informed() -> None:
    async def flood() -> str:
        return "x" * 50_000_000

    outcome = await run(flood, max_bytes=1000)
    assert outcome.cut
    assert outcome.content == "x" * 1000 + "\n[cut: 49999000 bytes more]"


@pytest.mark.parametrize(
    ("content", "max_bytes", "kept", "missing"),
    [("éééé", 5, "éé", 4), ("😀😀", 7, "😀", 4), ("abc", 2, "ab", 1)],
)
def test_output_is_truncated_between_characters(content: str, max_bytes: int, kept: str, missing: int) -> None:
    outcome = bounded(ToolOutcome(content=content), max_bytes)
    assert outcome == ToolOutcome(content=f"{kept}\n[cut: {missing} bytes more]", cut=True)


def test_output_of_exactly_the_limit_is_kept_and_lone_surrogates_are_replaced() -> None:
    assert bounded(ToolOutcome(content="abcd"), 4) == ToolOutcome(content="abcd")
    assert bounded(ToolOutcome(content="a\ud800b"), 10) == ToolOutcome(content="a?b")


async def test_unknown_tool_is_a_failed_outcome() -> None:
    outcome = await ToolBox([Scripted()]).run("mail.send", {})
    assert outcome == ToolOutcome(content="The tool failed: the tool mail.send is not configured", failed=True)


async def test_every_source_is_started_and_stopped() -> None:
    sources = [Scripted(source="s0"), Scripted(source="s1")]
    box = ToolBox(sources)
    await box.start()
    await box.stop()
    assert [source.events for source in sources] == [["start", "stop"]] * 2


def test_dots_and_colons_become_underscores() -> None:
    assert wire_names(["files.read", "a:b", "plain-name_1"]) == {
        "files.read": "files_read",
        "a:b": "a_b",
        "plain-name_1": "plain-name_1",
    }


def test_colliding_names_are_numbered_in_order() -> None:
    assert list(wire_names(["a.b", "a:b", "a_b"]).values()) == ["a_b", "a_b_2", "a_b_3"]


def test_taken_names_are_not_reused() -> None:
    assert wire_names(["files.read"], taken={"files_read", "files_read_2"}) == {"files.read": "files_read_3"}


def test_long_names_that_differ_at_the_end_stay_distinct() -> None:
    long = ["x" * 100 + "1", "x" * 100 + "2"]
    wires = list(wire_names(long).values())
    assert wires == ["x" * 64, "x" * 62 + "_2"]


@given(st.lists(st.text(alphabet="ab._:-é", max_size=80), max_size=20), st.sets(st.text(alphabet="ab_", max_size=3)))
def test_wire_names_are_always_unique_valid_and_not_taken(names: list[str], taken: set[str]) -> None:
    wires = wire_names(names, taken)
    assert set(wires) == set(names)
    assert len(set(wires.values())) == len(wires)
    assert not taken & set(wires.values())
    assert all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", wire) for wire in wires.values())
    assert wire_names(names, taken) == wires
