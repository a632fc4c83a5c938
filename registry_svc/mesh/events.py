"""Decides which events a step produces."""

from collections.abc import Collection, Iterable, Iterator

from registry_svc.mesh.domain import EventDraft, EventReason
from weft.api.registry.v1.runner_pb2 import InstanceFault, InstanceState
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.reasons import Reason

_BROKEN = frozenset({InstanceState.PHASE_CRASH_LOOP, InstanceState.PHASE_FAILED})
_DEATHS = frozenset({Reason.SERVER_DIED, Reason.OUT_OF_MEMORY})
"""The backend died; for any other reason its runner stopped it."""
_NEVER_RAN = frozenset({Reason.INVALID_ARGUMENT, Reason.TEMPLATE_FAILED})
"""The backend never started; the FAILED event has the reason."""


def events_for(rows: Iterable[tuple[ResourceKind, str]], reason: EventReason, message: str) -> Iterator[EventDraft]:
    """Returns the same event for each resource."""
    return (EventDraft(kind=kind, name=name, reason=reason, message=message) for kind, name in rows)


def opening_events(
    rows: Collection[tuple[ResourceKind, str]],
    earlier: Collection[tuple[ResourceKind, str]],
    gone: Iterable[tuple[ResourceKind, str]],
    runner: str,
) -> Iterator[EventDraft]:
    """Yields the events of an OpenSession: `rows` are published now, `earlier` were before, `gone` no longer are."""
    yield from events_for(gone, EventReason.WITHDRAWN, f"withdrawn by the runner {runner} or replaced by it")
    for kind, name in rows:
        known = (kind, name) in earlier
        reason = EventReason.REVIVED if known else EventReason.REGISTERED
        first = "joined the mesh" if kind is ResourceKind.RUNNER else f"published by the runner {runner}"
        message = f"the runner {runner} opened a new session" if known else first
        yield EventDraft(kind=kind, name=name, reason=reason, message=message)


def report_events(
    earlier: Iterable[InstanceState],
    report: Iterable[InstanceState],
    models: Collection[str],
    *,
    waking: Collection[str] = (),
    reported_before: bool,
) -> list[EventDraft]:
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
        if reported_before or draft.reason is EventReason.FAILED
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


def _of_instance(instance: InstanceState, before: InstanceState | None, *, was_waking: bool) -> Iterator[EventDraft]:
    """Yields the faults since the last report, then a changed phase.

    A backend may have died and be ready again between two reports. A model wakes when it accepts requests again: if its
    load fails and it goes back to sleep, it was never awake.
    """

    def draft(reason: EventReason, message: str) -> EventDraft:
        return EventDraft(kind=ResourceKind.MODEL, name=instance.model, reason=reason, message=message)

    faults = instance.fault_count - (0 if before is None else before.fault_count)
    if faults > 0 and instance.HasField("last_fault") and int(instance.last_fault.reason) not in _NEVER_RAN:
        yield draft(*_of_fault(instance.last_fault, instance.fault_count, faults))
    earlier = None if before is None else before.phase
    if instance.phase == earlier and not (faults > 0 and earlier == InstanceState.PHASE_READY):
        return
    if instance.phase == InstanceState.PHASE_HIBERNATING and not was_waking:
        yield draft(EventReason.HIBERNATED, "it went to sleep")
    if instance.phase == InstanceState.PHASE_READY:
        if was_waking or earlier == InstanceState.PHASE_HIBERNATING:
            yield draft(EventReason.WOKE, "it woke up")
        yield draft(EventReason.READY, "its engine takes requests")
    elif instance.phase in _BROKEN and earlier not in _BROKEN:
        what = "is in a crash loop" if instance.phase == InstanceState.PHASE_CRASH_LOOP else "failed"
        yield draft(EventReason.FAILED, f"its engine {what}" + (f": {instance.detail}" if instance.detail else ""))


def _of_fault(fault: InstanceFault, total: int, new: int) -> tuple[EventReason, str]:
    """Returns the event for the last of `new` faults, with the number `total`."""
    number = f"restart {total}" if new == 1 else f"restarts {total - new + 1} to {total}, the last one"
    reason = Reason(fault.reason)
    how = fault.detail or reason.name.lower()
    if reason is Reason.OUT_OF_MEMORY and "memory" not in how:
        how = f"out of memory: {how}"
    return EventReason.DIED if reason in _DEATHS else EventReason.RESTARTED, f"{how} ({number})"
