"""The response object. Constant fields are encoded once: tools and their schemas can be large."""

from collections.abc import Collection
from datetime import datetime

import msgspec

from gateway.answers.answer_builder import has_counts
from gateway.errors import envelope
from gateway.gateway_config import ResponseEnvelope
from gateway.openai.chat_builder import FUNCTION
from gateway.responses.namespaces import NAMESPACE, functions_of, members_by_flat_name
from gateway.responses.output import OutputItems
from gateway.responses.payload import asks_for_metrics, envelope_of, wants_logprobs
from gateway.responses.schema import ResponsesRequest, ResponsesToolChoiceObject, ResponseTool
from weft.api.common.v1 import receipt_pb2, timing_pb2, usage_pb2
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.text.json_lines import encode_json
from weft.kernel.time.clock import Clock

QUEUED = "queued"
COMPLETED = "completed"
INCOMPLETE = "incomplete"
IN_PROGRESS = "in_progress"
CANCELLED = "cancelled"
FAILED = "failed"

_ECHOED = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p", "user")


class ResponseDocument:
    """One response: collects the output of its answer, and renders it as JSON at any time.

    Used for live streams, unary answers and replays of stored tasks.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        response_id: str,
        *,
        clock: Clock,
        is_stored: bool,
        arrived: float | None = None,
        created_at: datetime | None = None,
        envelope: ResponseEnvelope = ResponseEnvelope.OPENAI,
    ) -> None:
        """`created_at`: None: now. `arrived`: the request's arrival on the monotonic clock; None: `ended_at` is used.

        `envelope`: the form of the response if its request names none.
        """
        self.response_id = response_id
        self.created_at = created_at or clock.utc_now()
        self.created = int(self.created_at.timestamp())
        self._is_pool = envelope_of(request, envelope) is ResponseEnvelope.POOL
        self.has_metrics = self._is_pool or asks_for_metrics(request)
        members = members_by_flat_name(request.tools)
        self.items = OutputItems(response_id, logprobs=wants_logprobs(request), members=members)
        self.model = request.model
        """The requested model, later the answering one."""
        self.is_stored = is_stored
        """Whether the response is or will be stored."""
        self.usage = usage_pb2.Usage()
        """Token counts; zero: unknown."""
        self.warnings: list[dict[str, object]] = []
        self.signals: list[dict[str, object]] = []
        self.error: WeftError | None = None
        self.ended_at: datetime | None = None
        """The end of a task's answer, set before it is concluded."""
        self.final_status = ""
        """Empty until the response is concluded."""
        self._completed_at: int | None = None
        self._receipt: receipt_pb2.Receipt | None = None
        self._total_seconds: float | None = None
        self._clock = clock
        self._arrived = arrived
        known = {"id": response_id, "object": "response", "created_at": self.created}
        self._head = encode_json(known)[:-1] + b","
        self._echo = encode_json(_echo(request))[1:]

    def show_hosted(self, request: ResponsesRequest, hosted: Collection[str]) -> None:
        """Has it list the tools that the gateway runs, by their places in the request, such as `tools[0]`."""
        self._echo = encode_json(_echo(request, hosted))[1:]

    @property
    def is_of_task(self) -> bool:
        """Whether a task stores the answer and its times."""
        return self._arrived is None

    def render(self, status: str) -> bytes:
        """Returns the object as JSON, with its final status once it is concluded, before that with `status`."""
        status, items = self.final_status or status, self.items
        changing: dict[str, object] = {
            "status": status,
            "completed_at": self._completed_at if status == COMPLETED else None,
            "error": None if self.error is None else error_json(self.error),
            "incomplete_details": {"reason": items.incomplete_reason()} if status == INCOMPLETE else None,
            "model": self.model,
            "output": items.json(IN_PROGRESS if status == IN_PROGRESS else INCOMPLETE, flat=self._is_pool),
            "usage": usage_json(self.usage) if has_counts(self.usage) else None,
            "store": self.is_stored,
        }
        if self.has_metrics:
            changing["output_text"] = items.text()
            changing["metrics"] = self.metrics()
        if self.warnings:
            changing["warnings"] = self.warnings
        if self.signals:
            changing["signals"] = self.signals
        return self._head + encode_json(changing)[1:-1] + b"," + self._echo

    def conclude(self, receipt: receipt_pb2.Receipt) -> None:
        """Completes the output, and determines the final status."""
        self.items.close()
        self._receipt = receipt
        if self._arrived is None:
            ended_at = self.ended_at or self.created_at
            self._total_seconds = (ended_at - self.created_at).total_seconds()
        else:
            ended_at, self._total_seconds = self._clock.utc_now(), self._clock.monotonic() - self._arrived
        self.final_status = INCOMPLETE if self.items.incomplete_reason() else COMPLETED
        if self.final_status == COMPLETED:
            self._completed_at = int(ended_at.timestamp())

    def note_not_stored(self, why: WeftError) -> None:
        """Records that storing the response failed."""
        self.is_stored = False
        message = f"the response could not be stored: {error_json(why)['message']}"
        self.warnings.append({"code": "not_stored", "field": "store", "message": message})

    def metrics(self) -> dict[str, object]:
        """Returns known times in milliseconds, and counts."""
        receipt = self._receipt or receipt_pb2.Receipt()
        times, usage = receipt.engine_timings, self.usage
        wall, total = _millis(times, "wall_time"), _millis(receipt, "total_time")
        is_consistent = times.HasField("outside_time") and wall is not None and total is not None
        device = receipt.device_usage
        on_accelerator = receipt.HasField("gpu_time")
        has_usage = has_counts(usage)
        found = {
            "backend_inference_wall_ms": wall,
            "engine_total_wall_ms": total,
            # From the rounded figures, so that the two parts add up to the total.
            "engine_outside_backend_wall_ms": round((total or 0.0) - (wall or 0.0), 1) if is_consistent else None,
            "pool_total_wall_ms": None if self._total_seconds is None else round(self._total_seconds * 1e3, 1),
            "engine_queue_wait_ms": _millis(receipt, "queue_wait"),
            "engine_load_wait_ms": _millis(receipt, "load_wait"),
            "engine_time_to_first_token_ms": _millis(receipt, "time_to_first_token"),
            "engine_tokenize_ms": _millis(times, "tokenize_time"),
            "gpu_time_to_first_token_ms": _millis(times, "prefill_time") if on_accelerator else None,
            "gpu_generate_total_ms": _millis(receipt, "gpu_time"),
            "gpu_decode_after_first_token_ms": _millis(times, "decode_time") if on_accelerator else None,
            "gpu_device_time_ms": _millis(device, "device_time"),
            "gpu_energy_mj": device.energy_millijoules if device.HasField("energy_millijoules") else None,
            "engine_prompt_tokens": usage.prompt_tokens if has_usage else None,
            "engine_output_tokens": usage.completion_tokens if has_usage else None,
            "engine_tokens_per_second": receipt.tokens_per_second or None,
        }
        return {name: value for name, value in found.items() if value is not None}


def usage_json(usage: usage_pb2.Usage) -> dict[str, object]:
    """Returns token counts in the format of the Responses API."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_prompt_tokens,
            "cache_write_tokens": usage.cache_write_prompt_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def error_json(error: WeftError) -> dict[str, object]:
    """Returns the `error` of a failed response, with the message of the error envelope."""
    fields: dict[str, object] = msgspec.json.decode(envelope(error))["error"]
    return {"code": fields["code"], "message": fields["message"]}


def _echo(request: ResponsesRequest, hosted: Collection[str] = ()) -> dict[str, object]:
    """Returns the fields that the response repeats from its request."""
    reasoning, text = request.reasoning, request.text
    shown: dict[str, object] = {name: getattr(request, name) for name in _ECHOED}
    key = request.prompt_cache_key
    text_format = text.format.model_dump(exclude_none=True, by_alias=True) if text and text.format else {}
    return shown | {
        "background": bool(request.background),
        "conversation": request.conversation and {"id": request.conversation},
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "prompt_cache_key": key if isinstance(key, str) else None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "text": {"format": {"type": "text"} | text_format},
        "tool_choice": _tool_choice(request.tool_choice),
        "tools": _tools(request, hosted),
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",
    }


def _tool_choice(choice: str | ResponsesToolChoiceObject | None) -> object:
    if isinstance(choice, ResponsesToolChoiceObject):
        return choice.model_dump(exclude_none=True)
    return choice or "auto"


def _tools(request: ResponsesRequest, hosted: Collection[str]) -> list[dict[str, object]]:
    """Returns the tools that are offered to the model."""
    return [
        _tool(tool) if tool.type in {FUNCTION, NAMESPACE} else tool.model_dump(exclude_none=True)
        for index, tool in enumerate(request.tools or ())
        if tool.type in {FUNCTION, NAMESPACE} or f"tools[{index}]" in hosted
    ]


def _tool(tool: ResponseTool) -> dict[str, object]:
    if tool.type == NAMESPACE:
        functions = [_tool(function) for _, function in functions_of(tool, "")]
        return {"type": NAMESPACE, "name": tool.name, "description": tool.description, "tools": functions}
    return {
        "type": FUNCTION,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }


def _millis(
    record: receipt_pb2.Receipt | receipt_pb2.DeviceUsage | timing_pb2.EngineTimings, name: str
) -> float | None:
    """Returns a time of a record in milliseconds; None: not set."""
    if not record.HasField(name):  # type: ignore[arg-type]  # a name of its own fields
        return None
    nanoseconds: int = getattr(record, name).ToNanoseconds()
    return round(nanoseconds / 1e6, 1)
