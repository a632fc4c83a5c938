"""What is kept of a capability report."""

from collections.abc import Collection
from dataclasses import replace

from registry_svc.mesh.domain import Capability, Instance


def detail_bytes(report: Capability) -> int:
    """How much the words of a report take on the wire: those about its models, and the names of its tools."""
    words = [instance.detail for instance in report.instances]
    words += [instance.last_fault.detail for instance in report.instances if instance.last_fault is not None]
    return sum(len(text.encode()) for text in (*words, *report.tool_names))


def kept(report: Capability, models: Collection[str], room_bytes: int) -> Capability:
    """A report of `models` alone, without its words where those are more than `room_bytes`, if need be without tools.

    Who serves what must be known of every runner; why a backend failed can also be asked of the runner itself. A
    snapshot that is too large for one message would leave all routers without any of it.
    """
    instances = tuple(instance for instance in report.instances if instance.model in models)
    whole = replace(report, instances=instances)
    if detail_bytes(whole) <= room_bytes:
        return whole
    wordless = replace(report, instances=tuple(map(_wordless, instances)))
    return wordless if detail_bytes(wordless) <= room_bytes else replace(wordless, tool_names=())


def _wordless(instance: Instance) -> Instance:
    fault = instance.last_fault
    return replace(instance, detail="", last_fault=None if fault is None else replace(fault, detail=""))
