"""The tools of servers of one gateway, and what one request offers of them and has called."""

import re
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.gateway_config import GatewayConfig
from gateway.sealed_texts import KEY_BYTES, SealedTexts
from gateway.server_tools.permission import RemoteRules, refusal, require_target, require_tools
from gateway.server_tools.tool import CallError, CallOptions, Page, ServerTool, ServerToolKind, ToolAnswer, ToolCalls
from weft.api.common.v1 import chat_pb2
from weft.dispatch.fleet import FleetSource
from weft.extension import ServerToolHook, load_hook
from weft.kernel.access.principal import Principal
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import CHARS_PER_TOKEN
from weft.kernel.telemetry.log import get_logger
from weft.kernel.text.json_lines import encode_json
from weft.kernel.values.fast_dataclass import fast_dataclass

log = get_logger("weft.gateway")

WEB_SEARCH, WEB_FETCH = "web_search", "web_fetch"
"""The tools for which the APIs have blocks and items."""
MAX_DOMAINS = 100
MAX_DOMAIN_CHARS = 253
MIN_TEXT_BYTES = 64
"""Minimum size of the text of a page, whatever a request asks for."""
_VERSION = re.compile(r"(?:_preview)?(?:_\d[\d_]*)?")
_DOMAIN = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?(?:/[!-~]*)?", re.IGNORECASE)
_PURPOSE = "page of a search"
_UNREADABLE = "[weft cannot read the text of this page, which another service or tenant has kept]"


@dataclass(slots=True, kw_only=True)
class OfferedTool:
    """A tool that a request offers to the model. Its name is that of the function."""

    name: str
    tool: ServerTool
    options: CallOptions
    max_uses: int
    uses: int = 0
    strict: bool | None = None

    @property
    def description(self) -> str:
        """Its purpose, for the model."""
        return self.tool.description


@dataclass(slots=True, kw_only=True)
class ServerCall:
    """One call of a server's tool."""

    id: str
    tool: OfferedTool
    arguments_text: str
    answer: ToolAnswer | None = None
    """None: it has not run."""
    round: int = 0
    """The pass of the model that made it; calls of one pass are of one turn."""
    is_known: bool = False
    """Whether the caller has got the call before, in an earlier answer."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments; empty for text that is no JSON object, or one that an answer cannot hold."""
        try:
            found = msgspec.json.decode(self.arguments_text or "{}")
            encode_json(found)
        except (OverflowError, RecursionError, TypeError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def query(self) -> str:
        """What is searched for, or the URL that is fetched; empty: not known."""
        query = self.arguments.get("url" if self.tool.name == WEB_FETCH else "query")
        return query if isinstance(query, str) else ""


class ServerTools:
    """The tools of one gateway. Each is imported for the first request that offers it."""

    def __init__(
        self,
        hooks: Sequence[ServerToolHook],
        config: GatewayConfig,
        fleet: FleetSource,
        *,
        rules: RemoteRules,
        key: bytes | None = None,
        calls: ToolCalls | None = None,
    ) -> None:
        """`key`: shared by the gateways of a mesh, to seal pages; None: one of this process."""
        self._hooks = [each for each in hooks if each.name in {WEB_SEARCH, WEB_FETCH}]
        self._config = config
        self._fleet = fleet
        self._rules = rules
        self._calls = calls
        self._opened: dict[str, ServerTool | None] = {}
        self.seals = SealedTexts(key or secrets.token_bytes(KEY_BYTES), _PURPOSE)

    def find(self, kind: str) -> ServerTool | None:
        """Returns the tool for a type in a request, such as `web_search_20250305`; None: there is none."""
        hook = next((each for each in self._hooks if _is_of(kind, each.name)), None)
        if hook is None:
            return None
        if hook.name not in self._opened:
            try:
                opened = load_hook(hook.place, ServerToolKind).open(self._config, self._calls)
            except Exception as error:
                log.exception("server tool cannot be used", tool=hook.name, exc_info=error)
                opened = None
            self._opened[hook.name] = opened
        return self._opened[hook.name]

    def require_target(self, model: str) -> None:
        """See `permission.require_target` and `permission.require_tools`."""
        require_target(self._fleet.view, model)
        require_tools(self._fleet.view, model)

    def refusal(self, tenant: str, principal: Principal, *, allow_remote: bool | None) -> str:
        """See `permission.refusal`."""
        return refusal(self._fleet.view, self._rules, tenant, principal, allow_remote=allow_remote)


@fast_dataclass(kw_only=True)
class Asked:
    """What a request says about one tool."""

    field: str
    kind: str
    allowed: object = None
    blocked: object = None
    max_uses: object = None
    max_results: int | None = None
    max_content_tokens: object = None


class RequestTools:
    """The tools of servers in one request."""

    def __init__(self, known: ServerTools, tenant: str, principal: Principal, *, allow_remote: bool | None) -> None:
        """`allow_remote`: the request's option."""
        self._known = known
        self._tenant = tenant
        self._principal = principal
        self._allow_remote = allow_remote
        self.offered: dict[str, OfferedTool] = {}
        """By the names of the functions."""
        self.fields: set[str] = set()
        """The places of these tools in the request."""
        self.first: list[ServerCall] = []
        """Calls to run before the model is asked. The payload has an empty result message for each."""
        self.calls: dict[str, ServerCall] = {}
        """All calls that ran or will run for this request, by id."""
        self.max_calls = sys.maxsize
        """Maximum number of calls of all tools together."""

    def find(self, kind: str) -> ServerTool | None:
        """Returns the tool of a type that the gateway can run; None: there is none."""
        return self._known.find(kind)

    def offer(self, asked: Asked, taken: Callable[[str], bool]) -> OfferedTool | str:
        """Returns the tool that a request may offer to the model, otherwise why not; empty: weft cannot run it.

        `taken`: whether a function has a name. Raises INVALID_ARGUMENT for wrong domains or numbers.
        """
        tool, name = self.find(asked.kind), WEB_FETCH if _is_of(asked.kind, WEB_FETCH) else WEB_SEARCH
        if tool is None:
            return ""
        tokens = _positive(asked.max_content_tokens, f"{asked.field}.max_content_tokens", tool.max_text_bytes)
        options = CallOptions(
            allowed_domains=_domains(asked.allowed, f"{asked.field}.allowed_domains"),
            blocked_domains=_domains(asked.blocked, f"{asked.field}.blocked_domains"),
            max_results=asked.max_results,
            max_text_bytes=min(tool.max_text_bytes, max(MIN_TEXT_BYTES, int(tokens * CHARS_PER_TOKEN))),
        )
        if options.allowed_domains and options.blocked_domains:
            raise FieldError(f"{asked.field}.blocked_domains", "must not stand beside 'allowed_domains'")
        most = _positive(asked.max_uses, f"{asked.field}.max_uses", tool.max_uses)
        if why := self._known.refusal(self._tenant, self._principal, allow_remote=self._allow_remote):
            return why
        if taken(name):
            return f"a function has the name '{name}'"
        found = OfferedTool(name=name, tool=tool, options=options, max_uses=min(most, tool.max_uses))
        self.offered[found.name] = found
        self.fields.add(asked.field)
        return found

    def run_first(self, chat: chat_pb2.ChatPayload, call: ServerCall) -> None:
        """Has a call run before the model is asked; adds the message for its result to the chat."""
        chat.messages.add(role=chat_pb2.ROLE_TOOL, tool_call_id=call.id)
        self.first.append(call)

    def require_target(self, model: str) -> None:
        """Raises MODEL_NOT_FOUND for a name that nothing serves, MODALITY_UNSUPPORTED for one that calls no tools."""
        self._known.require_target(model)

    def pages(self, *names: str) -> list[Page]:
        """Returns the pages that the tools of these names found for this request."""
        answers = [call.answer for call in self.calls.values() if call.answer is not None and call.tool.name in names]
        return [page for answer in answers for page in answer.pages]

    def seal(self, text: str) -> str:
        """Seals a text for the tenant."""
        return self._known.seals.seal(self._tenant, text)

    def opened(self, sealed: object, field: str) -> str | None:
        """Returns a text that was sealed for the tenant; None: it is another's."""
        try:
            return self._known.seals.open(self._tenant, sealed, field)
        except FieldError:
            return None


def unreadable_page(title: object, url: object) -> Page:
    """Returns a page of another service, whose text is not known."""
    return Page(url=str(url)[:2048], title=str(title)[:256], text=_UNREADABLE)


def error_of(code: object) -> CallError:
    """Returns the error of a block; UNAVAILABLE for one that this version does not know."""
    return next((each for each in CallError if each.value == code), CallError.UNAVAILABLE)


def _is_of(kind: str, name: str) -> bool:
    return kind.startswith(name) and _VERSION.fullmatch(kind, len(name)) is not None


def _domains(given: object, where: str) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > MAX_DOMAINS:
        raise FieldError(where, f"must be a list of at most {MAX_DOMAINS} domains")
    for index, each in enumerate(given):
        if not isinstance(each, str) or len(each) > MAX_DOMAIN_CHARS or _DOMAIN.fullmatch(each) is None:
            raise FieldError(f"{where}[{index}]", "must be a domain without a scheme, such as example.org")
    return tuple(each.lower() for each in given)


def _positive(given: object, where: str, default: int) -> int:
    if given is None:
        return default
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise FieldError(where, "must be a whole number above 0")
    return given
