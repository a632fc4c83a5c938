"""Tools that the service of an API runs, such as a web search. weft has none of them.

They are never offered to the model. A request that forces one, or offers no other tools, is answered with the failure
of the tool: a model that answered in its place would invent results, which agents cite as sources.
"""

import re
from collections.abc import AsyncGenerator, Sequence

from gateway.server_tools.permission import require_target
from weft.api.common.v1 import chat_pb2, event_pb2, receipt_pb2, warning_pb2
from weft.dispatch.call import Call, Layer, Proceed
from weft.dispatch.fleet import FleetView
from weft.dispatch.frames import Frame
from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.telemetry.log import get_logger
from weft.kernel.values.fast_dataclass import fast_dataclass

log = get_logger("weft.gateway")

_RUN_BY_CALLER = re.compile(
    "(apply_patch|bash|browser|computer|custom|function|local_shell|memory|namespace|shell|text_editor|tool_search$)"
)
"""Types of tools that the caller runs, by their beginning: their versions change monthly. `tool_search` finds tools."""
_MAX_SHOWN_CHARS = 64
_MAX_QUERY_CHARS = 1_000


@fast_dataclass()
class ServerTool:
    """A tool in a request that a server runs."""

    field: str
    """Its place in the request."""
    type: str
    name: str
    """Its name, such as `web_search`; its type if it has none."""
    label: str = ""
    """`server_label` of an MCP server."""
    query: str = ""
    """The last text of the user."""

    @property
    def words(self) -> str:
        """Why it fails, for the caller."""
        return f"weft cannot run the tool '{self.name[:_MAX_SHOWN_CHARS]}', so no answer was generated"


def last_query(turns: Sequence[chat_pb2.ChatMessage]) -> str:
    """Returns the beginning of the user's last text, for a failed call."""
    said = next((turn for turn in reversed(turns) if turn.role == chat_pb2.ROLE_USER), chat_pb2.ChatMessage())
    return "\n".join(part.text for part in said.content if part.text)[:_MAX_QUERY_CHARS]


def is_run_by_server(kind: str) -> bool:
    """Whether a server runs the tools of a type."""
    return _RUN_BY_CALLER.match(kind) is None


def failing_tool(
    tools: Sequence[ServerTool], *, has_functions: bool, forced: ServerTool | None, may_call: bool
) -> ServerTool | None:
    """Returns the tool whose failure is the answer; None: the model answers.

    `forced`: the tool that the request requires; `may_call`: whether it allows calls.
    """
    if forced is not None or has_functions or not may_call:
        return forced
    return tools[0] if tools else None


def require_no_failing_tool(tool: ServerTool | None) -> None:
    """Raises INVALID_ARGUMENT naming the tool: for callers that cannot get its failure as an answer."""
    if tool is not None:
        raise invalid_field(tool.field, f"{tool.words}; omit it, or offer a function")


def failed(view: FleetView, text: str, warnings: Sequence[warning_pb2.Warning]) -> Layer[Frame]:
    """Returns a layer that answers with the failure of a tool and with `warnings`; `text`: a refusal, may be empty.

    Raises MODEL_NOT_FOUND for an unknown model, as if the model had been asked.
    """

    async def layer(call: Call[Frame], /, proceed: Proceed[Frame]) -> AsyncGenerator[Frame]:
        del proceed  # nothing is dispatched
        model = call.context.model
        require_target(view, model)
        log.info("server tool failed", request_id=call.context.request_id, model=model)
        receipt = receipt_pb2.Receipt(outcome=receipt_pb2.OUTCOME_REJECTED, warnings=warnings)
        receipt.reason = Reason.UNSUPPORTED_OPERATION.value  # type: ignore[assignment]  # the same numbers
        receipt.request_id = call.context.request_id
        call.receipt = receipt
        end = event_pb2.Delta(refusal=text, finish_reason=event_pb2.FINISH_REASON_STOP)
        yield [
            *(event_pb2.InferenceEvent(warning=warning) for warning in warnings),
            event_pb2.InferenceEvent(delta=end),
            event_pb2.InferenceEvent(finished=event_pb2.Finished(receipt=receipt)),
        ]

    return layer
