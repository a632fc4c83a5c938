"""/v1/responses/compact and /input_tokens: a conversation is summarized, or its tokens are counted."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import override

from gateway.answers.compaction import CompactionPlan, seal_of
from gateway.answers.generation import Work, unary
from gateway.answers.prompt_count import counted
from gateway.answers.summary_passes import SummaryPasses
from gateway.intake.body import read_json_body
from gateway.intake.json_guard import parse
from gateway.request_facts import facts_of
from gateway.responses.compaction_items import TRIGGER, SummaryItems, user_messages
from gateway.responses.conversations import find
from gateway.responses.document import ResponseDocument, usage_json
from gateway.responses.history import conversation_of, items_to_store
from gateway.responses.output import new_response_id
from gateway.responses.payload import Conversation, entries_of, own_items, to_response_request
from gateway.responses.response_stream import ResponsesAnswer
from gateway.responses.retrieval import Responses, Stored
from gateway.responses.schema import InputItem, ResponsesRequest
from gateway.responses.tool_search import with_known_tools
from weft.api.common.v1 import receipt_pb2
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json


class CompactedConversation(ResponsesAnswer):
    """Builds the items that replace a conversation."""

    def __init__(self, document: ResponseDocument, kept: Sequence[dict[str, Any]]) -> None:
        """`kept`: the user's messages."""
        super().__init__(document)
        self._kept = kept

    @override
    def body(self) -> bytes:
        self.conclude(self._ended())
        document = self.document
        found: dict[str, object] = {
            "id": document.response_id,
            "object": "response.compaction",
            "created_at": document.created,
            "output": [*self._kept, *document.items.json("completed")],
            "usage": usage_json(document.usage),
        }
        return encode_json(found | ({"warnings": self.warnings} if self.warnings else {}))


async def compact_conversation(responses: Stored, request: Request) -> Response:
    """Returns the items that replace a conversation. Nothing is stored."""
    work, params, conversation = await _work(
        responses, request, Operation.CHAT, InputItem.model_construct(type=TRIGGER)
    )
    for name in ("stream", "background"):
        if getattr(params, name):
            raise invalid_field(name, "must be false: a conversation is compacted in one answer")
    arrived, seal = facts_of(work.scope).arrived, conversation.seal_of_answer
    document = ResponseDocument(params, new_response_id(), clock=work.deps.clock, is_stored=False, arrived=arrived)
    assert seal is not None, "the trigger was accepted"
    document.items = SummaryItems(document.response_id, seal)
    kept = items_to_store(list(user_messages(entries_of(params, conversation))), document.response_id)
    shown = [{"status": "completed"} | item for item in msgspec.json.decode(kept)]
    work = replace(work, context=replace(work.context, compaction=receipt_pb2.Compaction()))
    work = replace(work, layers=(SummaryPasses(work, CompactionPlan()).or_in_parts,))
    return unary(work, CompactedConversation(document, shown))


async def count_input_tokens(responses: Stored, request: Request) -> Response:
    """Counts the tokens of a request with the model's tokenizer; the count is never an estimate."""
    work, _, _ = await _work(responses, request, Operation.TOKENIZE)
    return counted(work, lambda count: {"object": "response.input_tokens", "input_tokens": count})


async def _work(
    responses: Responses, request: Request, operation: Operation, *added: InputItem
) -> tuple[Work, ResponsesRequest, Conversation]:
    """Returns the translated request, and what it was translated from; `added`: items after its own."""
    deps, scope = responses.deps, request.scope
    raw = await read_json_body(scope, request.receive, deps.config)
    params = parse(ResponsesRequest, raw, max_depth=deps.config.limits.max_json_depth)
    context = deps.context(scope, surface="responses", params=params, model=params.model, operation=operation)
    record = None if params.conversation is None else await find(responses, context.tenant, params.conversation)
    has_earlier = (params.previous_response_id or params.conversation) is not None
    is_continued = params.input is None and params.messages is None and has_earlier
    conversation = await conversation_of(
        responses.background or responses.store,
        context.tenant,
        [*([] if is_continued else own_items(params)), *added],
        params.previous_response_id,
        max_members=deps.config.limits.max_json_members,
        seal=seal_of(deps.summaries, context.tenant),
        record=record,
    )
    params = with_known_tools(params, [*conversation.earlier, *conversation.items])
    media = deps.request_media(params)
    made = to_response_request(params, conversation, media, deps.config.limits)
    return Work(deps, scope, context, made.payload, made.warnings, media), params, conversation
