"""Calls of a conversation's model for a summary, before an answer that would be too long."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from gateway.answers.compaction import (
    CompactionPlan,
    Summary,
    compacted,
    in_parts,
    summary_request,
    summary_text,
    whole_text,
)
from gateway.answers.generation import Work
from gateway.request_facts import facts_of
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, usage_pb2
from weft.dispatch.call import Call, Proceed, warned
from weft.dispatch.fleet import context_in
from weft.dispatch.frames import Frame, has_content
from weft.dispatch.history import unsupported
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.dispatch.request_receipt import RequestContext
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger

MAX_PASSES = 8
"""Maximum calls for one summary, if the conversation is longer than the context."""
_SHARES = (0.6, 0.3, 0.15)
"""Shares of the context for a part of the conversation; a smaller one is tried if the estimate was too low."""
NOT_REPEATABLE = "long conversations are not compacted in the background or with an Idempotency-Key"
_WAITING = frozenset({"queued", "loading", "progress"})

log = get_logger("weft.gateway")

OnSummary = Callable[[Summary | None, usage_pb2.Usage], None]
"""Called with the summary and its tokens before the answer begins; None: it failed."""


def is_repeated(context: RequestContext) -> bool:
    """Whether a retry must be the same request, which it is not after another summary."""
    return context.journal is not None and bool(context.journal.idempotency_key)


def _ignore(_summary: Summary | None, _usage: usage_pb2.Usage) -> None:
    """Does nothing."""


class SummaryPasses:
    """A layer around a chat that compacts it first if its plan or the context of its model requires that.

    Its calls have the request's id, and receipts of their own. If they fail, the chat is answered as it is, with a
    warning, or fails because it is too long.
    """

    def __init__(
        self, work: Work, plan: CompactionPlan, on_summary: OnSummary = _ignore, *, adds_usage: bool = False
    ) -> None:
        """`adds_usage`: whether the usage of the answer includes the tokens of the summary."""
        self._work = work
        self._plan = plan
        self._on_summary = on_summary
        self._adds_usage = adds_usage
        self._done = receipt_pb2.Compaction()
        self._failure: WeftError | None = None
        """Why a long conversation is answered uncompacted; None: it is not."""
        self._said = self._text = ""
        """The latest summary as the model wrote it, and as it is sent."""
        self._receipt: receipt_pb2.Receipt | None = None
        """That of the last pass of a complete summary."""

    async def __call__(self, call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        """Yields the frames of waiting for the summary, and of the answer."""
        async with aclosing(self._compact_if_due(call)) as waiting:
            async for frame in waiting:
                yield frame
        if self._failure is not None:
            proceed = self._without(call, self._failure, proceed)
        has_begun, too_long = False, None
        try:
            async with aclosing(self._answer(call, proceed)) as frames:
                async for frame in frames:
                    has_begun = has_begun or has_content(frame)
                    yield frame
        except WeftError as error:
            may_compact = call.context.compaction is None and not has_begun
            if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED or not may_compact:
                raise
            too_long = error
        if too_long is None:
            return
        call.receipt = None
        async with aclosing(self._compact(call, too_long)) as waiting:
            async for frame in waiting:
                yield frame
        async with aclosing(self._answer(call, proceed)) as frames:
            async for frame in frames:
                yield frame

    async def _compact_if_due(self, call: Call[Frame]) -> AsyncGenerator[Frame]:
        """As `_compact`, if the conversation is longer than planned; keeps a failure."""
        if not self._plan.is_due(call.payload, self._tokens(call)):
            return
        try:
            async with aclosing(self._compact(call)) as waiting:
                async for frame in waiting:
                    yield frame
        except WeftError as error:
            if error.reason is Reason.CANCELLED:
                raise
            # One that is too long is compacted in parts once its model has refused it.
            self._failure = None if error.reason is Reason.CONTEXT_LENGTH_EXCEEDED else error

    async def or_in_parts(self, call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        """A layer around a request for a summary, which is made in parts if it does not fit the context."""
        has_begun, too_long = False, None
        try:
            async with aclosing(proceed(call)) as frames:
                async for frame in frames:
                    has_begun = has_begun or has_content(frame)
                    yield frame
        except WeftError as error:
            if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED or has_begun:
                raise
            too_long = error
        if too_long is None:
            return
        chat = chat_pb2.ChatPayload()
        chat.CopyFrom(call.payload)
        # Without the request, which each part has.
        del chat.messages[-1]
        call.payload, call.receipt = chat, None
        async with aclosing(self._summarize(call, too_long)) as waiting:
            async for frame in waiting:
                yield frame
        call.receipt = self._receipt
        said = event_pb2.Delta(text=self._said, finish_reason=event_pb2.FINISH_REASON_STOP)
        yield [
            event_pb2.InferenceEvent(delta=said),
            event_pb2.InferenceEvent(usage=self._done.usage),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=self._receipt)),
        ]

    async def _compact(self, call: Call[Frame], too_long: WeftError | None = None) -> AsyncGenerator[Frame]:
        """Replaces the call's chat by its compacted form; otherwise as `_summarize`."""
        async with aclosing(self._summarize(call, too_long)) as waiting:
            async for frame in waiting:
                yield frame
        text = whole_text(self._text, call.payload, self._room(call))
        call.payload = compacted(call.payload, text)
        call.context = replace(call.context, compaction=self._done)
        self._note(Summary(text, whole=True))

    def _room(self, call: Call[Frame]) -> int:
        """Returns the context of the call's model or, if that is unknown, what its conversation may have."""
        view = self._work.deps.fleet.view
        known = context_in(view, *view.pool_members(call.context.model))
        return known or self._plan.threshold or self._tokens(call)

    async def _summarize(self, call: Call[Frame], too_long: WeftError | None) -> AsyncGenerator[Frame]:
        """Has a summary of the call's chat written; yields frames of waiting.

        `too_long`: why it is summarized in parts; None: it is summarized at once. It is raised if the parts fail.
        """
        chat: chat_pb2.ChatPayload = call.payload
        tokens, estimated = self._tokens(call), estimated_prompt_tokens(chat)
        most = self._room(call)
        for share in _SHARES if too_long is not None else (1.0,):
            parts = (
                (chat,)
                if too_long is None
                else in_parts(chat, int(most * share * estimated / max(1, tokens)), MAX_PASSES)
            )
            try:
                if not parts:
                    raise too_long or _nothing_to_compact()
                self._text = ""
                for part in parts:
                    asked = summary_request(part, self._plan.instructions, self._text, replaces=self._plan.replaces)
                    if too_long is not None:
                        asked.sampling.max_tokens = max(1, most // 4)
                    async with aclosing(self._pass(call, asked)) as waiting:
                        async for frame in waiting:
                            yield frame
                break
            except WeftError as error:
                if too_long is None or error.reason is Reason.CANCELLED:
                    raise
                if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED or share == _SHARES[-1]:
                    raise too_long from error

    async def _pass(self, call: Call[Frame], asked: chat_pb2.ChatPayload) -> AsyncGenerator[Frame]:
        """Asks for a summary, which becomes `_text`; yields frames of waiting. Raises as `summary_text`."""
        context = replace(call.context, journal=None, compaction=receipt_pb2.Compaction())
        work = replace(self._work, context=context, payload=asked, warnings=(), layers=())
        passed, pieces, is_cut = work.begin(whole=call.whole), list[str](), False
        async with aclosing(passed.chunks()) as frames:
            async for frame in frames:
                for event in frame:
                    if event.HasField("started"):
                        pieces.clear()
                    elif event.HasField("delta"):
                        pieces.append(event.delta.text)
                        is_cut = is_cut or event.delta.finish_reason == event_pb2.FINISH_REASON_LENGTH
                if waiting := [event for event in frame if event.WhichOneof("event") in _WAITING]:
                    yield waiting
        self._receipt = passed.receipt or receipt_pb2.Receipt()
        self._done.pass_count += 1
        _add(self._done.usage, self._receipt.usage)
        self._said = "".join(pieces)
        self._text = summary_text(pieces, is_cut=is_cut)

    async def _answer(self, call: Call[Frame], proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        """Yields the answer; if it pauses after a summary, only its end."""
        if self._plan.pauses and call.context.compaction is not None:
            call.receipt = self._receipt
            end = event_pb2.InferenceEvent(delta=event_pb2.Delta(finish_reason=event_pb2.FINISH_REASON_STOP))
            yield [end, event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=self._receipt))]
            return
        async with aclosing(proceed(call)) as frames:
            async for frame in frames:
                yield _with_usage(frame, self._done.usage) if self._adds_usage and self._done.pass_count else frame

    def _without(self, call: Call[Frame], why: WeftError, proceed: Proceed[Frame]) -> Proceed[Frame]:
        """Returns the rest of a call whose conversation was not compacted, with a warning."""
        log.warning("not compacted", request_id=call.context.request_id, reason=why.reason.name.lower())
        self._note(None)
        warning = unsupported("context_management", f"the conversation was not compacted: {why.log_message}")
        return partial(warned([warning]), proceed=proceed)

    def _note(self, summary: Summary | None) -> None:
        if not self._adds_usage:
            self._work.deps.metrics.tokens_used(facts_of(self._work.scope), self._done.usage)
        self._on_summary(summary, self._done.usage)

    def _tokens(self, call: Call[Frame]) -> int:
        """Returns the expected length of the call's prompt."""
        estimated = estimated_prompt_tokens(call.payload)
        return self._work.deps.prompt_counts.expected_of(call.payload, call.context.model, estimated)


def _nothing_to_compact() -> WeftError:
    return WeftError(Reason.CONTEXT_LENGTH_EXCEEDED, "the conversation has no messages to compact")


def _add(total: usage_pb2.Usage, more: usage_pb2.Usage) -> None:
    """Adds counts of tokens to a total."""
    for field, count in more.ListFields():
        if field.name == "prompt_estimated":
            total.prompt_estimated = True
        else:
            setattr(total, field.name, getattr(total, field.name) + count)


def _with_usage(frame: Frame, more: usage_pb2.Usage) -> Frame:
    """Returns a frame whose usage, if it has one, includes more tokens."""
    if not any(event.HasField("usage") for event in frame):
        return frame
    found: Frame = []
    for event in frame:
        if event.HasField("usage"):
            added = event_pb2.InferenceEvent(usage=event.usage)
            _add(added.usage, more)
            found.append(added)
        else:
            found.append(event)
    return found
