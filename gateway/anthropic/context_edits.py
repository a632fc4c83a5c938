"""Edits of a conversation that a request asks for: old tool results and thinking are removed. Pure.

The client keeps its copy. Edits are done in the order given, each on what the ones before have left.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from gateway.answers.compaction import CompactionPlan
from gateway.intake.request_model import MAX_INT32, OpenModel, StopAtFirstError, StrictModel
from weft.api.common.v1 import chat_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.requests.request_values import CHARS_PER_TOKEN

CLEAR_TOOL_USES, CLEAR_THINKING, COMPACT = "clear_tool_uses_", "clear_thinking_", "compact_"
"""Beginnings of the types of edits; a date follows."""
_CLEARED = "[This old tool result was cleared to save context.]"
_CLEARED_INPUT = "{}"
MAX_EDITS = 16

Count = Annotated[int, Field(ge=0, le=MAX_INT32)]


class Amount(StrictModel):
    """A number of tokens, tool uses or turns."""

    type: Literal["input_tokens", "tool_uses", "thinking_turns"]
    value: Count


def _turns(value: object) -> object:
    return None if value in ("all", {"type": "all"}) else value


class ClearToolUses(StrictModel):
    """Replaces old results of tools by a note."""

    type: str
    trigger: Amount = Amount.model_construct(type="input_tokens", value=100_000)
    keep: Amount = Amount.model_construct(type="tool_uses", value=3)
    clear_at_least: Amount | None = None
    exclude_tools: Annotated[list[str], StopAtFirstError()] | None = None
    clear_tool_inputs: bool | Annotated[list[str], StopAtFirstError()] | None = None
    """Whether the calls lose their input too; a list: those of these tools."""


class ClearThinking(StrictModel):
    """Removes the thinking of old turns."""

    type: str
    keep: Annotated[Amount | None, BeforeValidator(_turns)] = Amount.model_construct(type="thinking_turns", value=1)
    """None: all is kept."""


class Compact(StrictModel):
    """Puts a summary in the place of the conversation."""

    type: str
    trigger: Amount | None = None
    pause_after_compaction: bool | None = None
    instructions: str | None = None


class OtherEdit(OpenModel):
    """An edit that weft does not know."""

    type: str


def _kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    for known in (CLEAR_TOOL_USES, CLEAR_THINKING, COMPACT):
        if isinstance(kind, str) and kind.startswith(known):
            return f"~{known}"
    return "~other"


Edit = Annotated[
    Annotated[ClearToolUses, Tag(f"~{CLEAR_TOOL_USES}")]
    | Annotated[ClearThinking, Tag(f"~{CLEAR_THINKING}")]
    | Annotated[Compact, Tag(f"~{COMPACT}")]
    | Annotated[OtherEdit, Tag("~other")],
    Discriminator(_kind),
]


class ContextEdits(StrictModel):
    """What is done with a long conversation."""

    edits: Annotated[list[Edit], Field(max_length=MAX_EDITS), StopAtFirstError()] | None = None


class CompactionConfig(StrictModel):
    """Asks for a summary as the answer."""

    type: Literal["summarize"]
    instructions: str | None = None
    """Used in place of weft's own."""


_COMPACT_TOKENS = 150_000
AppliedEdit = dict[str, Any]


def compaction_plan(management: ContextEdits | None) -> CompactionPlan | None:
    """Returns when the conversation is compacted before its answer; None: never."""
    for edit in (management and management.edits) or ():
        if isinstance(edit, Compact):
            return CompactionPlan(
                threshold=edit.trigger.value if edit.trigger is not None else _COMPACT_TOKENS,
                instructions=(edit.instructions or "").strip(),
                pauses=bool(edit.pause_after_compaction),
            )
    return None


def edited(
    chat: chat_pb2.ChatPayload, edits: Sequence[Edit], tokens: int
) -> tuple[chat_pb2.ChatPayload, list[AppliedEdit]]:
    """Returns the edited chat and what was done, for the answer; the chat itself if nothing was.

    `tokens`: the expected length of its prompt.
    """
    applied = list[AppliedEdit]()
    scale = tokens / max(1, estimated_prompt_tokens(chat))
    for edit in edits:
        short = chat_pb2.ChatPayload()
        short.CopyFrom(chat)
        if isinstance(edit, ClearToolUses):
            done = _clear_tool_uses(short, edit, tokens)
            name = "cleared_tool_uses"
        elif isinstance(edit, ClearThinking):
            done = _clear_thinking(short, edit)
            name = "cleared_thinking_turns"
        else:
            continue
        cleared = round((estimated_prompt_tokens(chat) - estimated_prompt_tokens(short)) * scale)
        cleared += round((_thinking_chars(chat) - _thinking_chars(short)) / CHARS_PER_TOKEN)
        least = edit.clear_at_least.value if isinstance(edit, ClearToolUses) and edit.clear_at_least else 0
        if done and cleared >= least:
            chat, tokens = short, max(0, tokens - cleared)
            applied.append({"type": edit.type, name: done, "cleared_input_tokens": max(0, cleared)})
    return chat, applied


def _clear_tool_uses(chat: chat_pb2.ChatPayload, edit: ClearToolUses, tokens: int) -> int:
    """Clears results in a chat; returns their number."""
    uses = list(_uses(chat))
    if (len(uses) if edit.trigger.type == "tool_uses" else tokens) <= edit.trigger.value:
        return 0
    excluded, inputs, count = set(edit.exclude_tools or ()), edit.clear_tool_inputs, 0
    for call, result in uses[: max(0, len(uses) - edit.keep.value)]:
        if call.name in excluded:
            continue
        if inputs is True or (isinstance(inputs, list) and call.name in inputs):
            call.arguments_text = _CLEARED_INPUT
        if [part.text for part in result.content] != [_CLEARED]:
            del result.content[:]
            result.content.add(text=_CLEARED)
            count += 1
    return count


def _uses(chat: chat_pb2.ChatPayload) -> Iterator[tuple[chat_pb2.ToolCallRecord, chat_pb2.ChatMessage]]:
    """Yields each call of a tool that has a result, with the result, in order."""
    calls = {call.id: call for message in chat.messages for call in message.tool_calls}
    for message in chat.messages:
        # One without content is about to be run by the gateway.
        if (
            message.role == chat_pb2.ROLE_TOOL
            and message.content
            and (call := calls.get(message.tool_call_id)) is not None
        ):
            yield call, message


def _clear_thinking(chat: chat_pb2.ChatPayload, edit: ClearThinking) -> int:
    """Removes thinking from a chat; returns the number of turns that had it."""
    if edit.keep is None:
        return 0
    turns = list[list[chat_pb2.ChatMessage]]()
    is_new = True
    for message in chat.messages:
        is_new = is_new or message.role == chat_pb2.ROLE_USER
        if message.reasoning or message.signed_reasoning:
            if is_new:
                turns.append([])
            turns[-1].append(message)
            is_new = False
    old = turns[: max(0, len(turns) - edit.keep.value)]
    for message in (message for turn in old for message in turn):
        message.ClearField("reasoning")
        message.ClearField("signed_reasoning")
    return len(old)


def _thinking_chars(chat: chat_pb2.ChatPayload) -> int:
    """Returns the characters of thinking, which estimates of prompts leave out."""
    return sum(len(message.reasoning) for message in chat.messages)
