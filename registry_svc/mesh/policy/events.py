"""Decides which events a step produces."""

from collections.abc import Collection, Iterable, Iterator
from typing import Literal, Protocol

from registry_svc.mesh.domain import EventDraft, EventReason, Phase
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.reasons import Reason

_BROKEN = frozenset({Phase.CRASH_LOOP, Phase.FAILED})
_DEATHS = frozenset({Reason.SERVER_DIED, Reason.OUT_OF_MEMORY})
"""Ends of the backend's own; for every other reason its runner ended it."""
_NEVER_RAN = frozenset({Reason.INVALID_ARGUMENT, Reason.TEMPLATE_FAILED})
"""Nothing was started; the event of the failure gives the reason."""


class Fault(Protocol):
    """The unexpected end of a backend, as `registry.v1.InstanceFault` reports it."""

    @property
    def reason(self) -> int:
        """Number of a Reason."""
        ...

    @property
    def detail(self) -> str:
        """The signal or the exit code, and the likely cause where there is one."""
        ...


class Instance(Protocol):
    """The report about one model on one runner, as `registry.v1.InstanceState` has it."""

    @property
    def model(self) -> str:
        """The name of the model."""
        ...

    @property
    def phase(self) -> int:
        """Number of a Phase."""
        ...

    @property
    def detail(self) -> str:
        """Why it is in this phase."""
        ...

    @property
    def fault_count(self) -> int:
        """Faults since its runner started."""
        ...

    @property
    def last_fault(self) -> Fault:
        """The last of these."""
        ...

    def HasField(self, field_name: Literal["last_fault"], /) -> bool:  # noqa: N802 - the method of messages
        """Whether the last fault is reported."""
        ...


def events_for(rows: Iterable[tuple[ResourceKind, str]], reason: EventReason, message: str) -> Iterator[EventDraft]:
    """The same event for each of these rows."""
    return (EventDraft(kind=kind, name=name, reason=reason, message=message) for kind, name in rows)


def opening_events(
    rows: Collection[tuple[ResourceKind, str]],
    earlier: Collection[tuple[ResourceKind, str]],
    gone: Iterable[tuple[ResourceKind, str]],
    runner: str,
) -> Iterator[EventDraft]:
    """The events of an OpenSession: `rows` are published now, `earlier` were before, `gone` are not any more."""
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
    """Return the events of a capability report about `models`: died, asleep, awake, broken, ready.

    `waking`: models that hibernated and have not taken requests since. The first report after a restart of the registry
    yields only failures.
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
    """Return the models that hibernated before this report or in it, and have not taken requests since.

    `waking`: the same before this report. One that hibernates again did not wake.
    """
    asleep = {instance.model for instance in earlier if instance.phase == Phase.HIBERNATING}
    return frozenset(
        instance.model
        for instance in report
        if (instance.model in asleep or instance.model in waking)
        and instance.phase not in (Phase.READY, Phase.HIBERNATING)
    )


def _of_instance(instance: Instance, before: Instance | None, *, was_waking: bool) -> Iterator[EventDraft]:
    """The faults since the last report, then the phase that the instance is in where that is another one.

    A backend may have died and be ready again between two reports. A model wakes when it takes requests again: one
    whose load fails, and that goes back to sleep, was never awake.
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
    """The event of the last of `new` faults, the newest of which is number `total`."""
    number = f"restart {total}" if new == 1 else f"restarts {total - new + 1} to {total}, the last one"
    died = fault.reason in _DEATHS
    how = fault.detail or Reason(fault.reason).name.lower()
    if fault.reason == Reason.OUT_OF_MEMORY and "memory" not in how:
        how = f"out of memory: {how}"
    return EventReason.DIED if died else EventReason.RESTARTED, f"{how} ({number})"
