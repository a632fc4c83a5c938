"""The stored records of the mesh: generated messages, published and shown unchanged.

Models, agents and routes are the messages of the contract, stored without fields that depend on the state of the mesh
(status, serving runner, heartbeat times), which `overlay` sets in a copy. Messages in the registry's state are
immutable: a change creates a new one. Messages that exist per runner or model are kept as bytes.
"""

import asyncio
from collections.abc import Callable, Collection, Container, Sequence
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from typing_extensions import override

from weft.api.registry.v1 import (
    model_pb2,
    runner_pb2,
)
from weft.documents.kinds import KINDS
from weft.documents.resource_kinds import ResourceKind
from weft.kernel.errors.error_tree import invalid_field

P = TypeVar("P", bound=Message)

MESH = "mesh"
"""Kind in events of the mesh itself."""


def to_kind(word: str, field: str) -> ResourceKind:
    """Returns a resource kind. Raises INVALID_ARGUMENT naming the field for an unknown one."""
    if word not in KINDS:
        raise invalid_field(field, f"must be one of {', '.join(KINDS)}")
    return ResourceKind(word)


def pool_name_of(manifest: model_pb2.ModelManifest) -> str:
    """Returns the effective pool of a model: the declared one, or its name."""
    return manifest.pool_name or manifest.name


# Messages built between turns of the event loop, since a snapshot of a large mesh takes long.
BUILT_PER_TURN = 200


async def extended(items: Any, makers: Sequence[Callable[[], Message]]) -> None:
    """Builds many messages and adds them to a repeated field, letting other tasks run."""
    for start in range(0, len(makers), BUILT_PER_TURN):
        items.extend(make() for make in makers[start : start + BUILT_PER_TURN])
        await asyncio.sleep(0)


def compact(message: P) -> P:
    """Returns a copy for long storage, with two thirds of the memory of a message that was built in parts."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


class Held(Generic[P]):
    """A long-lived, rarely read message, kept as bytes, which take a third to a tenth of its memory.

    Equal messages without unknown fields have equal bytes.
    """

    __slots__ = ("_kind", "_wire")

    def __init__(self, message: P) -> None:
        self._kind = type(message)
        self._wire = message.SerializeToString(deterministic=True)

    def message(self) -> P:
        """Returns the message, a new one at each call, which the caller may change."""
        return self._kind.FromString(self._wire)

    def add_to(self, message: P) -> None:
        """Merges the message into another one, which becomes set."""
        message.SetInParent()
        message.MergeFromString(self._wire)

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._kind is other._kind and self._wire == other._wire

    @override
    def __hash__(self) -> int:
        return hash(self._wire)


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
    """Returns the loaded models in a report that its runner does not publish.

    A model that the registry leaves out counts only if it has memory: weft does not end an engine of others.
    """
    left = {each.name for each in report.left_out}
    return frozenset(
        each.model
        for each in report.instances
        if is_loaded(each) and each.model not in published and (each.model not in left or each.HasField("memory"))
    )


# Wire size of a model, agent or route without its texts.
BASE_BYTES = 96


def manifest_bytes(manifest: Message) -> int:
    """Returns the approximate size of a resource in a snapshot, in bytes."""
    return BASE_BYTES + manifest.ByteSize()


def detail_bytes(report: runner_pb2.Capability) -> int:
    """Returns the wire size of a report's texts: model details and tool names."""
    texts = [instance.detail for instance in report.instances]
    texts += [instance.last_fault.detail for instance in report.instances]
    return sum(len(text.encode()) for text in (*texts, *report.tool_names))


def kept(report: runner_pb2.Capability, models: Collection[str], room_bytes: int) -> runner_pb2.Capability:
    """Returns a report about `models` only, without texts, and then without tools, if they exceed `room_bytes`.

    Texts are not essential, since failure details can also be read from the runner. A snapshot that is too large for
    one message would leave all routers without any of it.
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
