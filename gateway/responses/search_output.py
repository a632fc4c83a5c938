"""Searches that the gateway runs, in answers of the Responses API: items, events and citations.

Imported for the first response with a search.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from typing_extensions import override

from gateway.answers.generation import Work
from gateway.responses.document import ResponseDocument
from gateway.responses.namespaces import Member, members_by_flat_name
from gateway.responses.output import OUTPUT_TEXT, Item, OutputItems, Part
from gateway.responses.payload import wants_logprobs
from gateway.responses.response_stream import ResponsesAnswer, ResponsesStream
from gateway.responses.schema import ResponsesRequest
from gateway.responses.search_history import KeptSearch
from gateway.server_tools.loop import ToolLoop
from gateway.server_tools.pages import cited, result_text
from gateway.server_tools.request_tools import WEB_FETCH, WEB_SEARCH, RequestTools, ServerCall
from gateway.server_tools.tool import CallError, ToolAnswer
from weft.api.common.v1 import event_pb2
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.names import new_id

CALL = f"{WEB_SEARCH}_call"
SOURCES = f"{CALL}.action.sources"
RESULTS = f"{CALL}.results"


class SearchItems(OutputItems):
    """The items of a response with searches, and citations of the pages that they found."""

    def __init__(
        self,
        response_id: str,
        hosted: RequestTools,
        include: Collection[str],
        *,
        logprobs: bool,
        members: Mapping[str, Member],
    ) -> None:
        """`include`: what the request wants to see of a search."""
        self._hosted = hosted
        self._include = include
        self._searches: dict[str, Item] = {}
        super().__init__(response_id, logprobs=logprobs, members=members)

    def takes(self, event: event_pb2.InferenceEvent) -> bool:
        """Adds an event about a call that the gateway runs; False: it is another event."""
        kind = event.WhichOneof("event")
        if kind == "tool_call" and (call := self._hosted.calls.get(event.tool_call.id)) is not None:
            # What the response begins with stands before it.
            self.add(event_pb2.Delta())
            if self._open is not None:
                self._end_open("completed")
            self._searches[call.id] = self._begin_item(CALL, fields={"action": _action(call)})
            return True
        if kind == "tool_result" and (call := self._hosted.calls.get(event.tool_result.id)) is not None:
            item = self._searches.pop(call.id)
            item.extra = self._fields(call)
            self._end(item, "failed" if event.tool_result.failed else "completed")
            return True
        return False

    def _fields(self, call: ServerCall) -> dict[str, Any]:
        answer = call.answer or ToolAnswer(error=CallError.UNAVAILABLE)
        action = _action(call)
        if SOURCES in self._include and call.tool.name == WEB_SEARCH:
            action["sources"] = [{"type": "url", "url": page.url} for page in answer.pages]
        text = result_text(answer.pages, answer.error, call.tool.name)
        kept = KeptSearch(call.id, call.arguments_text, text, call.round, call.tool.name)
        fields: dict[str, Any] = {
            "action": action,
            "encrypted_content": self._hosted.seal(msgspec.json.encode(kept).decode()),
        }
        if RESULTS in self._include:
            fields["results"] = [{"url": page.url, "title": page.title, "text": page.text} for page in answer.pages]
        return fields | ({} if answer.error is None else {"error": answer.error.value})

    @override
    def _end_open(self, status: str) -> None:
        part = None if self._open is None or not self._open.parts else self._open.parts[-1]
        if self._open is not None and part is not None and part.kind == OUTPUT_TEXT:
            for start, end, page in cited(part.text, self._hosted.pages(WEB_SEARCH, WEB_FETCH)):
                part.annotations.append(
                    {
                        "type": "url_citation",
                        "url": page.url,
                        "title": page.title,
                        "start_index": start,
                        "end_index": end,
                    }
                )
                self.sink.annotated(self._open, part)
        super()._end_open(status)


def _action(call: ServerCall) -> dict[str, Any]:
    if call.tool.name == WEB_FETCH:
        return {"type": "open_page", "url": call.query}
    return {"type": "search", "query": call.query, "queries": [call.query]}


def with_searches(work: Work, document: ResponseDocument, params: ResponsesRequest, hosted: RequestTools) -> Work:
    """Returns the work of a model and the tools that the gateway runs; their items become those of the document."""
    document.items = SearchItems(
        document.response_id,
        hosted,
        params.include or (),
        logprobs=wants_logprobs(params),
        members=members_by_flat_name(params.tools),
    )
    document.show_hosted(params, hosted.fields)
    loop = ToolLoop(hosted, work.again, work.deps.clock, new_id=lambda: new_id("call"), defers=False)
    return replace(work, layers=(loop, *work.layers))


class SearchStream(ResponsesStream):
    """Encodes a streamed response with searches."""

    @override
    def _encode(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        items = self.document.items
        assert isinstance(items, SearchItems)
        self._out = out
        if not items.takes(event):
            super()._encode(event, out)

    @override
    def item_added(self, item: Item) -> None:
        super().item_added(item)
        if item.kind == CALL:
            self._emit_call(b"in_progress", item)
            self._emit_call(b"searching", item)

    @override
    def item_done(self, item: Item) -> None:
        if item.kind == CALL and item.status == "completed":
            self._emit_call(b"completed", item)
        super().item_done(item)

    @override
    def annotated(self, item: Item, part: Part) -> None:
        index = len(part.annotations) - 1
        place = b'"item_id":%b,"output_index":%d,"content_index":%d,"annotation_index":%d,"annotation":%b' % (
            encode_json(item.id),
            item.index,
            part.index,
            index,
            encode_json(part.annotations[index]),
        )
        self._emit(b"response.output_text.annotation.added", place)

    def _emit_call(self, state: bytes, item: Item) -> None:
        place = b'"item_id":%b,"output_index":%d' % (encode_json(item.id), item.index)
        self._emit(b"response.web_search_call." + state, place)


class SearchAnswer(ResponsesAnswer):
    """Builds a unary response with searches."""

    @override
    def add(self, frame: list[event_pb2.InferenceEvent]) -> None:
        items = self.document.items
        assert isinstance(items, SearchItems)
        for event in frame:
            if not items.takes(event):
                super().add([event])
