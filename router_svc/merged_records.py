"""What several routers answer, as one answer of the mesh. Pure.

Counts are added, lists joined in their order. A request that moved from one router to another has a record at both: the
one that ended with MOVED is hidden. So is the one of a request that was lost with a router, where another one goes on
with it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.api.router.v1 import figures_pb2, request_pb2
from weft.api.router.v1.request_service_pb2 import LimitUse
from weft.dispatch.placement import PoolQueue
from weft.kernel.reasons import Reason

MAX_CLIENTS = 1_024
MAX_TARGETS = 8
MAX_LIMIT_USES = 10_000
RequestRecord = request_pb2.RequestRecord


def is_moved(record: RequestRecord) -> bool:
    """Whether this is what a former owner remembers of a request that another router has taken over."""
    return int(record.reason) == Reason.MOVED.value


def newest_record(records: Iterable[RequestRecord]) -> RequestRecord | None:
    """Returns what is known of one request: the record that goes on, else the one that ended last; None: no record."""
    return max(records, key=_worth, default=None)


def _worth(record: RequestRecord) -> tuple[bool, bool, bool, int, int]:
    return (not is_moved(record), not lacks_end(record), not _has_ended(record), *_times(record))


def lacks_end(record: RequestRecord) -> bool:
    """Whether it is not recorded how a request ended: its router was lost, or its dispatcher left without a report."""
    if int(record.reason) == Reason.CANCELLED.value:
        return _has_ended(record) and not record.HasField("receipt") and not record.cancelled_by
    return int(record.reason) == Reason.ROUTER_LOST.value


def merged_requests(lists: Iterable[Iterable[RequestRecord]], limit: int) -> Sequence[RequestRecord]:
    """Returns the first ones of several lists: unfinished ones, the oldest first, then ended ones, the last first."""
    records = [record for each in lists for record in each if not is_moved(record)]
    known = {(record.tenant, record.request_id) for record in records if not lacks_end(record)}
    records = [each for each in records if not lacks_end(each) or (each.tenant, each.request_id) not in known]
    going_on = sorted(
        (each for each in records if not _has_ended(each)), key=lambda each: _nanoseconds(each.arrive_time)
    )
    ended = sorted(filter(_has_ended, records), key=lambda each: -_nanoseconds(each.end_time))
    return [*going_on, *ended][:limit]


def merged_clients(lists: Iterable[Iterable[request_pb2.ClientRecord]]) -> Sequence[request_pb2.ClientRecord]:
    """Returns the clients of several routers, by id. What cannot be added is of the router that saw a client last."""
    found: dict[str, list[request_pb2.ClientRecord]] = {}
    for each in lists:
        for client in each:
            found.setdefault(client.client_id, []).append(client)
    return [_merged_client(found[name]) for name in sorted(found)][:MAX_CLIENTS]


def merged_limit_uses(lists: Iterable[Iterable[LimitUse]]) -> Sequence[LimitUse]:
    """Returns the windows of limits at all routers, in the order of the first.

    Of windows that routers share, each says what all have used; others count what they admit alone.
    """
    found: dict[tuple[Any, ...], LimitUse] = {}
    for use in (use for each in lists for use in each):
        window = (use.tenant, use.key, use.model, use.client, use.window.seconds, use.unit)
        known = found.get(window)
        if known is None:
            found[window] = LimitUse()
            found[window].CopyFrom(use)
            continue
        known.used = max(known.used, use.used) if use.is_shared else known.used + use.used
        slices = {each.router: each for each in (*known.slices, *use.slices)}
        del known.slices[:]
        known.slices.extend(slices[router] for router in sorted(slices))
        known.limit = max(known.limit, use.limit)
        if use.reset.ToNanoseconds() > known.reset.ToNanoseconds():
            known.reset.CopyFrom(use.reset)
    return sorted(found.values(), key=lambda use: use.tenant)[:MAX_LIMIT_USES]


def merged_queues(lists: Iterable[Iterable[PoolQueue]]) -> Sequence[PoolQueue]:
    """Returns the load of each pool at all routers, by name: only its owner has requests that wait."""
    found: dict[str, PoolQueue] = {}
    for each in lists:
        for queue in each:
            known = found.get(queue.pool)
            found[queue.pool] = queue if known is None else _merged_queue(known, queue)
    return [found[name] for name in sorted(found)]


def _merged_queue(one: PoolQueue, other: PoolQueue) -> PoolQueue:
    waits = [queue.average_wait_seconds for queue in (one, other) if queue.average_wait_seconds is not None]
    return replace(
        one,
        waiting=one.waiting + other.waiting,
        max_waiting=max(one.max_waiting, other.max_waiting),
        running=one.running + other.running,
        average_wait_seconds=max(waits, default=None),
    )


def _merged_client(records: Sequence[request_pb2.ClientRecord]) -> request_pb2.ClientRecord:
    merged = request_pb2.ClientRecord()
    merged.CopyFrom(max(records, key=lambda record: _nanoseconds(record.last_seen_time)))
    if len(records) == 1:
        return merged
    for name in ("request_count", "refused_count", "running_count", "token_count", "measured_count"):
        setattr(merged, name, sum(getattr(record, name) for record in records))
    merged.first_seen_time.CopyFrom(min((record.first_seen_time for record in records), key=_nanoseconds))
    measured = [record.device_time.ToNanoseconds() for record in records if record.HasField("device_time")]
    if measured:
        merged.device_time.FromNanoseconds(sum(measured))
    joules = [record.energy_millijoules for record in records if record.HasField("energy_millijoules")]
    if joules:
        merged.energy_millijoules = sum(joules)
    counts: dict[str, int] = {}
    for record in records:
        for target in record.targets:
            counts[target.target] = counts.get(target.target, 0) + target.request_count
    del merged.targets[:]
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:MAX_TARGETS]:
        merged.targets.add(target=name, request_count=count)
    return merged


_COUNTS = (
    "completed",
    "failed",
    "rejected",
    "cancelled",
    "prompt_tokens",
    "cached_prompt_tokens",
    "completion_tokens",
)
_TIMES = ("time_to_first_token", "time_per_output_token")


@dataclass(frozen=True, slots=True)
class _Span:
    """Steps of the mesh's figures, by their number since 1970."""

    first: int
    count: int

    def placed(self, values: Sequence[Any], first: int, missing: Any) -> list[Any]:
        """Returns one router's values, whose first is of the step `first`, at their places among these steps."""
        return [values[step - first] if 0 <= step - first < len(values) else missing for step in self._steps]

    @property
    def _steps(self) -> range:
        return range(self.first, self.first + self.count)


def merged_figures(figures: Sequence[figures_pb2.Figures]) -> figures_pb2.Figures:
    """Returns the figures of several routers in the steps of the first one, up to the last step that all have ended.

    Steps of routers begin at different moments: one counts for the step of the mesh that it overlaps most. Loads and
    counts are added; a percentile is the greatest of the routers', since percentiles cannot be added. Routers whose
    steps have another length are left out.
    """
    if len(figures) == 1:
        return figures[0]
    step = figures[0].step.ToNanoseconds()
    alike = [each for each in figures if each.step.ToNanoseconds() == step]
    filled = [(each, _first_step(each, step)) for each in alike if each.step_count]
    if not filled:
        return figures[0]
    first = min(begin for _, begin in filled)
    end = max(first, min(begin + each.step_count for each, begin in filled))
    span = _Span(first, end - first)
    merged = figures_pb2.Figures(step_count=span.count)
    merged.step.FromNanoseconds(step)
    merged.start_time.FromNanoseconds(first * step)
    for name in ("waiting", "running"):
        getattr(merged, name).extend(_sums(span, [(getattr(each, name), begin) for each, begin in filled]))
    _fill(merged.all, span, [(each.all, begin) for each, begin in filled])
    models = _by_key((model.model, model.requests, begin) for each, begin in filled for model in each.models)
    for name, parts in sorted(models.items(), key=lambda item: (-_total(item[1]), item[0])):
        _fill(merged.models.add(model=name).requests, span, parts)
    devices = _by_key(((one.host, one.index), one, begin) for each, begin in filled for one in each.devices)
    for _, known in sorted(devices.items()):
        _fill_device(merged.devices.add(), span, known)
    return merged


def steps_from(figures: figures_pb2.Figures, begin_nanoseconds: int) -> figures_pb2.Figures:
    """Returns the figures of the steps that begin at or after a moment; times of all steps stay those of all."""
    step = figures.step.ToNanoseconds()
    skipped = min(max(0, -((figures.start_time.ToNanoseconds() - begin_nanoseconds) // step)), figures.step_count)
    cut = figures_pb2.Figures()
    cut.CopyFrom(figures)
    cut.step_count = figures.step_count - skipped
    cut.start_time.FromNanoseconds(figures.start_time.ToNanoseconds() + skipped * step)
    lists: list[Any] = [cut.waiting, cut.running]
    for requests in (cut.all, *(model.requests for model in cut.models)):
        lists += [getattr(requests, name) for name in _COUNTS]
        lists += [values for name in _TIMES for values in (getattr(requests, name).p50, getattr(requests, name).p95)]
    for device in cut.devices:
        lists += [device.used_bytes, device.utilization]
    for values in lists:
        del values[:skipped]
    return cut


def _first_step(figures: figures_pb2.Figures, step: int) -> int:
    return round(figures.start_time.ToNanoseconds() / step)


def _by_key(parts: Iterable[tuple[Any, Any, int]]) -> Mapping[Any, list[tuple[Any, int]]]:
    found: dict[Any, list[tuple[Any, int]]] = {}
    for key, part, begin in parts:
        found.setdefault(key, []).append((part, begin))
    return found


def _sums(span: _Span, parts: Sequence[tuple[Sequence[int], int]]) -> list[int]:
    return [sum(values) for values in zip(*(span.placed(each, begin, 0) for each, begin in parts), strict=True)]


def _total(parts: Sequence[tuple[figures_pb2.RequestFigures, int]]) -> int:
    return sum(
        sum(getattr(part, name)) for part, _ in parts for name in ("completed", "failed", "rejected", "cancelled")
    )


def _fill(
    merged: figures_pb2.RequestFigures, span: _Span, parts: Sequence[tuple[figures_pb2.RequestFigures, int]]
) -> None:
    for name in _COUNTS:
        getattr(merged, name).extend(_sums(span, [(getattr(part, name), begin) for part, begin in parts]))
    for name in _TIMES:
        of_routers = [(getattr(part, name), begin) for part, begin in parts]
        into = getattr(merged, name)
        for quantile in ("p50", "p95"):
            placed = [span.placed(getattr(times, quantile), begin, math.nan) for times, begin in of_routers]
            getattr(into, quantile).extend(_greatest(values) for values in zip(*placed, strict=True))
            total = f"total_{quantile}"
            known = [getattr(times, total) for times, _ in of_routers if times.HasField(total)]
            if known:
                setattr(into, total, max(known))


def _fill_device(
    merged: figures_pb2.DeviceFigures, span: _Span, parts: Sequence[tuple[figures_pb2.DeviceFigures, int]]
) -> None:
    first, _ = parts[0]
    merged.host, merged.index, merged.name, merged.total_bytes = first.host, first.index, first.name, first.total_bytes
    for name in ("used_bytes", "utilization"):
        placed = [span.placed(getattr(part, name), begin, math.nan) for part, begin in parts]
        getattr(merged, name).extend(_greatest(values) for values in zip(*placed, strict=True))


def _greatest(values: Iterable[float]) -> float:
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def _has_ended(record: RequestRecord) -> bool:
    return record.state == RequestRecord.STATE_ENDED


def _times(record: RequestRecord) -> tuple[int, int]:
    return _nanoseconds(record.arrive_time), _nanoseconds(record.end_time)


def _nanoseconds(stamp: Any) -> int:
    return int(stamp.ToNanoseconds())
