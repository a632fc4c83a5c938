"""What an answer of the Messages API says of its conversation: token counts, edits and a summary."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.answers.compaction import CompactionPlan, Summary, compacted
from gateway.anthropic.context_edits import AppliedEdit
from weft.api.common.v1 import chat_pb2, usage_pb2, warning_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens

SUMMARY = "compaction"
"""The type of the block of a summary."""


def message_usage(usage: usage_pb2.Usage) -> dict[str, object]:
    """Returns token counts. Anthropic counts prompt tokens that are read from or written to a cache separately."""
    cached, written = usage.cached_prompt_tokens, usage.cache_write_prompt_tokens
    counts: dict[str, object] = {
        "input_tokens": max(usage.prompt_tokens - cached - written, 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        counts["output_tokens_details"] = {"thinking_tokens": usage.reasoning_tokens}
    return counts


@dataclass(slots=True)
class ManagedContext:
    """What was done to the conversation of a message, for its answer."""

    chat: chat_pb2.ChatPayload
    """The edited chat."""
    applied: Sequence[AppliedEdit] | None = None
    """The edits; None: the request asks for none, and the answer lists none."""
    plan: CompactionPlan | None = None
    warnings: list[warning_pb2.Warning] = field(default_factory=list)
    block: dict[str, Any] | None = None
    """The summary with which the message begins; None: none."""
    usage: usage_pb2.Usage = field(default_factory=usage_pb2.Usage)
    """Tokens of the summary, which those of the message exclude."""
    is_summary: bool = False
    """Whether the summary is the whole message."""
    estimated_tokens: int = 0
    """Of the prompt after the summary; 0: there is none."""

    @property
    def blocks(self) -> list[dict[str, Any]]:
        """The blocks with which the message begins."""
        return [] if self.block is None else [self.block]

    @property
    def stop_reason(self) -> str | None:
        """Why the message ends, if its summary is all of it."""
        pauses = self.plan is not None and self.plan.pauses and self.block is not None and self.block["content"]
        return "compaction" if pauses or self.is_summary else None

    def note(self, summary: Summary | None, usage: usage_pb2.Usage) -> None:
        """Begins the message with a summary; None: it failed."""
        self.block = {"type": SUMMARY, "content": None if summary is None else summary.text}
        self.usage = usage
        if summary is not None:
            self.estimated_tokens = estimated_prompt_tokens(compacted(self.chat, summary.text))

    def members(self) -> dict[str, object]:
        """Returns the members of the answer about edits."""
        return {} if self.applied is None else {"context_management": {"applied_edits": self.applied}}

    def counts(self, usage: usage_pb2.Usage) -> dict[str, object]:
        """Returns the members of the message's usage about its summary."""
        if self.block is None:
            return {}
        passes = [{"type": SUMMARY, **message_usage(usage if self.is_summary else self.usage)}]
        if self.stop_reason is None:
            passes.append({"type": "message", **message_usage(usage)})
        return {"iterations": passes}
