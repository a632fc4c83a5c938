"""Searches that the gateway runs, in requests of the Responses API: the tool, and items of earlier turns.

Imported for the first request with such a tool or item.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from gateway.openai.chat_builder import ChatBuilder
from gateway.responses.schema import InputItem, ResponseTool
from gateway.server_tools.request_tools import WEB_FETCH, WEB_SEARCH, Asked, RequestTools
from weft.api.common.v1 import chat_pb2

_RESULTS_BY_SIZE = {"low": 4}
"""Results by `search_context_size`; other sizes get as many as weft.yaml permits."""
_LOST = "The results are not known any more, as the client did not send them back. Search again if you need them."
_NOT_USED = ("user_location", "search_content_types")


class KeptSearch(msgspec.Struct, array_like=True):
    """What a sealed copy has, to rebuild a call in a later turn."""

    call_id: str
    arguments: str
    result: str
    round: int
    tool: str = WEB_SEARCH


def offer(
    chat: ChatBuilder, hosted: RequestTools, tool: ResponseTool, field: str, max_calls: object = None
) -> str | None:
    """Offers a tool to the model; None: it is offered, otherwise why not, empty if weft cannot run it.

    `max_calls`: the request's `max_tool_calls`. Raises INVALID_ARGUMENT for wrong domains or numbers.
    """
    given = tool.model_extra or {}
    if hosted.find(tool.type) is not None and given.get("external_web_access") is False:
        return "it permits no search ('external_web_access' is false), and weft keeps no pages"
    filters = given.get("filters")
    domains: Mapping[str, Any] = filters if isinstance(filters, Mapping) else {}
    asked = Asked(
        field=field,
        kind=tool.type,
        allowed=domains.get("allowed_domains"),
        blocked=domains.get("blocked_domains"),
        max_uses=max_calls,
        max_results=_RESULTS_BY_SIZE.get(str(given.get("search_context_size"))),
    )
    why = chat.add_hosted(hosted, asked, [name for name in _NOT_USED if given.get(name)])
    if why is None:
        hosted.max_calls = hosted.offered[WEB_SEARCH].max_uses
        chat.add_hosted(hosted, replace(asked, kind=WEB_FETCH), ())
    return why


class SearchHistory:
    """Adds the searches of earlier turns as the model read them."""

    def __init__(self, chat: ChatBuilder, hosted: RequestTools) -> None:
        self._chat = chat
        self._hosted = hosted
        self._results: list[KeptSearch] = []
        """Of calls in the open turn: they stand behind all its calls."""

    def add(self, item: InputItem, turn: chat_pb2.ChatMessage | None) -> chat_pb2.ChatMessage | None:
        """Adds a call to the assistant's open turn, or to a new one; returns the turn.

        None: the item has no results for this tenant, and its query is not known or weft cannot search.
        """
        opened = self._hosted.opened(item.encrypted_content, "input")
        kept = self._lost(item) if opened is None else msgspec.json.decode(opened, type=KeptSearch)
        if kept is None:
            return None
        if self._results and self._results[-1].round != kept.round:
            self.end_turn()
            turn = None
        turn = turn or self._chat.add_message("assistant")
        self._chat.add_call(turn, kept.call_id, kept.tool, kept.arguments)
        self._results.append(kept)
        return turn

    def _lost(self, item: InputItem) -> KeptSearch | None:
        """Returns a call whose results its client did not keep. As text, models would write it in place of a call."""
        action = (item.model_extra or {}).get("action")
        given: Mapping[str, Any] = action if isinstance(action, Mapping) else {}
        tool, name = (WEB_FETCH, "url") if given.get("type") == "open_page" else (WEB_SEARCH, "query")
        if not isinstance(given.get(name), str) or self._hosted.find(tool) is None:
            return None
        arguments = msgspec.json.encode({name: given[name]}).decode()
        return KeptSearch(item.id or f"call_{len(self._chat.messages)}", arguments, _LOST, -1, tool)

    def end_turn(self) -> bool:
        """Adds the results of the open turn; returns whether it had any."""
        results, self._results = self._results, []
        for kept in results:
            self._chat.add_result(kept.call_id).content.add(text=kept.result)
        return bool(results)
