"""Counts of prompts by the tokenizers of their models, never estimates."""

from collections.abc import Callable

from starlette.responses import Response

from gateway.answers.answer_builder import with_warnings
from gateway.answers.generation import Work
from gateway.answers.sse import receipt_facts
from gateway.answers.unary import JsonAnswer, UnaryAnswer, cut_off_seconds, warning_headers
from gateway.media import supply
from gateway.request_facts import facts_of
from weft.api.common.v1 import chat_pb2, receipt_pb2, tokenize_pb2
from weft.dispatch.operation_table import TOKENIZE
from weft.dispatch.presets import changed_warning
from weft.kernel.text.json_lines import encode_json


def counted(work: Work, shown: Callable[..., object], *others: chat_pb2.ChatPayload) -> Response:
    """Returns the response of a count. `shown` returns its JSON values from the counts of the work's chat and `others`.

    All have the media of the work.
    """
    deps = work.deps

    async def produce() -> JsonAnswer:
        assert isinstance(work.payload, chat_pb2.ChatPayload)
        if work.media is not None:
            for chat in (work.payload, *others):
                await supply(chat, work.media, deps.media)
        facts_of(work.scope).was_dispatched = True
        counts, headers, warnings = list[int](), list[tuple[bytes, bytes]](), [*work.warnings]
        for chat in (work.payload, *others):
            call = deps.dispatcher.call(TOKENIZE, work.context, tokenize_pb2.TokenizePayload(chat=chat))
            counts.append((await call.result()).count)
            receipt = call.receipt or receipt_pb2.Receipt()
            headers = receipt_facts(receipt)
            warnings = [*work.warnings, *map(changed_warning, receipt.changed_parameters)]
        body = with_warnings(encode_json(shown(*counts)), warnings)
        return JsonAnswer(body, [*headers, *warning_headers(warnings)])

    return UnaryAnswer(produce, cut_off_seconds=cut_off_seconds(deps, work.context))
