"""A message whose request edits or compacts its conversation: what is done, and what the answer says of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from typing_extensions import override

from gateway.answers.answer_builder import AnswerIdentity
from gateway.answers.compaction import CompactionPlan, summary_request, summary_text
from gateway.answers.generation import Work
from gateway.answers.summary_passes import NOT_REPEATABLE, SummaryPasses, is_repeated
from gateway.anthropic.context_edits import Edit, OtherEdit, compaction_plan, edited
from gateway.anthropic.message_context import SUMMARY, ManagedContext
from gateway.anthropic.message_stream import MessagesAnswer, MessagesStream
from gateway.anthropic.schema import CountTokensRequest
from gateway.openai.extension_fields import unsupported
from gateway.server_tools.request_tools import RequestTools
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.errors.error_tree import invalid_field


def managed(work: Work, params: CountTokensRequest, hosted: RequestTools | None = None) -> ManagedContext:
    """Returns what is done to the conversation of a request. `hosted`: the tools that the gateway runs for it.

    Raises INVALID_ARGUMENT for two kinds at once.
    """
    management, config, chat = params.context_management, params.compaction, work.payload
    assert isinstance(chat, chat_pb2.ChatPayload)
    if config is not None:
        if management is not None:
            raise invalid_field("compaction", "cannot be combined with 'context_management'")
        instructions = (config.instructions or "").strip()
        plan = CompactionPlan(instructions=instructions, replaces=bool(instructions))
        asked = summary_request(chat, instructions, replaces=plan.replaces)
        return ManagedContext(asked, plan=plan, is_summary=True)
    edits: Sequence[Edit] = (management and management.edits) or ()
    model = work.context.model
    tokens = work.deps.prompt_counts.expected_of(chat, model, estimated_prompt_tokens(chat)) if edits else 0
    short, applied = edited(chat, edits, tokens)
    found = ManagedContext(short, applied, compaction_plan(management))
    for index, edit in enumerate(edits):
        if isinstance(edit, OtherEdit):
            found.warnings.append(
                unsupported(f"context_management.edits[{index}]", "is not supported; it was not done")
            )
    if hosted is not None and hosted.first:
        # The conversation ends in the middle of a turn of the gateway's.
        found.plan = None
    if found.plan is not None and is_repeated(work.context):
        found.plan = None
        found.warnings.append(unsupported("context_management", NOT_REPEATABLE))
    return found


def compacting(work: Work, context: ManagedContext) -> Work:
    """Returns the work of a request whose conversation is managed."""
    changed = replace(work, payload=context.chat, warnings=[*work.warnings, *context.warnings])
    if context.is_summary:
        changed = replace(changed, context=replace(work.context, compaction=receipt_pb2.Compaction()))
        assert context.plan is not None
        return replace(changed, layers=(SummaryPasses(changed, context.plan).or_in_parts,))
    if context.plan is None:
        return changed
    return replace(changed, layers=(*work.layers, SummaryPasses(changed, context.plan, context.note)))


class SummaryAnswer(MessagesAnswer):
    """Builds a message that is a summary."""

    def __init__(self, identity: AnswerIdentity, context: ManagedContext) -> None:
        super().__init__(identity)
        self.context: ManagedContext = context
        self._said: list[str] = []

    @override
    def _add_delta(self, delta: event_pb2.Delta) -> None:
        self._said.append(delta.text)
        if delta.finish_reason:
            self._close_choice(0)
            self._finish = delta.finish_reason

    @override
    def _forget(self) -> None:
        super()._forget()
        self._said.clear()

    @override
    def _document(self) -> dict[str, object]:
        self.context.block = _summary_block(self._said, self._finish)
        return super()._document()


class SummaryStream(MessagesStream):
    """Encodes a message that is a summary, once it is complete."""

    def __init__(self, identity: AnswerIdentity, context: ManagedContext) -> None:
        super().__init__(identity, estimated_prompt_tokens(context.chat))
        self.context: ManagedContext = context
        self._said: list[str] = []

    @override
    def _encode_delta(self, delta: event_pb2.Delta, out: list[bytes]) -> None:
        self._said.append(delta.text)
        if delta.finish_reason:
            self._close_choice(0)
            self._finish = delta.finish_reason

    @override
    def _finish_blocks(self, out: list[bytes]) -> None:
        self.context.block = _summary_block(self._said, self._finish)
        self._send_block(self.context.block, out)


def _summary_block(said: Sequence[str], finish: int) -> dict[str, Any]:
    """Returns the block of a summary. Raises as `summary_text`."""
    return {"type": SUMMARY, "content": summary_text(said, is_cut=finish == event_pb2.FINISH_REASON_LENGTH)}
