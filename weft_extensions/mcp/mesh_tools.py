"""The tools that read the mesh's own records: what the commands of these names print as JSON."""

from abc import ABC, abstractmethod

from pydantic import BaseModel, Field
from typing_extensions import override

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json
from weft_app.cli.ps import rows_of
from weft_extensions.mcp.caller import Caller, Document

MAX_RESULT_BYTES = 32 * 1024
"""Maximum size of a document as a result; about 10,000 tokens, above which Claude Code warns."""
_ALL_TENANTS = "Of all tenants, if the key may see them."


class Tool(BaseModel, ABC, extra="forbid"):
    """A call of a tool: its fields are the arguments, the docstring of its class tells models what it does."""

    @abstractmethod
    async def run(self, caller: Caller) -> str:
        """Returns the result. Raises WeftError."""


class DocumentTool(Tool):
    """A call whose result is a JSON document."""

    @override
    async def run(self, caller: Caller) -> str:
        return bounded(await self._found(caller)).decode()

    @abstractmethod
    async def _found(self, caller: Caller) -> Document: ...


class Ps(DocumentTool):
    """Models on the runners of the mesh: state, slots in use, memory, context length."""

    @override
    async def _found(self, caller: Caller) -> Document:
        runners = await caller.call("/api/v1/runners", pageSize=1000)
        try:
            models = await caller.call("/v1/admin/models")
        except WeftError:
            models = {"items": []}
        return {"kind": "ProcessList", "items": rows_of(runners["items"], models)}


class Explain(DocumentTool):
    """Why a request took as long as it did: waits, candidates, the runner that served it, times, tokens, price."""

    request_id: str = Field(default="", description="As in the header x-request-id. Default: the last that ended.")

    @override
    async def _found(self, caller: Caller) -> Document:
        if self.request_id:
            return await caller.call(f"/v1/requests/{self.request_id}")
        for ended in (await caller.call("/v1/requests", limit=1, state="ended"))["items"]:
            return await caller.call(f"/v1/requests/{ended['requestId']}")
        raise WeftError(Reason.NOT_FOUND, "no request has ended recently; the tool requests lists running ones")


class Requests(DocumentTool):
    """Your requests that wait or run, or those that have ended."""

    state: str = Field(default="", description="ended, completed, failed or cancelled. Default: waiting and running.")
    limit: int = Field(default=20, ge=1, le=1000)
    all_tenants: bool = Field(default=False, serialization_alias="allTenants", description=_ALL_TENANTS)

    @override
    async def _found(self, caller: Caller) -> Document:
        return await caller.call("/v1/requests", **self.model_dump(by_alias=True))


class Quote(DocumentTool):
    """When each place of the mesh would answer a prompt, and at what price. Nothing is sent to a model."""

    model: str = Field(description="A model, pool, route or agent.")
    prompt: str
    max_tokens: int | None = Field(default=None, ge=1)
    allow_remote: bool = False

    @override
    async def _found(self, caller: Caller) -> Document:
        asked = self.model_dump(exclude={"prompt"}, exclude_defaults=True)
        return await caller.call("/v1/quotes", asked | {"messages": [{"role": "user", "content": self.prompt}]})


class Usage(DocumentTool):
    """Your requests by outcome, tokens, accelerator time and price."""

    by: str = Field(
        default="model", description="Of tenant, key, model, asked, program, agent, purpose, hour, day, by commas."
    )
    since: str = Field(default="", description="A date, or 12h or 30d for the time until now.")
    until: str = ""
    model: str = ""
    all_tenants: bool = Field(default=False, description=_ALL_TENANTS)

    @override
    async def _found(self, caller: Caller) -> Document:
        path = "/v1/admin/usage" if self.all_tenants else "/v1/usage"
        return await caller.call(path, **self.model_dump(exclude={"all_tenants"}))


def bounded(document: Document) -> bytes:
    """Returns a document as JSON, above MAX_RESULT_BYTES without the ends of its longest lists. Raises WeftError."""
    encoded, lists = encode_json(document), {at: len(each) for at, each in document.items() if isinstance(each, list)}
    while len(encoded) > MAX_RESULT_BYTES:
        at = max(lists, key=lambda each: len(encode_json(document[each])), default="")
        if not document.get(at):
            raise WeftError(Reason.REQUEST_TOO_LARGE, f"the result has more than {MAX_RESULT_BYTES} bytes")
        document[at] = document[at][: len(document[at]) * 7 // 8]
        left = {name: count - len(document[name]) for name, count in lists.items()}
        left_out = ", ".join(f"{count} of {name}" for name, count in left.items() if count)
        encoded = encode_json(document | {"more": f"left out: {left_out}; ask for fewer, or use the command of weft"})
    return encoded
