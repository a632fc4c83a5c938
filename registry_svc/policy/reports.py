"""What is kept of a capability report."""

from collections.abc import Collection, Iterable
from dataclasses import replace

from registry_svc.domain import Capability, Instance


def detail_bytes(instances: Iterable[Instance]) -> int:
    """How much the words of a report take on the wire."""
    return sum(len(instance.detail.encode()) for instance in instances)


def kept(report: Capability, models: Collection[str], room_bytes: int) -> Capability:
    """A report of `models` alone, without its words where those are more than `room_bytes`.

    Who serves what must be known of every runner; why a backend failed can also be asked of the runner itself. A
    snapshot that is too large for one message would leave all routers without any of it.
    """
    instances = tuple(instance for instance in report.instances if instance.model in models)
    if detail_bytes(instances) > room_bytes:
        instances = tuple(replace(instance, detail="") for instance in instances)
    return replace(report, instances=instances)
