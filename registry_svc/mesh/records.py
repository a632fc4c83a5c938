"""The records of the mesh: generated messages, as they are stored, published and shown.

A model, an agent or a route is one message from its declaration or publication on: `Model`, `Agent` and `Route` of the
contract, stored without what follows from the state of the mesh (status, serving runner, times of heartbeats), which
`overlay` sets in a copy. Messages in the state of the registry are immutable: a change makes a new one. Those of which
there is one for each runner and model are held as their bytes.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from datetime import datetime
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message
from typing_extensions import override

from registry_svc.mesh.domain import EventDraft
from weft.api.registry.v1 import (
    event_pb2,
    model_pb2,
    registry_service_pb2,
    runner_pb2,
)
from weft.documents.kinds import KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors import invalid_field
from weft.kernel.timestamps import stamp_of

T = TypeVar("T")
M = TypeVar("M")
P = TypeVar("P", bound=Message)
M_contra = TypeVar("M_contra", contravariant=True)

MESH = "mesh"
"""The kind in events of the mesh itself."""


def to_kind(word: str, field: str) -> ResourceKind:
    """A kind of resource; raises INVALID_ARGUMENT naming the field when it is none."""
    if word not in KINDS:
        raise invalid_field(field, f"must be one of {', '.join(KINDS)}")
    return ResourceKind(word)


def pool_name_of(manifest: model_pb2.ModelManifest) -> str:
    """The effective pool of a model: the declared one, or its own name."""
    return manifest.pool_name or manifest.name


def event_message(draft: EventDraft, sequence: int, now: datetime) -> event_pb2.Event:
    """Return an event that is recorded at `now`."""
    return event_pb2.Event(
        sequence=sequence,
        time=stamp_of(now),
        kind=draft.kind or MESH,
        name=draft.name,
        reason=event_pb2.EventReason.ValueType(draft.reason),
        message=draft.message,
    )


# After so many messages the event loop gets a turn: a snapshot of a large mesh takes long to make.
CONVERTED_PER_TURN = 200


async def converted(items: Iterable[T], convert: Callable[[T], M]) -> Sequence[M]:
    """Many messages; the event loop turns meanwhile."""
    messages: list[M] = []
    for item in items:
        messages.append(convert(item))
        if len(messages) % CONVERTED_PER_TURN == 0:
            await asyncio.sleep(0)
    return messages


class Extensible(Protocol[M_contra]):
    """A repeated field of messages."""

    def extend(self, elem_seq: Iterable[M_contra], /) -> None:
        """Add copies of these."""
        ...


async def extended(items: Extensible[M], makers: Sequence[Callable[[], M]]) -> None:
    """Make many messages and add them to a field; the event loop turns meanwhile."""
    for start in range(0, len(makers), CONVERTED_PER_TURN):
        items.extend(make() for make in makers[start : start + CONVERTED_PER_TURN])
        await asyncio.sleep(0)


def compact(message: P) -> P:
    """Return a copy to keep for long: it takes two thirds of the memory of a message that was built part by part."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


class Held(Generic[P]):
    """A message that is kept for long and read rarely, as its bytes: a third to a tenth of the memory of the message.

    Equal messages without unknown fields have equal bytes.
    """

    __slots__ = ("_kind", "_wire")

    def __init__(self, message: P) -> None:
        self._kind = type(message)
        self._wire = message.SerializeToString(deterministic=True)

    def message(self) -> P:
        """Return the message; each call makes a new one, which the caller may change."""
        return self._kind.FromString(self._wire)

    def add_to(self, message: P) -> None:
        """Add what is set in it to another message, which is set by that."""
        message.SetInParent()
        message.MergeFromString(self._wire)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._kind is other._kind and self._wire == other._wire

    @override
    def __hash__(self) -> int:
        return hash(self._wire)


def without_key(watched: registry_service_pb2.WatchedRunner) -> registry_service_pb2.WatchedRunner:
    """Return a runner without its ticket key."""
    return registry_service_pb2.WatchedRunner(runner=watched.runner)


_LOADED_PHASES = frozenset(
    {
        runner_pb2.InstanceState.PHASE_LOADING,
        runner_pb2.InstanceState.PHASE_READY,
        runner_pb2.InstanceState.PHASE_DRAINING,
    }
)


def is_loaded(instance: runner_pb2.InstanceState) -> bool:
    """Whether an instance has, or is about to have, an engine and its memory."""
    return instance.phase in _LOADED_PHASES


def unowned_in(report: runner_pb2.Capability, published: Container[str]) -> frozenset[str]:
    """The models that a report shows as loaded and that its runner does not publish."""
    return frozenset(each.model for each in report.instances if is_loaded(each) and each.model not in published)


# Size of a model, an agent or a route on the wire without its texts: numbers, times, framing.
BASE_BYTES = 96


def manifest_bytes(manifest: Message) -> int:
    """Return the approximate size of a resource in a snapshot, in bytes."""
    return BASE_BYTES + manifest.ByteSize()


def detail_bytes(report: runner_pb2.Capability) -> int:
    """Return the size of a report's texts on the wire: details of its models, and names of its tools."""
    texts = [instance.detail for instance in report.instances]
    texts += [instance.last_fault.detail for instance in report.instances]
    return _utf8_bytes([*texts, *report.tool_names])


def _utf8_bytes(texts: list[str]) -> int:
    return sum(len(text.encode()) for text in texts)


def kept(report: runner_pb2.Capability, models: Collection[str], room_bytes: int) -> runner_pb2.Capability:
    """Return a report about `models` only, without texts, and then without tools, if they exceed `room_bytes`.

    Which runner serves what must be known of every runner; the reason of a failure can also be read from the runner. A
    snapshot too large for one message would leave all routers without any of it.
    """
    if detail_bytes(report) <= room_bytes and all(instance.model in models for instance in report.instances):
        return report
    kept_report = runner_pb2.Capability()
    kept_report.CopyFrom(report)
    if any(instance.model not in models for instance in report.instances):
        del kept_report.instances[:]
        kept_report.instances.extend(instance for instance in report.instances if instance.model in models)
    if detail_bytes(kept_report) > room_bytes:
        for instance in kept_report.instances:
            instance.detail = ""
            if instance.HasField("last_fault"):
                instance.last_fault.detail = ""
    if detail_bytes(kept_report) > room_bytes:
        del kept_report.tool_names[:]
    return kept_report
