"""Several choices from an engine that gives fewer per request: further requests for the rest, one after the other.

llama-server gives as many choices as the model has slots and refuses more; many servers ignore `n` and give one.
"""

import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from weft.api.common.v1 import chat_pb2, completion_pb2, event_pb2, receipt_pb2
from weft.dispatch.frames import Frame, GenerationPayload, has_content
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

Ask = Callable[[GenerationPayload], AsyncGenerator[Frame]]
"""Sends one request; its answer may have fewer choices than requested."""
_REFUSED = re.compile(r"\bn_cmpl\b|[`'\" ]n[`'\" ]|\bslots?\b|\bchoices?\b|\bcompletions\b|best_of", re.IGNORECASE)


class Choices:
    """The choices of requests to one server; learns how many it gives per request."""

    def __init__(self) -> None:
        self._too_many: int | None = None
        """The smallest number that the server has refused or not given; None: none so far."""

    def are_several(self, payload: GenerationPayload) -> bool:
        """Whether a request asks for several choices of one prompt."""
        if isinstance(payload, completion_pb2.CompletionPayload) and len(payload.prompts) != 1:
            return False
        return isinstance(payload, completion_pb2.CompletionPayload | chat_pb2.ChatPayload) and payload.choice_count > 1

    async def frames(
        self, payload: chat_pb2.ChatPayload | completion_pb2.CompletionPayload, ask: Ask
    ) -> AsyncGenerator[Frame]:
        """Yields the frames of all choices, with the usage of all requests. Raises as `ask`."""
        wanted, given, total = payload.choice_count, 0, receipt_pb2.Receipt()
        while given < wanted:
            left = wanted - given
            count = 1 if self._too_many is not None and left >= self._too_many else left
            ended, has_begun = 0, False
            try:
                async with aclosing(ask(_part(payload, count, given))) as frames:
                    async for frame in frames:
                        has_begun = has_begun or has_content(frame)
                        ended += sum(bool(event.delta.finish_reason) for event in frame)
                        shown = _shown(frame, given, total, is_last=given + ended >= wanted)
                        if shown:
                            yield shown
            except WeftError as refused:
                if count == 1 or has_begun or not _refuses(refused):
                    raise
                self._too_many = count
                continue
            if ended < count:
                self._too_many = ended + 1
            given += ended


def _refuses(error: WeftError) -> bool:
    return error.reason is Reason.BACKEND_REJECTED and _REFUSED.search(error.message) is not None


def _part(payload: GenerationPayload, count: int, given: int) -> GenerationPayload:
    part = type(payload)()
    part.CopyFrom(payload)  # type: ignore[arg-type]  # of the same type
    part.choice_count = count
    if count == 1:
        part.ClearField("choice_count")
    if given and part.sampling.HasField("seed"):
        # With the same seed, each choice would be the first one again.
        part.sampling.seed += given
    return part


def _shown(frame: Frame, given: int, total: receipt_pb2.Receipt, *, is_last: bool) -> Frame:
    """Returns the events of a request behind `given` choices; adds its figures to `total`."""
    shown: Frame = []
    for event in frame:
        kind = event.WhichOneof("event")
        if kind == "delta":
            event.delta.index += given
        elif kind == "finished":
            _add(total, event.finished.receipt)
        if kind not in {"usage", "finished"} and not (given and kind == "warning"):
            shown.append(event)
    if is_last and total.HasField("usage"):
        shown.append(event_pb2.InferenceEvent(usage=total.usage))
        shown.append(event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=total)))
    return shown


def _add(total: receipt_pb2.Receipt, more: receipt_pb2.Receipt) -> None:
    for figure, value in more.usage.ListFields():
        setattr(total.usage, figure.name, getattr(total.usage, figure.name) + value)
    total.usage.SetInParent()
    total.tokens_per_second = more.tokens_per_second
    times = [(total.gpu_time, more.gpu_time)]
    times += [(getattr(total.engine_timings, time.name), value) for time, value in more.engine_timings.ListFields()]
    for sum_, value in times:
        sum_.FromNanoseconds(sum_.ToNanoseconds() + value.ToNanoseconds())
