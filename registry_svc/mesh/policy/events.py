"""Decides which events a step produces."""

from collections.abc import Collection, Iterable, Iterator
from typing import Literal, Protocol

from registry_svc.mesh.domain import EventDraft, EventReason, Phase
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.reasons import Reason

_BROKEN = frozenset({Phase.CRASH_LOOP, Phase.FAILED})
_DEATHS = frozenset({Reason.SERVER_DIED, Reason.OUT_OF_MEMORY})
"""The backend died; for any other reason its runner stopped it."""
_NEVER_RAN = frozenset({Reason.INVALID_ARGUMENT, Reason.TEMPLATE_FAILED})
"""The backend never started; the FAILED event has the reason."""


class Fault(Protocol):
    """The unexpected end of a backend: `registry.v1.InstanceFault`."""

    @property
    def reason(self) -> int:
        """Number of a Reason."""
        ...

    @property
    def detail(self) -> str:
        """The signal or exit code, and the likely cause if known."""
        ...


class Instance(Protocol):
    """The report about a model on a runner: `registry.v1.InstanceState`."""

    @property
    def model(self) -> str:
        """Name of the model."""
        ...

    @property
    def phase(self) -> int:
        """Number of a Phase."""
        ...

    @property
    def detail(self) -> str:
        """Reason for the phase."""
        ...

    @property
    def fault_count(self) -> int:
        """Number of faults since its runner started."""
        ...

    @property
    def last_fault(self) -> Fault:
        """The last fault."""
        ...

    def HasField(self, field_name: Literal["last_fault"], /) -> bool:  # noqa: N802 - the method of messages
        """Whether the last fault is reported."""
        ...


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
    earlier: Iterable[Instance],
    report: Iterable[Instance],
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


def waking_after(earlier: Iterable[Instance], report: Iterable[Instance], waking: Collection[str]) -> frozenset[str]:
    """Returns the models that hibernated before this report, and have not accepted requests since.

    `waking` are those before this report. A model that hibernates again did not wake.
    """
    asleep = {instance.model for instance in earlier if instance.phase == Phase.HIBERNATING}
    return frozenset(
        instance.model
        for instance in report
        if (instance.model in asleep or instance.model in waking)
        and instance.phase not in (Phase.READY, Phase.HIBERNATING)
    )


def _of_instance(instance: Instance, before: Instance | None, *, was_waking: bool) -> Iterator[EventDraft]:
    """Yields the faults since the last report, then a changed phase.

    A backend may have died and be ready again between two reports. A model wakes when it accepts requests again: if its
    load fails and it goes back to sleep, it was never awake.
    """

    def draft(reason: EventReason, message: str) -> EventDraft:
        return EventDraft(kind=ResourceKind.MODEL, name=instance.model, reason=reason, message=message)

    faults = instance.fault_count - (0 if before is None else before.fault_count)
    if faults > 0 and instance.HasField("last_fault") and instance.last_fault.reason not in _NEVER_RAN:
        yield draft(*_of_fault(instance.last_fault, instance.fault_count, faults))
    earlier = None if before is None else before.phase
    if instance.phase == earlier and not (faults > 0 and earlier == Phase.READY):
        return
    if instance.phase == Phase.HIBERNATING and not was_waking:
        yield draft(EventReason.HIBERNATED, "it went to sleep")
    if instance.phase == Phase.READY:
        if was_waking or earlier == Phase.HIBERNATING:
            yield draft(EventReason.WOKE, "it woke up")
        yield draft(EventReason.READY, "its engine takes requests")
    elif instance.phase in _BROKEN and earlier not in _BROKEN:
        what = "is in a crash loop" if instance.phase == Phase.CRASH_LOOP else "failed"
        yield draft(EventReason.FAILED, f"its engine {what}" + (f": {instance.detail}" if instance.detail else ""))


def _of_fault(fault: Fault, total: int, new: int) -> tuple[EventReason, str]:
    """Returns the event for the last of `new` faults, with the number `total`."""
    number = f"restart {total}" if new == 1 else f"restarts {total - new + 1} to {total}, the last one"
    died = fault.reason in _DEATHS
    how = fault.detail or Reason(fault.reason).name.lower()
    if fault.reason == Reason.OUT_OF_MEMORY and "memory" not in how:
        how = f"out of memory: {how}"
    return EventReason.DIED if died else EventReason.RESTARTED, f"{how} ({number})"
