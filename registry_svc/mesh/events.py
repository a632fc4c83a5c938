"""Decides which events a step produces."""

from collections.abc import Collection, Iterable, Iterator

from weft.api.registry.v1 import event_pb2
from weft.api.registry.v1.runner_pb2 import InstanceFault, InstanceState, LeftOut
from weft.documents.left_out import left_out_item
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.reasons import Reason

_BROKEN = frozenset({InstanceState.PHASE_CRASH_LOOP, InstanceState.PHASE_FAILED})
_DEATHS = frozenset({Reason.SERVER_DIED, Reason.OUT_OF_MEMORY})
"""The backend died; for any other reason its runner stopped it."""
_NEVER_RAN = frozenset({Reason.INVALID_ARGUMENT, Reason.TEMPLATE_FAILED})
"""The backend never started; the FAILED event has the reason."""


def events_for(
    rows: Iterable[tuple[ResourceKind, str]], reason: event_pb2.EventReason.ValueType, message: str
) -> Iterator[event_pb2.Event]:
    """Returns the same event for each resource."""
    return (event_pb2.Event(kind=kind, name=name, reason=reason, message=message) for kind, name in rows)


def opening_events(
    rows: Collection[tuple[ResourceKind, str]],
    earlier: Collection[tuple[ResourceKind, str]],
    gone: Iterable[tuple[ResourceKind, str]],
    runner: str,
) -> Iterator[event_pb2.Event]:
    """Yields the events of an OpenSession: `rows` are published now, `earlier` were before, `gone` no longer are."""
    yield from events_for(gone, event_pb2.EVENT_REASON_WITHDRAWN, f"withdrawn by the runner {runner} or replaced by it")
    for kind, name in rows:
        known = (kind, name) in earlier
        reason = event_pb2.EVENT_REASON_REVIVED if known else event_pb2.EVENT_REASON_REGISTERED
        first = "joined the mesh" if kind is ResourceKind.RUNNER else f"published by the runner {runner}"
        message = f"the runner {runner} opened a new session" if known else first
        yield event_pb2.Event(kind=kind, name=name, reason=reason, message=message)


def left_out_event(kind: ResourceKind, name: str, message: str) -> event_pb2.Event:
    """Returns the event of an item of a runner that the mesh does not serve."""
    return event_pb2.Event(kind=kind, name=name, reason=event_pb2.EVENT_REASON_LEFT_OUT, message=message)


def left_out_events(runner: str, before: Iterable[LeftOut], now: Iterable[LeftOut]) -> list[event_pb2.Event]:
    """Returns an event for each item that is left out now and was not before."""
    known = {(each.kind, each.name) for each in before}
    return [
        left_out_event(ResourceKind.RUNNER, runner, f"not served: {left_out_item(each)}")
        for each in now
        if (each.kind, each.name) not in known
    ]


def report_events(
    earlier: Iterable[InstanceState],
    report: Iterable[InstanceState],
    models: Collection[str],
    *,
    waking: Collection[str] = (),
    reported_before: bool,
) -> list[event_pb2.Event]:
    """Returns the events of a capability report about `models`: died, asleep, awake, failed, ready.

    `waking` are models that hibernated and have not accepted requests since. The first report after a restart of the
    registry yields only failures.
    """
    before = {instance.model: instance for instance in earlier}
    return [
        draft
        for instance in report
        if instance.model in models
        for draft in _of_instance(instance, before.get(instance.model), was_waking=instance.model in waking)
        if reported_before or draft.reason == event_pb2.EVENT_REASON_FAILED
    ]


def waking_after(
    earlier: Iterable[InstanceState], report: Iterable[InstanceState], waking: Collection[str]
) -> frozenset[str]:
    """Returns the models that hibernated before this report, and have not accepted requests since.

    `waking` are those before this report. A model that hibernates again did not wake.
    """
    asleep = {instance.model for instance in earlier if instance.phase == InstanceState.PHASE_HIBERNATING}
    return frozenset(
        instance.model
        for instance in report
        if (instance.model in asleep or instance.model in waking)
        and instance.phase not in (InstanceState.PHASE_READY, InstanceState.PHASE_HIBERNATING)
    )


def _of_instance(
    instance: InstanceState, before: InstanceState | None, *, was_waking: bool
) -> Iterator[event_pb2.Event]:
    """Yields the faults since the last report, then a changed phase.

    A backend may have died and be ready again between two reports. A model wakes when it accepts requests again: if its
    load fails and it goes back to sleep, it was never awake.
    """

    def draft(reason: event_pb2.EventReason.ValueType, message: str) -> event_pb2.Event:
        return event_pb2.Event(kind=ResourceKind.MODEL, name=instance.model, reason=reason, message=message)

    faults = instance.fault_count - (0 if before is None else before.fault_count)
    if faults > 0 and instance.HasField("last_fault") and int(instance.last_fault.reason) not in _NEVER_RAN:
        yield draft(*_of_fault(instance.last_fault, instance.fault_count, faults))
    earlier = None if before is None else before.phase
    if instance.phase == earlier and not (faults > 0 and earlier == InstanceState.PHASE_READY):
        return
    if instance.phase == InstanceState.PHASE_HIBERNATING and not was_waking:
        yield draft(event_pb2.EVENT_REASON_HIBERNATED, "it went to sleep")
    if instance.phase == InstanceState.PHASE_READY:
        if was_waking or earlier == InstanceState.PHASE_HIBERNATING:
            yield draft(event_pb2.EVENT_REASON_WOKE, "it woke up")
        yield draft(event_pb2.EVENT_REASON_READY, "its engine takes requests")
    elif instance.phase in _BROKEN and earlier not in _BROKEN:
        what = "is in a crash loop" if instance.phase == InstanceState.PHASE_CRASH_LOOP else "failed"
        yield draft(
            event_pb2.EVENT_REASON_FAILED, f"its engine {what}" + (f": {instance.detail}" if instance.detail else "")
        )


def _of_fault(fault: InstanceFault, total: int, new: int) -> tuple[event_pb2.EventReason.ValueType, str]:
    """Returns the event for the last of `new` faults, with the number `total`."""
    number = f"restart {total}" if new == 1 else f"restarts {total - new + 1} to {total}, the last one"
    reason = Reason(fault.reason)
    how = fault.detail or reason.name.lower()
    if reason is Reason.OUT_OF_MEMORY and "memory" not in how:
        how = f"out of memory: {how}"
    return event_pb2.EVENT_REASON_DIED if reason in _DEATHS else event_pb2.EVENT_REASON_RESTARTED, f"{how} ({number})"
