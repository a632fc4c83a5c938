"""The tools that read the mesh's own records: what the commands of these names print as JSON."""

import asyncio
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from weft.kernel.text.json_lines import encode_json
from weft_extensions.mcp.caller import Caller, Document, RefusedError

MAX_RESULT_BYTES = 32 * 1024
"""Maximum size of a result; about 10,000 tokens, above which Claude Code warns."""
_ALL_TENANTS = "Of all tenants, if the key may see them."


class Tool(BaseModel, extra="forbid"):
    """A call of a tool: its fields are the arguments, the docstring of its class tells models what it does."""

    command: ClassVar[str]
    """What shows all of a result that is too long."""
    path: ClassVar[str] = ""
    """The endpoint that answers."""
    only_reads: ClassVar[bool] = True

    async def run(self, caller: Caller) -> Document:
        """Returns the result. Raises RefusedError, WeftError."""
        return await caller.call(self.path, **self.model_dump(by_alias=True))


class Ps(Tool):
    """Models on the runners of the mesh: state, slots in use, memory, context length."""

    command: ClassVar[str] = "weft ps -o json"

    async def run(self, caller: Caller) -> Document:
        """See `Tool.run`."""
        runners = await caller.call("/api/v1/runners", pageSize=1000)
        try:
            models = await caller.call("/v1/admin/models")
        except RefusedError:
            models = {"items": []}
        return await asyncio.to_thread(_process_list, runners["items"], models)


def _process_list(runners: list[Document], models: Document) -> Document:
    from weft_app.cli.ps import process_list  # noqa: PLC0415 - it imports what only a command line needs

    return process_list(runners, models)


class Explain(Tool):
    """Why a request took as long as it did: waits, candidates, the runner that served it, times, tokens, price."""

    command: ClassVar[str] = "weft explain REQUEST-ID -o json"
    request_id: str = Field(default="", description="As in the header x-request-id. Default: the last that ended.")

    async def run(self, caller: Caller) -> Document:
        """See `Tool.run`."""
        if self.request_id:
            return await caller.call(f"/v1/requests/{self.request_id}")
        for ended in (await caller.call("/v1/requests", limit=1, state="ended"))["items"]:
            return await caller.call(f"/v1/requests/{ended['requestId']}")
        raise RefusedError("no request has ended recently; the tool requests lists running ones")


class Requests(Tool):
    """Your requests that wait or run, or those that have ended."""

    command: ClassVar[str] = "weft get requests -o json"
    path: ClassVar[str] = "/v1/requests"
    state: str = Field(default="", description="ended, completed, failed or cancelled. Default: waiting and running.")
    limit: int = Field(default=20, ge=1, le=1000)
    all_tenants: bool = Field(default=False, serialization_alias="allTenants", description=_ALL_TENANTS)


class Quote(Tool):
    """When each place of the mesh would answer a prompt, and at what price. Nothing is sent to a model."""

    command: ClassVar[str] = "weft models quote -o json"
    model: str = Field(description="A model, pool, route or agent.")
    prompt: str
    max_tokens: int | None = Field(default=None, ge=1)
    allow_remote: bool = False

    async def run(self, caller: Caller) -> Document:
        """See `Tool.run`."""
        asked = self.model_dump(exclude={"prompt"}, exclude_defaults=True)
        return await caller.call("/v1/quotes", asked | {"messages": [{"role": "user", "content": self.prompt}]})


class Usage(Tool):
    """Your requests by outcome, tokens, accelerator time and price."""

    command: ClassVar[str] = "weft mesh usage -o json"
    by: str = Field(default="model", description="Of tenant, key, model, asked, hour and day, joined by commas.")
    since: str = Field(default="", description="A date, or 12h or 30d for the time until now.")
    until: str = ""
    model: str = ""
    all_tenants: bool = Field(default=False, description=_ALL_TENANTS)

    async def run(self, caller: Caller) -> Document:
        """See `Tool.run`."""
        path = "/v1/admin/usage" if self.all_tenants else "/v1/usage"
        return await caller.call(path, **self.model_dump(exclude={"all_tenants"}))


def bounded(document: Document, command: str) -> bytes:
    """Returns a document as JSON of at most MAX_RESULT_BYTES: the ends of its longest lists are left out, and named.

    Raises RefusedError if it is still too long.
    """
    encoded, cut = encode_json(document), dict[str, tuple[list[Any], int]]()
    while len(encoded) > MAX_RESULT_BYTES:
        lists = {name: each for name, each in _lists(document, "") if len(each) > 1}
        if not lists:
            raise RefusedError(f"the result is longer than {MAX_RESULT_BYTES} bytes; run `{command}`")
        name = max(lists, key=lambda each: len(encode_json(lists[each])))
        cut.setdefault(name, (lists[name], len(lists[name])))
        del lists[name][len(lists[name]) * 7 // 8 :]
        left_out = ", ".join(f"{was - len(left)} of {at}" for at, (left, was) in cut.items())
        encoded = encode_json(document | {"more": f"left out: {left_out}. Ask for fewer, or run `{command}`"})
    return encoded


def _lists(value: Any, name: str) -> Iterator[tuple[str, list[Any]]]:
    if isinstance(value, list):
        yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from _lists(each, f"{name}.{key}" if name else str(key))
