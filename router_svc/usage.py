"""Usage of tenants, keys and models: what a receipt counts, and the recorder of a router's live requests.

The recorder counts in memory; `router_svc.durable.usage` writes it to the database every few seconds. Tasks are counted
in the transaction that ends them.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TypeAlias

from router_svc.observer import RequestEnded
from router_svc.policy.usage_rows import HourRows, UsageKey
from router_svc.receipt_counts import ReceiptCounts
from weft.api.common.v1 import receipt_pb2
from weft.api.router.v1 import usage_pb2
from weft.dispatch.fleet import UNKNOWN_TARGET, FleetView
from weft.dispatch.request_receipt import accelerator_time
from weft.kernel.requests.placement_request import AGENT_VALUES, PlacementRequest
from weft.kernel.time.clock import Clock

HOUR_SECONDS = 3_600
MAX_COUNTED_GPU_NANOSECONDS = 10**6 * 10**9
"""Maximum counted accelerator time per request: 1,000,000 s."""
MAX_COUNTED_MILLIJOULES = 10**6 * 10**6
"""Maximum counted energy per request: 1,000 W for 1,000,000 s."""
MAX_COUNTED_NANODOLLARS = 10**3 * 10**9
"""Maximum counted price per request: 1,000 dollars."""
MAX_COUNTED_STEPS = 10**6
MAX_COUNTED_PIXELS = 10**11
MAX_COUNTED_AUDIO_MILLISECONDS = 10**6 * 1_000
"""Maximum counted audio per request: 1,000,000 s."""
_NANOSECONDS = 10**9
OTHER_VALUE = "other"
UNKNOWN_CALLER = "unknown"
"""Key of requests without a known sender."""

Outcome: TypeAlias = "receipt_pb2.Outcome.ValueType"


UsageSums: TypeAlias = dict[str, int]
"""Usage sums by column; columns that are 0 may be missing."""

COLUMNS = tuple(
    "gpu_nanoseconds" if field.name == "gpu_time" else field.name for field in usage_pb2.UsageCounts.DESCRIPTOR.fields
)
"""Columns of the table: the fields of the API's `UsageCounts`, with the time in nanoseconds."""
NOTHING = MappingProxyType(dict.fromkeys(COLUMNS, 0))

_COLUMN_OF_OUTCOME: Mapping[int, str] = {
    receipt_pb2.OUTCOME_COMPLETED: "completed_count",
    receipt_pb2.OUTCOME_FAILED: "failed_count",
    receipt_pb2.OUTCOME_CANCELLED: "cancelled_count",
    receipt_pb2.OUTCOME_REJECTED: "rejected_count",
}


def usage_of(counts: ReceiptCounts) -> UsageSums:
    """Returns what a receipt counts."""
    sums = spent_of(counts)
    count_outcome(sums, counts.receipt.outcome)
    if counts.retries:
        sums["retried_count"] = counts.retries
    return sums


def add_usage(sums: UsageSums, other: UsageSums) -> None:
    """Adds other sums to these."""
    for column, number in other.items():
        if column in sums:
            sums[column] += number
        else:
            sums[column] = number


def count_outcome(sums: UsageSums, outcome: Outcome) -> None:
    """Counts a request by its outcome."""
    sums[_COLUMN_OF_OUTCOME.get(outcome, "unknown_count")] = 1


def spent_of(counts: ReceiptCounts) -> UsageSums:
    """Returns a receipt's tokens, media work, accelerator time and energy, without its outcome."""
    receipt, sums = counts.receipt, UsageSums()
    was_worked_on = bool(receipt.attempts)
    if receipt.left_premises:
        sums["remote_count"] = 1
    if counts.has_usage:
        _add_counted(sums, counts)
    elif was_worked_on:
        sums["unknown_tokens_count"] = 1
    if (found := accelerator_time(receipt)) is not None:
        time, _ = found
        nanoseconds = time.seconds * _NANOSECONDS + time.nanos
        sums["gpu_nanoseconds"] = _bounded(nanoseconds, MAX_COUNTED_GPU_NANOSECONDS)
    elif was_worked_on:
        sums["unknown_gpu_count"] = 1
    if receipt.device_usage.HasField("energy_millijoules"):
        sums["energy_millijoules"] = _bounded(receipt.device_usage.energy_millijoules, MAX_COUNTED_MILLIJOULES)
        sums["measured_energy_count"] = 1
    if receipt.HasField("price_nanodollars"):
        sums["price_nanodollars"] = _bounded(receipt.price_nanodollars, MAX_COUNTED_NANODOLLARS)
        sums["priced_count"] = 1
    return sums


def _add_counted(sums: UsageSums, counts: ReceiptCounts) -> None:
    """Adds the tokens and media work of a request; an estimate counts as unknown, too."""
    usage = counts.receipt.usage
    sums["prompt_tokens"] = counts.prompt_tokens
    sums["cached_prompt_tokens"] = counts.cached_prompt_tokens
    sums["completion_tokens"] = counts.completion_tokens
    if usage.image_steps or usage.image_pixels or usage.audio_milliseconds:
        sums["image_steps"] = _bounded(usage.image_steps, MAX_COUNTED_STEPS)
        sums["image_pixels"] = _bounded(usage.image_pixels, MAX_COUNTED_PIXELS)
        sums["audio_milliseconds"] = _bounded(usage.audio_milliseconds, MAX_COUNTED_AUDIO_MILLISECONDS)
    if counts.receipt.left_premises:
        sums["remote_prompt_tokens"] = sums["prompt_tokens"]
        sums["remote_completion_tokens"] = sums["completion_tokens"]
    if usage.prompt_estimated:
        sums["unknown_tokens_count"] = 1


def unknown_work() -> UsageSums:
    """Returns the usage of an attempt without a receipt: unknown tokens and accelerator time."""
    return {"unknown_tokens_count": 1, "unknown_gpu_count": 1}


def hour_of(utc_seconds: float) -> int:
    """Returns the hour of a time, in hours since the epoch."""
    return int(utc_seconds // HOUR_SECONDS)


def asked_of(asked_model: str, target: str, model: str) -> str:
    """Returns the requested alias, pool or route; empty: the model's own name."""
    asked = asked_model or target
    return "" if asked == model else asked


def _agent_of(labels: Collection[str]) -> dict[str, str]:
    """Returns what a request's labels say of its agent; OTHER_VALUE for a value that weft does not know."""
    found = (label.partition("=") for label in labels)
    known = ((name, value, AGENT_VALUES.get(name)) for name, _, value in found if value)
    return {name: value if value in values else OTHER_VALUE for name, value, values in known if values is not None}


def _bounded(number: int, most: int) -> int:
    return max(0, min(number, most))


class UsageRecorder:
    """Counts ends of live requests. Called only from the router's event loop; never raises."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._max_rows: int | None = None
        self._sums: dict[UsageKey, UsageSums] = {}
        self._rows: dict[int, HourRows] = {}

    def keep(self, max_rows_per_hour: int) -> None:
        """Starts counting; without a call there is no writer, and nothing is counted."""
        self._max_rows = max_rows_per_hour

    def note_end(self, ended: RequestEnded) -> None:
        """Counts the end of a request."""
        request, counts, view = ended.request.spec, ended.counts, ended.view
        if self._max_rows is None or not ended.is_counted:
            return
        if counts is not None:
            model = counts.receipt.model if counts.receipt.attempts else ""
            self._add(self._key_of(request, model, view), usage_of(counts))
            return
        if ended.outcome is not None:
            sums = unknown_work() if ended.was_placed else {}
            count_outcome(sums, ended.outcome)
            self._add(self._key_of(request, "", view), sums)

    def note_recovered(
        self, lost: PlacementRequest, receipt: receipt_pb2.Receipt, view: FleetView, *, was_counted: bool
    ) -> None:
        """Counts a request whose router was lost and whose end has become known; `was_counted`: its outcome was."""
        if self._max_rows is not None:
            key = self._key_of(lost, receipt.model if receipt.attempts else "", view)
            counts = ReceiptCounts(receipt)
            self._add(key, spent_of(counts) if was_counted else usage_of(counts))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted since `take`."""
        return not self._sums

    def take(self) -> dict[UsageKey, UsageSums]:
        """Returns what was counted since the last call; the caller stores it or gives it back."""
        taken, self._sums, self._rows = self._sums, {}, {}
        return taken

    def give_back(self, taken: Mapping[UsageKey, UsageSums]) -> None:
        """Counts again what could not be written."""
        for key, sums in taken.items():
            self._add(key, sums)

    def _key_of(self, request: PlacementRequest, model: str, view: FleetView) -> UsageKey:
        hour = hour_of(self._clock.utc_now().timestamp())
        # A name unknown to the mesh is arbitrary text of a caller.
        model = model or view.label(request.model)
        asked = "" if model == UNKNOWN_TARGET else asked_of(request.asked_model, request.model, model)
        caller = request.caller or UNKNOWN_CALLER
        return UsageKey(hour, request.tenant, caller, model, asked, **_agent_of(request.labels))

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
            add_usage(known, sums)
