"""Usage of tenants, keys and models: what of a receipt is counted, and the recorder of a router's live requests.

The recorder counts in memory; `router_svc.durable.usage` writes it to the database every few seconds. Tasks are not
counted here but in the transaction that ends them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TypeAlias

from router_svc.policy.usage_rows import HourRows, UsageKey
from router_svc.request_ended import RequestEnded
from weft.api.common.v1 import receipt_pb2
from weft.dispatch.accelerator_time import accelerator_time
from weft.dispatch.agents import UNKNOWN_TARGET, TargetLabels
from weft.dispatch.fleet import FleetView
from weft.kernel.clock import Clock
from weft.kernel.placement_request import PlacementRequest
from weft.kernel.reasons import Reason

HOUR_SECONDS = 3_600
MAX_COUNTED_TOKENS = 10**10
"""Most tokens of one request that are counted: what engines report is not believed without a bound."""
MAX_COUNTED_GPU_NANOSECONDS = 10**6 * 10**9
"""Most accelerator time of one request that is counted: 1,000,000 s."""
MAX_COUNTED_MILLIJOULES = 10**6 * 10**6
"""Most energy of one request that is counted: 1,000 W for 1,000,000 s."""
MAX_COUNTED_STEPS = 10**6
"""Most steps of one request that are counted."""
MAX_COUNTED_PIXELS = 10**11
"""Most pixels of the images of one request that are counted."""
MAX_COUNTED_AUDIO_MILLISECONDS = 10**6 * 1_000
"""Most audio of one request that is counted: 1,000,000 s."""
_NANOSECONDS = 10**9
UNKNOWN_CALLER = "unknown"
"""The key of requests whose gateway does not say who sent them."""

Outcome: TypeAlias = "receipt_pb2.Outcome.ValueType"


@dataclass(slots=True)
class UsageSums:
    """Sums of usage; see `UsageCounts` of the API. The fields are the columns of the table."""

    completed_count: int = 0
    failed_count: int = 0
    cancelled_count: int = 0
    rejected_count: int = 0
    unknown_count: int = 0
    retried_count: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    unknown_tokens_count: int = 0
    gpu_nanoseconds: int = 0
    unknown_gpu_count: int = 0
    remote_count: int = 0
    remote_prompt_tokens: int = 0
    remote_completion_tokens: int = 0
    energy_millijoules: int = 0
    measured_energy_count: int = 0
    image_steps: int = 0
    image_pixels: int = 0
    audio_milliseconds: int = 0

    def add(self, other: "UsageSums") -> None:
        """Adds other sums to these."""
        # Written out: each request ends with it, and a loop over the names took 5 us.
        self.completed_count += other.completed_count
        self.failed_count += other.failed_count
        self.cancelled_count += other.cancelled_count
        self.rejected_count += other.rejected_count
        self.unknown_count += other.unknown_count
        self.retried_count += other.retried_count
        self.prompt_tokens += other.prompt_tokens
        self.cached_prompt_tokens += other.cached_prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.unknown_tokens_count += other.unknown_tokens_count
        self.gpu_nanoseconds += other.gpu_nanoseconds
        self.unknown_gpu_count += other.unknown_gpu_count
        self.remote_count += other.remote_count
        self.remote_prompt_tokens += other.remote_prompt_tokens
        self.remote_completion_tokens += other.remote_completion_tokens
        self.energy_millijoules += other.energy_millijoules
        self.measured_energy_count += other.measured_energy_count
        self.image_steps += other.image_steps
        self.image_pixels += other.image_pixels
        self.audio_milliseconds += other.audio_milliseconds

    def values(self) -> dict[str, int]:
        """Returns the sums by column."""
        return {name: getattr(self, name) for name in COLUMNS}


COLUMNS = tuple(field.name for field in fields(UsageSums))

_COLUMN_OF_OUTCOME: Mapping[int, str] = {
    receipt_pb2.OUTCOME_COMPLETED: "completed_count",
    receipt_pb2.OUTCOME_FAILED: "failed_count",
    receipt_pb2.OUTCOME_CANCELLED: "cancelled_count",
    receipt_pb2.OUTCOME_REJECTED: "rejected_count",
}


def usage_of(receipt: receipt_pb2.Receipt) -> UsageSums:
    """Returns what one receipt counts."""
    sums = spent_of(receipt)
    count_outcome(sums, receipt.outcome)
    return sums


def count_outcome(sums: UsageSums, outcome: Outcome) -> None:
    """Counts one request by its outcome."""
    column = _COLUMN_OF_OUTCOME.get(outcome, "unknown_count")
    setattr(sums, column, getattr(sums, column) + 1)


def spent_of(receipt: receipt_pb2.Receipt) -> UsageSums:
    """Returns tokens, work on media, accelerator time and energy of a receipt, without its outcome."""
    sums = UsageSums()
    was_worked_on = bool(receipt.attempts)
    if receipt.left_premises:
        sums.remote_count = 1
    if receipt.HasField("usage"):
        usage = receipt.usage
        sums.prompt_tokens = _bounded(usage.prompt_tokens, MAX_COUNTED_TOKENS)
        sums.cached_prompt_tokens = _bounded(usage.cached_prompt_tokens, MAX_COUNTED_TOKENS)
        sums.completion_tokens = _bounded(usage.completion_tokens, MAX_COUNTED_TOKENS)
        if usage.image_steps or usage.image_pixels or usage.audio_milliseconds:
            sums.image_steps = _bounded(usage.image_steps, MAX_COUNTED_STEPS)
            sums.image_pixels = _bounded(usage.image_pixels, MAX_COUNTED_PIXELS)
            sums.audio_milliseconds = _bounded(usage.audio_milliseconds, MAX_COUNTED_AUDIO_MILLISECONDS)
        if receipt.left_premises:
            sums.remote_prompt_tokens, sums.remote_completion_tokens = sums.prompt_tokens, sums.completion_tokens
    elif was_worked_on:
        sums.unknown_tokens_count = 1
    if (found := accelerator_time(receipt)) is not None:
        time, _ = found
        nanoseconds = time.seconds * _NANOSECONDS + time.nanos
        sums.gpu_nanoseconds = _bounded(nanoseconds, MAX_COUNTED_GPU_NANOSECONDS)
    elif was_worked_on:
        sums.unknown_gpu_count = 1
    if receipt.device_usage.HasField("energy_millijoules"):
        sums.energy_millijoules = _bounded(receipt.device_usage.energy_millijoules, MAX_COUNTED_MILLIJOULES)
        sums.measured_energy_count = 1
    return sums


def unknown_work() -> UsageSums:
    """Returns what an attempt without a receipt counts: neither tokens nor accelerator time are known."""
    return UsageSums(unknown_tokens_count=1, unknown_gpu_count=1)


def hour_of(utc_seconds: float) -> int:
    """Returns the hour of a time, in hours since the epoch."""
    return int(utc_seconds // HOUR_SECONDS)


def asked_of(asked_model: str, target: str, model: str) -> str:
    """Returns the name that was asked for: an alias, else a pool or a route; empty: the model's own name."""
    asked = asked_model or target
    return "" if asked == model else asked


def _bounded(number: int, most: int) -> int:
    return max(0, min(number, most))


class UsageRecorder:
    """Counts the ends of a router's live requests. Called from the router's event loop alone; it never raises."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._labels = TargetLabels()
        self._max_rows: int | None = None
        self._sums: dict[UsageKey, UsageSums] = {}
        self._rows: dict[int, HourRows] = {}

    def keep(self, max_rows_per_hour: int) -> None:
        """Starts counting. Until then nothing is counted, because no writer stores it."""
        self._max_rows = max_rows_per_hour

    def note_end(self, ended: RequestEnded) -> None:
        """Counts the end of a request."""
        request, receipt, view = ended.request.spec, ended.receipt, ended.view
        if not self._is_counted(request):
            return
        if receipt is not None:
            model = receipt.model if receipt.attempts else ""
            self._add(self._key_of(request, model, view), usage_of(receipt))
            return
        sums = UsageSums(rejected_count=1) if ended.refusal is not None else _without_receipt(ended)
        if sums is not None:
            self._add(self._key_of(request, "", view), sums)

    def note_recovered(
        self,
        lost: PlacementRequest,
        tenant: str,
        target: str,
        receipt: receipt_pb2.Receipt,
        view: FleetView,
        *,
        was_counted: bool,
    ) -> None:
        """Counts a request whose router was lost and whose end has become known; `was_counted`: its outcome was.

        `target`: see `PlacementRequest.model`.
        """
        if self._max_rows is None:
            return
        hour = hour_of(self._clock.utc_now().timestamp())
        # A name that the mesh does not know is a caller's text.
        model = (receipt.model if receipt.attempts else "") or self._labels.label(target, view)
        asked = "" if model == UNKNOWN_TARGET else asked_of(lost.asked_model, target, model)
        key = UsageKey(hour, tenant, lost.caller or UNKNOWN_CALLER, model, asked)
        self._add(key, spent_of(receipt) if was_counted else usage_of(receipt))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted since `take`."""
        return not self._sums

    def take(self) -> dict[UsageKey, UsageSums]:
        """Returns what was counted since the last call; the caller keeps it, or gives it back."""
        taken, self._sums, self._rows = self._sums, {}, {}
        return taken

    def give_back(self, taken: Mapping[UsageKey, UsageSums]) -> None:
        """Counts what was taken and could not be written."""
        for key, sums in taken.items():
            self._add(key, sums)

    def _is_counted(self, request: PlacementRequest) -> bool:
        # Tasks are counted by their store.
        return self._max_rows is not None and not request.task_id

    def _key_of(self, request: PlacementRequest, model: str, view: FleetView) -> UsageKey:
        hour = hour_of(self._clock.utc_now().timestamp())
        # A name that the mesh does not know is a caller's text.
        model = model or self._labels.label(request.model, view)
        asked = "" if model == UNKNOWN_TARGET else asked_of(request.asked_model, request.model, model)
        return UsageKey(hour, request.tenant, request.caller or UNKNOWN_CALLER, model, asked)

    def _add(self, key: UsageKey, sums: UsageSums) -> None:
        assert self._max_rows is not None, "it counts"
        rows = self._rows.get(key.hour)
        if rows is None:
            rows = self._rows[key.hour] = HourRows(self._max_rows)
        key = rows.row_of(key)
        known = self._sums.get(key)
        if known is None:
            self._sums[key] = sums
        else:
            known.add(sums)


def _without_receipt(ended: RequestEnded) -> UsageSums | None:
    """Returns what a request without a receipt counts; None: its dispatcher places it again."""
    refused, was_placed, is_closing = ended.last_error, ended.was_placed, ended.is_closing
    if refused is Reason.SERVICE_UNAVAILABLE and not (is_closing and was_placed):
        return None
    sums = unknown_work() if was_placed else UsageSums()
    if refused is Reason.CANCELLED:
        sums.cancelled_count = 1
    elif refused is None or is_closing:
        sums.unknown_count = 1
    elif was_placed:
        sums.failed_count = 1
    else:
        sums.rejected_count = 1
    return sums
