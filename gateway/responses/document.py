"""The response object. Constant fields are encoded once: tools and their schemas can be large."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from gateway.answers.answer_builder import encode_json
from gateway.errors import envelope
from gateway.openai.chat_fields import FUNCTION
from gateway.responses.output import OutputItems
from gateway.responses.payload import uses_pool_envelope
from gateway.responses.schema import ResponsesRequest, ResponsesToolChoiceObject
from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft.kernel.clock import Clock
from weft.kernel.errors import WeftError

QUEUED = "queued"
COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"
CANCELLED = "cancelled"
FAILED = "failed"

_ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")


@dataclass(slots=True, kw_only=True)
class ResponseState:
    """The fields that change while a response is generated."""

    model: str
    """The requested model, then the one that answers."""
    is_stored: bool
    """Whether the response is or will be stored."""
    usage: usage_pb2.Usage | None = None
    """None: unknown."""
    error: WeftError | None = None
    completed_at: int | None = None
    """Unix time, seconds; of a response that completed."""
    warnings: list[dict[str, object]] = field(default_factory=list)
    signals: list[dict[str, object]] = field(default_factory=list)
    receipt: receipt_pb2.Receipt | None = None
    total_seconds: float | None = None
    """From the request's arrival to the end of its answer."""

    def note_not_kept(self, why: WeftError) -> None:
        """Record that storing the response failed."""
        self.is_stored = False
        message = f"the response could not be stored: {error_json(why)['message']}"
        self.warnings.append({"code": "not_stored", "field": "store", "message": message})


class ResponseDocument:
    """Renders one response as JSON."""

    def __init__(
        self,
        request: ResponsesRequest,
        response_id: str,
        *,
        clock: Clock,
        arrived: float,
        created_at: datetime | None = None,
    ) -> None:
        """`arrived`: the request's arrival on the monotonic clock; `created_at`: None: now."""
        self.response_id = response_id
        self.created_at = created_at or clock.utc_now()
        self.created = int(self.created_at.timestamp())
        self.has_metrics = uses_pool_envelope(request)
        self._clock = clock
        self._arrived = arrived
        known = {"id": response_id, "object": "response", "created_at": self.created}
        self._head = encode_json(known)[:-1] + b","
        self._echo = encode_json(_echo(request))[1:]

    def render(self, status: str, state: ResponseState, items: OutputItems) -> bytes:
        """Returns the object as JSON with this `status`."""
        changing: dict[str, object] = {
            "status": status,
            "completed_at": state.completed_at,
            "error": None if state.error is None else error_json(state.error),
            "incomplete_details": _incomplete(status, items),
            "model": state.model,
            "output": items.json(IN_PROGRESS if status == IN_PROGRESS else INCOMPLETE),
            "usage": None if state.usage is None else usage_json(state.usage),
            "store": state.is_stored,
        }
        if self.has_metrics:
            changing["output_text"] = items.text()
            changing["metrics"] = self.metrics(state)
        if state.warnings:
            changing["warnings"] = state.warnings
        if state.signals:
            changing["signals"] = state.signals
        return self._head + encode_json(changing)[1:-1] + b"," + self._echo

    def conclude(self, state: ResponseState, items: OutputItems, receipt: receipt_pb2.Receipt) -> str:
        """Complete `items` and record the end in `state`; returns the final status."""
        items.close()
        state.receipt = receipt
        ended_at, state.total_seconds = self._end()
        if items.incomplete_reason():
            return INCOMPLETE
        state.completed_at = int(ended_at.timestamp())
        return COMPLETED

    def _end(self) -> tuple[datetime, float]:
        """Returns the end time of the answer, and its duration in seconds."""
        return self._clock.utc_now(), self._clock.monotonic() - self._arrived

    def metrics(self, state: ResponseState) -> dict[str, object]:
        """Returns times in milliseconds and counts; null: unknown."""
        receipt, usage = state.receipt, state.usage
        compute = _millis(receipt, "gpu_time")
        speed = 0.0 if receipt is None else receipt.tokens_per_second
        return {
            "backend_inference_wall_ms": None,
            "engine_total_wall_ms": None,
            "engine_outside_backend_wall_ms": None,
            "pool_total_wall_ms": None if state.total_seconds is None else round(state.total_seconds * 1e3, 1),
            "engine_queue_wait_ms": _millis(receipt, "queue_wait"),
            "engine_load_wait_ms": _millis(receipt, "load_wait"),
            "engine_time_to_first_token_ms": _millis(receipt, "time_to_first_token"),
            "engine_tokenize_ms": None,
            "gpu_time_to_first_token_ms": None,
            "gpu_generate_total_ms": compute,
            "gpu_decode_after_first_token_ms": None,
            "engine_prompt_tokens": None if usage is None else usage.prompt_tokens,
            "engine_output_tokens": None if usage is None else usage.completion_tokens,
            "engine_tokens_per_second": speed or None,
        }


def usage_json(usage: usage_pb2.Usage) -> dict[str, object]:
    """Returns token counts in the format of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_json(error: WeftError) -> dict[str, object]:
    """Returns the `error` of a failed response, with the message of the error envelope."""
    fields: dict[str, object] = msgspec.json.decode(envelope(error))["error"]
    return {"code": fields["code"], "message": fields["message"]}


def _incomplete(status: str, items: OutputItems) -> dict[str, object] | None:
    return {"reason": items.incomplete_reason()} if status == INCOMPLETE else None


def _echo(request: ResponsesRequest) -> dict[str, object]:
    """Returns the fields that the response repeats from its request."""
    reasoning, text = request.reasoning, request.text
    shown: dict[str, object] = {name: getattr(request, name) for name in _ECHOED}
    key = request.prompt_cache_key
    return shown | {
        "background": bool(request.background),
        "conversation": None,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": key if isinstance(key, str) else None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "text": _text_options(text.format.model_dump(exclude_none=True, by_alias=True) if text and text.format else {}),
        "tool_choice": _tool_choice(request.tool_choice),
        "tools": _tools(request),
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
    }


def _text_options(given: Mapping[str, object]) -> dict[str, object]:
    return {"format": {"type": "text"} | dict(given)}


def _tool_choice(choice: str | ResponsesToolChoiceObject | None) -> object:
    if isinstance(choice, ResponsesToolChoiceObject):
        return choice.model_dump(exclude_none=True)
    return choice or "auto"


def _tools(request: ResponsesRequest) -> list[dict[str, object]]:
    """Returns the tools that are offered to the model."""
    return [
        {
            "type": FUNCTION,
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
            "strict": tool.strict,
        }
        for tool in request.tools or ()
        if tool.type == FUNCTION
    ]


def _millis(receipt: receipt_pb2.Receipt | None, name: str) -> float | None:
    """Returns a time of the receipt; None where it has none."""
    if receipt is None or not receipt.HasField(name):  # type: ignore[arg-type]
        return None
    nanoseconds: int = getattr(receipt, name).ToNanoseconds()
    return round(nanoseconds / 1e6, 1)
