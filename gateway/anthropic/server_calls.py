"""Calls of tools that the gateway runs, in the Messages API: their tools, blocks in a history, answers and streams.

Imported for the first request with such a tool or block.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from starlette.responses import Response
from typing_extensions import override

from gateway.answers.answer_builder import AnswerIdentity, CalledTool
from gateway.answers.generation import Work, streamed, unary
from gateway.anthropic.message_context import ManagedContext
from gateway.anthropic.message_stream import Block, MessagesAnswer, MessagesStream
from gateway.anthropic.schema import MessageParam, OtherBlock, OtherTool, ToolChoiceParam
from gateway.openai.chat_builder import ChatBuilder
from gateway.server_tools.loop import ToolLoop
from gateway.server_tools.pages import cited, cleaned, has_url, packed, result_text, unpacked
from gateway.server_tools.request_tools import (
    WEB_FETCH,
    WEB_SEARCH,
    Asked,
    RequestTools,
    ServerCall,
    error_of,
    unreadable_page,
)
from gateway.server_tools.tool import CallError, Page, ServerTool, ToolAnswer
from weft.api.common.v1 import chat_pb2, event_pb2
from weft.dispatch.payload_description import estimated_prompt_tokens
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.names import new_id

USE = "server_tool_use"
RESULTS = {f"{name}_tool_result": name for name in (WEB_SEARCH, WEB_FETCH)}
"""Types of result blocks, with their tools."""
MAX_ENTRIES = 64
"""Maximum number of results that are read of one block."""
_CITED_CHARS = 150
_NOT_USED = ("user_location", "response_inclusion", "citations")
_ASKS_NOTHING: tuple[object, ...] = (None, "", {}, {"enabled": False})
_CLAUDE_CODE = re.compile(r"Perform a web search for the query: (.+)", re.DOTALL)
_NOT_RUN = "It was not run."
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def offer(chat: ChatBuilder, hosted: RequestTools, tool: OtherTool, field: str) -> str | None:
    """Offers a tool to the model; None: it is offered, otherwise why not, empty if weft cannot run it.

    Raises INVALID_ARGUMENT for wrong domains or numbers.
    """
    given = tool.model_extra or {}
    sources = given.get("url_sources")
    if isinstance(sources, dict) and any(each != {"type": "all"} for each in sources.values()):
        return "weft does not restrict where URLs may come from ('url_sources')"
    asked = Asked(
        field=field,
        kind=tool.type,
        allowed=given.get("allowed_domains"),
        blocked=given.get("blocked_domains"),
        max_uses=given.get("max_uses"),
        max_content_tokens=given.get("max_content_tokens"),
    )
    return chat.add_hosted(hosted, asked, [name for name in _NOT_USED if given.get(name) not in _ASKS_NOTHING])


class ServerBlocks:
    """Adds the calls of an assistant's history and their results, as the model read them."""

    def __init__(self, chat: ChatBuilder, hosted: RequestTools, messages: Sequence[MessageParam]) -> None:
        self._chat = chat
        self._hosted = hosted
        self._contents: dict[str, object] = {}
        for message in messages:
            for block in message.content if isinstance(message.content, list) else ():
                if isinstance(block, OtherBlock) and block.type in RESULTS:
                    given = block.model_extra or {}
                    self._contents[str(given.get("tool_use_id"))] = given.get("content")
        self._open: dict[str, tuple[str, str]] = {}
        """Calls of this message whose results are not in it so far, with their tools and arguments."""
        self._texts: dict[str, str] = {}
        self._added: set[str] = set()
        self._waiting: list[tuple[str, str, str]] = []

    def add(self, block: OtherBlock, turn: Callable[[], chat_pb2.ChatMessage]) -> bool:
        """Adds a block; False: it is none of a call that can be rebuilt. `turn` returns the assistant's message."""
        given = block.model_extra or {}
        if block.type in RESULTS:
            answered = str(given.get("tool_use_id"))
            if answered in self._open:
                self._add_result(answered)
                del self._open[answered]
            return answered in self._added
        call_id, name = given.get("id"), given.get("name")
        if name not in {WEB_SEARCH, WEB_FETCH} or not isinstance(call_id, str) or not call_id:
            return False
        tool = self._hosted.find(name)
        if call_id in self._contents:
            content = self._contents[call_id]
            text = self._found(content, tool) if name == WEB_SEARCH else _fetched(content, tool)
            if text is None:
                return False
            self._texts[call_id] = text
        elif tool is None:
            return False
        self._open[call_id] = name, _encode(given.get("input") or {})
        self._chat.add_call(turn(), call_id, *self._open[call_id])
        return True

    def end_message(self) -> None:
        """Adds results that a later message has, or none: each stands behind its call, before the caller's results."""
        self._waiting.clear()
        for call_id, (name, arguments) in self._open.items():
            if call_id in self._texts:
                self._add_result(call_id)
            else:
                self._chat.add_result(call_id)
                self._waiting.append((call_id, name, arguments))
        self._open.clear()

    def run_waiting(self) -> None:
        """Has the calls of the last message run that have no result."""
        self._hosted.first += [
            ServerCall(id=call_id, tool=tool, arguments_text=arguments, is_known=True)
            for call_id, name, arguments in self._waiting
            if (tool := self._hosted.offered.get(name)) is not None
        ]
        runs = {call.id for call in self._hosted.first}
        for message in self._chat.messages:
            if message.role == chat_pb2.ROLE_TOOL and not message.content and message.tool_call_id not in runs:
                message.content.add(text=_NOT_RUN)

    def _add_result(self, call_id: str) -> None:
        self._chat.add_result(call_id).content.add(text=self._texts[call_id])
        self._added.add(call_id)

    def _found(self, content: object, tool: ServerTool | None) -> str | None:
        """Returns a search's result as the model read it; None: weft neither wrote it nor can run this tool."""
        can_run = tool is not None
        if isinstance(content, dict):
            return result_text((), error_of(content.get("error_code"))) if can_run else None
        entries = [each for each in content if isinstance(each, dict)] if isinstance(content, list) else []
        pages, is_own = [], can_run
        for entry in entries[:MAX_ENTRIES]:
            opened = self._hosted.opened(entry.get("encrypted_content"), "messages")
            is_own = is_own or opened is not None
            pages.append(unreadable_page(entry.get("title"), entry.get("url")) if opened is None else unpacked(opened))
        return result_text(pages) if is_own else None


def _fetched(content: object, tool: ServerTool | None) -> str | None:
    """Returns a fetched page as the model read it; None: weft cannot run this tool."""
    if tool is None or not isinstance(content, dict):
        return None
    if "error_code" in content:
        return result_text((), error_of(content["error_code"]), WEB_FETCH)
    document = content.get("content")
    title, source = (document.get("title"), document.get("source")) if isinstance(document, dict) else (None, None)
    data = source.get("data") if isinstance(source, dict) and source.get("type") == "text" else None
    given = Page(url=str(content.get("url")), title=str(title or ""), text=str(data))
    page = cleaned(given, tool.max_text_bytes) if isinstance(data, str) else None
    return result_text([page or unreadable_page(given.title, given.url)], tool=WEB_FETCH)


def begin(chat: ChatBuilder, hosted: RequestTools, choice: ToolChoiceParam | None) -> None:
    """Has the first search run, or the model make a call, if a conversation begins with only tools of servers.

    A model that skipped it would answer from memory. Claude Code asks for its searches so, with the query in its text.
    Without a URL to fetch, it may answer: it would have to invent one.
    """
    kind, named = (None, None) if choice is None else (choice.type, choice.name)
    has_begun = any(message.role == chat_pb2.ROLE_ASSISTANT for message in chat.messages)
    if has_begun or kind == "none" or len(chat.payload.tools) > len(hosted.offered):
        return
    said = [part.text for part in chat.messages[-1].content if part.text] if chat.messages else []
    tool, fetch = hosted.offered.get(WEB_SEARCH), hosted.offered.get(WEB_FETCH)
    asked = _CLAUDE_CODE.fullmatch(said[-1].strip()) if said and tool is not None else None
    if asked is None or tool is None:
        if fetch is None or named:
            chat.payload.tool_choice.function_name = named or WEB_SEARCH
        elif has_url("\n".join(said)):
            chat.payload.tool_choice.mode = chat_pb2.ToolChoice.MODE_REQUIRED
        elif tool is not None:
            chat.payload.tool_choice.function_name = WEB_SEARCH
        return
    call = ServerCall(id=_new_id(), tool=tool, arguments_text=_encode({"query": asked[1].strip()}))
    chat.add_call(chat.add_message("assistant"), call.id, WEB_SEARCH, call.arguments_text)
    hosted.run_first(chat.payload, call)
    chat.payload.tool_choice.mode = chat_pb2.ToolChoice.MODE_AUTO


def answered(
    work: Work, identity: AnswerIdentity, hosted: RequestTools, *, stream: bool, context: ManagedContext | None = None
) -> Response:
    """Returns the message of a model and the tools that the gateway runs. `context`: what shortens its conversation."""
    loop = ToolLoop(hosted, work.again, work.deps.clock, new_id=_new_id, defers=True)
    work = replace(work, layers=(loop, *work.layers))
    if not stream:
        answer = ServerCallAnswer(identity, hosted)
        answer.context = context
        return unary(work, answer)
    assert isinstance(work.payload, chat_pb2.ChatPayload)
    encoder = ServerCallStream(identity, hosted, estimated_prompt_tokens(work.payload))
    encoder.context = context
    return streamed(work, encoder)


def _new_id() -> str:
    return new_id("srvtoolu").replace("-", "_")


def call_block(call: ServerCall) -> dict[str, object]:
    """Returns the block of a call."""
    return {"type": USE, "id": call.id, "name": call.tool.name, "input": call.arguments}


def result_block(call: ServerCall, hosted: RequestTools) -> dict[str, object]:
    """Returns the block of a result: its pages with sealed copies of what the model read, a page, or its error."""
    answer, name = call.answer or ToolAnswer(error=CallError.UNAVAILABLE), call.tool.name
    content: object
    if answer.error is not None:
        content = {"type": f"{name}_tool_result_error", "error_code": answer.error.value}
    elif name == WEB_FETCH:
        content = _page_block(next(iter(answer.pages), unreadable_page("", call.query)))
    else:
        content = [
            {
                "type": "web_search_result",
                "url": page.url,
                "title": page.title,
                "encrypted_content": hosted.seal(packed(page)),
                "page_age": page.age or None,
            }
            for page in answer.pages
        ]
    return {"type": f"{name}_tool_result", "tool_use_id": call.id, "content": content}


def _page_block(page: Page) -> dict[str, object]:
    source = {"type": "text", "media_type": "text/plain", "data": page.text}
    document = {"type": "document", "title": page.title, "source": source, "citations": {"enabled": False}}
    return {"type": "web_fetch_result", "url": page.url, "retrieved_at": page.retrieved_at, "content": document}


def citations(text: str, hosted: RequestTools) -> list[dict[str, object]]:
    """Returns a citation for each page that was found and whose URL the text has."""
    pages = {page.url: page for _, _, page in cited(text, hosted.pages(WEB_SEARCH))}
    return [_citation(page, hosted) for page in pages.values()]


def _citation(page: Page, hosted: RequestTools) -> dict[str, object]:
    return {
        "type": "web_search_result_location",
        "url": page.url,
        "title": page.title,
        "cited_text": page.text[:_CITED_CHARS],
        "encrypted_index": hosted.seal(page.url),
    }


def _step(event: event_pb2.InferenceEvent, hosted: RequestTools) -> dict[str, object] | None:
    """Returns the block of an event about a call that the gateway runs; None: another event."""
    kind = event.WhichOneof("event")
    if kind == "tool_call" and event.tool_call.id in hosted.calls:
        return call_block(hosted.calls[event.tool_call.id])
    if kind == "tool_result" and event.tool_result.id in hosted.calls:
        return result_block(hosted.calls[event.tool_result.id], hosted)
    return None


def _requests(hosted: RequestTools) -> dict[str, object]:
    """Returns the counts of requests; those that failed are not counted."""
    done = [call.tool.name for call in hosted.calls.values() if call.answer is not None and call.answer.error is None]
    return {"server_tool_use": {f"{name}_requests": done.count(name) for name in (WEB_SEARCH, WEB_FETCH)}}


class ServerCallAnswer(MessagesAnswer):
    """Builds a complete message with calls that the gateway runs."""

    def __init__(self, identity: AnswerIdentity, hosted: RequestTools) -> None:
        super().__init__(identity)
        self._hosted = hosted

    @override
    def add(self, frame: list[event_pb2.InferenceEvent]) -> None:
        for event in frame:
            if (block := _step(event, self._hosted)) is None:
                super().add([event])
            else:
                self._blocks.append(block)

    @override
    def _block_json(self, block: Block | CalledTool | dict[str, object]) -> dict[str, object] | None:
        shown = super()._block_json(block)
        if isinstance(block, Block) and block.kind == "text" and shown is not None:
            found = citations("".join(block.pieces), self._hosted)
            return shown | ({"citations": found} if found else {})
        return shown

    @override
    def _counts(self) -> dict[str, object]:
        return super()._counts() | _requests(self._hosted)


class ServerCallStream(MessagesStream):
    """Encodes a streamed message with calls that the gateway runs."""

    def __init__(self, identity: AnswerIdentity, hosted: RequestTools, estimated_prompt_tokens: int) -> None:
        super().__init__(identity, estimated_prompt_tokens)
        self._hosted = hosted
        self._said: list[str] = []
        """The text of the open block."""

    @override
    def _encode(self, event: event_pb2.InferenceEvent, out: list[bytes]) -> None:
        if (block := _step(event, self._hosted)) is None:
            super()._encode(event, out)
        else:
            self._finish_blocks(out)
            self._send_block(block, out)

    @override
    def _add_text(self, kind: str, text: str, out: list[bytes]) -> None:
        super()._add_text(kind, text, out)
        if self._kind == kind == "text":
            self._said.append(text)

    @override
    def _close(self, out: list[bytes], *, is_cut: bool = False) -> None:
        if self._kind == "text":
            for citation in citations("".join(self._said), self._hosted):
                delta = {"type": "citations_delta", "citation": citation}
                event = {"type": "content_block_delta", "index": self._block, "delta": delta}
                out += (b"event: content_block_delta\ndata: ", encode_json(event), b"\n\n")
        self._said.clear()
        super()._close(out, is_cut=is_cut)

    @override
    def _counts(self) -> dict[str, object]:
        return super()._counts() | _requests(self._hosted)
