"""The tools of the MCP servers in weft.yaml: found by search, and called by keys that may name a tool."""

import re
from typing import Any

from pydantic import Field
from typing_extensions import override

from gateway.errors import DetailedError
from gateway.intake.headers import tenant_of
from gateway.request_facts import facts_of
from gateway.server_tools.permission import refusal
from runner_svc.tools.port import ToolDescription
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1.receipt_pb2 import OUTCOME_CANCELLED, OUTCOME_COMPLETED, Attempt, Receipt, ToolRun
from weft.kernel.access.principal import ANY_SOURCE
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.placement_request import PlacementRequest
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json
from weft.kernel.time.timestamps import duration_of
from weft.kernel.values.names import new_id
from weft.kernel.values.unknown_names import unknown_name
from weft_app.compose.gateway_tools import GatewayTools
from weft_extensions.mcp.caller import Caller, Document
from weft_extensions.mcp.mesh_tools import DocumentTool, Tool


def may_call_tools(caller: Caller) -> bool:
    """Whether there are tools and the caller may name one, with which it could also declare an agent that runs it."""
    servers = caller.ports.tool_calls
    may_name = facts_of(caller.scope).principal.may(ANY_SOURCE)
    return may_name and isinstance(servers, GatewayTools) and bool(servers.servers())


async def _usable(caller: Caller) -> dict[str, tuple[ToolDescription, ToolBox]]:
    """Returns the tools that the caller may call, by `RUNNER/SERVER.TOOL`. Raises PERMISSION_DENIED."""
    principal, servers, rules = facts_of(caller.scope).principal, caller.ports.tool_calls, caller.ports.remote_rules
    principal.require(ANY_SOURCE)
    must_stay = refusal(caller.deps.fleet.view, rules, tenant_of(caller.scope), principal, allow_remote=None)
    boxes = await servers.boxes() if isinstance(servers, GatewayTools) else {}
    return {
        f"{server.partition('/')[0]}/{tool.name}": (tool, box)
        for server, box in boxes.items()
        for tool in box.pick(box.names())
        if not (must_stay and box.is_remote(tool.name))
    }


class SearchTools(DocumentTool):
    """Tools of the mesh's MCP servers for a purpose, the best first, with the schemas of their arguments."""

    query: str = Field(max_length=400, description="What the tool should do, in a few words.")
    limit: int = Field(default=5, ge=1, le=50)

    @override
    async def _found(self, caller: Caller) -> Document:
        words, found = set(re.findall(r"\w+", self.query.lower())), list[tuple[int, str, ToolDescription]]()
        for name, (tool, _) in (await _usable(caller)).items():
            texts = name.lower(), tool.description.lower()
            found.append((sum(2 * (word in texts[0]) + (word in texts[1]) for word in words), name, tool))
        fitting = sorted((each for each in found if each[0]), key=lambda each: (-each[0], each[1]))
        items = [
            {"name": name, "description": tool.description, "inputSchema": dict(tool.parameters)}
            for _, name, tool in fitting[: self.limit]
        ]
        return {"kind": "ToolList", "items": items, "total": len(fitting)}


class CallTool(Tool):
    """Runs a tool that search_tools has found."""

    name: str
    arguments: dict[str, Any] = Field(default={}, description="As the schema of the tool says.")

    @override
    async def run(self, caller: Caller) -> str:
        """See `Tool.run`; the call is recorded as a request."""
        caller.deps.count(caller.scope, tenant_of(caller.scope))
        known = await _usable(caller)
        if self.name not in known:
            raise unknown_name("tool", self.name, known)
        tool, box = known[self.name]
        arguments, began = box.check(tool.name, encode_json(self.arguments).decode()), caller.deps.clock.monotonic()
        run, reason = ToolRun(tool=self.name, failed=True), Reason.CANCELLED
        try:
            outcome = await box.run(tool.name, arguments)
            run.failed, reason = outcome.failed, Reason.UNSPECIFIED
        finally:
            run.duration.CopyFrom(duration_of(caller.deps.clock.monotonic() - began))
            self._report(caller, run, began, reason, left=box.is_remote(tool.name))
        if outcome.failed:
            raise DetailedError(Reason.BACKEND_ERROR, outcome.content, code="tool_failed")
        return outcome.content

    def _report(self, caller: Caller, run: ToolRun, began: float, reason: Reason, *, left: bool) -> None:
        """Has a request recorded that needed no router. Its id is new, as a repeated one is recorded once."""
        why: Any = reason.value
        who, tenant, ends = facts_of(caller.scope).principal.name, tenant_of(caller.scope), caller.ports.ends
        attempt = Attempt(runner=self.name.partition("/")[0], model=self.name, reason=why)
        receipt = Receipt(reason=why, model=self.name, attempts=[attempt], left_premises=left, tool_runs=[run])
        receipt.outcome = OUTCOME_CANCELLED if reason else OUTCOME_COMPLETED
        receipt.total_time.CopyFrom(run.duration)
        call = PlacementRequest(
            request_id=new_id("req"), tenant=tenant, model=self.name, operation=Operation.CHAT, caller=who
        )
        if ends is not None:
            ends.send(call, receipt, began)
