"""Which events a step of a life makes."""

from collections.abc import Collection, Iterable, Iterator, Mapping

from registry_svc.domain import Capability, EventReason, Happening, Instance, Kind, Phase

_BROKEN = frozenset({Phase.CRASH_LOOP, Phase.FAILED})


def of_rows(rows: Iterable[tuple[Kind, str]], reason: EventReason, message: str) -> Iterator[Happening]:
    """The same event for each of these rows."""
    return (Happening(kind=kind, name=name, reason=reason, message=message) for kind, name in rows)


def of_opening(
    rows: Collection[tuple[Kind, str]],
    earlier: Collection[tuple[Kind, str]],
    gone: Iterable[tuple[Kind, str]],
    runner: str,
) -> Iterator[Happening]:
    """The events of an OpenSession: `rows` are published now, `earlier` were before, `gone` are not any more."""
    yield from of_rows(gone, EventReason.WITHDRAWN, f"withdrawn by the runner {runner} or replaced by it")
    for kind, name in rows:
        known = (kind, name) in earlier
        reason = EventReason.REVIVED if known else EventReason.REGISTERED
        news = "joined the mesh" if kind is Kind.RUNNER else f"published by the runner {runner}"
        message = f"the runner {runner} opened a new session" if known else news
        yield Happening(kind=kind, name=name, reason=reason, message=message)


def of_report(
    earlier: Capability, report: Capability, models: Collection[str], *, reported_before: bool
) -> list[Happening]:
    """The events of a capability report, of `models` alone: asleep, awake, broken, ready.

    The first report after a restart of the registry tells only what is broken; the rest is no news.
    """
    before = {instance.model: instance.phase for instance in earlier.instances}
    changed = (each for each in report.instances if each.model in models and each.phase is not before.get(each.model))
    return [
        happening
        for instance in changed
        for happening in _of_instance(instance, before)
        if reported_before or happening.reason is EventReason.FAILED
    ]


def _of_instance(instance: Instance, before: Mapping[str, Phase]) -> Iterator[Happening]:
    earlier = before.get(instance.model)

    def happening(reason: EventReason, message: str) -> Happening:
        return Happening(kind=Kind.MODEL, name=instance.model, reason=reason, message=message)

    if instance.phase is Phase.HIBERNATING:
        yield happening(EventReason.HIBERNATED, "it went to sleep")
    elif earlier is Phase.HIBERNATING:
        yield happening(EventReason.WOKE, "it woke up")
    if instance.phase is Phase.READY:
        yield happening(EventReason.READY, "its backend takes requests")
    elif instance.phase in _BROKEN and earlier not in _BROKEN:
        what = "is in a crash loop" if instance.phase is Phase.CRASH_LOOP else "failed"
        yield happening(EventReason.FAILED, f"its backend {what}" + (f": {instance.detail}" if instance.detail else ""))
