"""What the queues ask of loads: classes that want the same models, put together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router_svc.policy.candidates import Candidate
from router_svc.policy.load_plan import Demand
from router_svc.policy.outlook import Outlook
from router_svc.policy.waiting import RequestClass
from weft.kernel.request import Priority

Shape = tuple[str, tuple[str, ...], int, bool]
"""The line, the models that could be loaded for it, the slots that serve it meanwhile; whether it is durable."""
_DURABLE = " (durable)"


@dataclass(slots=True)
class _Group:
    """Classes of one line that the same models could be loaded for."""

    asleep: tuple[Candidate, ...]
    outlook: Outlook
    classes: list[RequestClass] = field(default_factory=list)
    band: Priority = Priority.LOW
    account: float = 0.0


@dataclass(frozen=True, slots=True)
class Demands:
    """All that is asked, and under which name for each class."""

    demands: tuple[Demand, ...]
    label_of: Mapping[RequestClass, str]


def demands_of(
    wanting: Mapping[RequestClass, Outlook], worth_asking: Callable[[Outlook], tuple[Candidate, ...]], now: float
) -> Demands:
    """One demand for all classes of a line that the same models could be loaded for, durable ones apart.

    A demand is named like its line; those of a line that want only some of its models name them too.
    """
    groups: dict[Shape, _Group] = {}
    for of, outlook in wanting.items():
        asleep, first = worth_asking(outlook), of.turn()
        if not asleep or first is None:
            continue
        shape = (of.line, tuple(candidate.model for candidate in asleep), outlook.slots, of.kind.durable)
        group = groups.get(shape)
        if group is None:
            group = groups[shape] = _Group(asleep, outlook, band=first[0], account=first[1].account)
        group.classes.append(of)
        group.account = min(group.account, first[1].account)
        group.band = min(group.band, first[0])
    widest: dict[tuple[str, bool], Shape] = {}
    for shape in groups:
        known = widest.get((shape[0], shape[3]))
        if known is None or len(shape[1]) > len(known[1]):
            widest[shape[0], shape[3]] = shape
    labels = {shape: _named(shape, is_widest=widest[shape[0], shape[3]] == shape) for shape in groups}
    return Demands(
        tuple(_demand(labels[shape], group, now) for shape, group in groups.items()),
        {of: labels[shape] for shape, group in groups.items() for of in group.classes},
    )


def _named(shape: Shape, *, is_widest: bool) -> str:
    line, models, slots, is_durable = shape
    which = "" if is_widest else f" ({', '.join(models)}; {slots} slots)"
    return f"{line}{which}{_DURABLE if is_durable else ''}"


def _demand(label: str, group: _Group, now: float) -> Demand:
    classes = group.classes
    deadlines = [deadline for of in classes if (deadline := of.earliest_deadline()) is not None]
    return Demand(
        line=label,
        asleep=group.asleep,
        waiting=sum(of.waiting for of in classes),
        band=group.band,
        oldest_arrived_at=min(of.oldest_arrived_at() for of in classes),
        waited_seconds=max(0.0, sum(of.waiting * now - of.arrived_sum for of in classes)),
        queued_tokens=sum(of.queued_tokens for of in classes),
        account=group.account,
        ready_slots=group.outlook.slots,
        loading_slots=group.outlook.loading_slots,
        deadline_at=min(deadlines, default=None),
    )
