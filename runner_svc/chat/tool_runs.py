"""Runs the tools that a turn called, side by side."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner_svc.tools.box import ToolBox
from runner_svc.tools.port import ToolOutcome
from weft.api.common.v1 import event_pb2, json_value_pb2

MAX_TOLD_CHARS = 64 * 1024
"""Longest content of a `tool_result` event. The model may be told more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCall:
    """A call that can be run."""

    id: str
    tool: str
    """The tool's name in the configuration."""
    arguments: Mapping[str, Any]
    """They fit the tool's schema."""
    as_message: json_value_pb2.JsonObject
    """The same, as events carry them."""
    remote: bool = False
    """Whether the call sends bytes off the premises."""

    def called(self) -> event_pb2.InferenceEvent:
        """The event that says that it is run."""
        return event_pb2.InferenceEvent(
            tool_call=event_pb2.ToolCall(id=self.id, name=self.tool, arguments=self.as_message, remote=self.remote)
        )

    def answered(self, outcome: ToolOutcome) -> event_pb2.InferenceEvent:
        """The event that says what came of it."""
        content = outcome.content
        if len(content) > MAX_TOLD_CHARS:
            content = f"{content[:MAX_TOLD_CHARS]}\n[cut: the model was told {len(content)} characters]"
        return event_pb2.InferenceEvent(
            tool_result=event_pb2.ToolResult(id=self.id, content=content, failed=outcome.failed)
        )


async def run_tools(box: ToolBox, calls: Sequence[CheckedCall]) -> AsyncGenerator[tuple[CheckedCall, ToolOutcome]]:
    """Each call with its outcome, in the order in which they end. Leaving early cancels what still runs."""
    running = {asyncio.create_task(box.run(call.tool, call.arguments)): call for call in calls}
    try:
        pending = set(running)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                yield running[task], task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
