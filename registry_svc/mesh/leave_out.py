"""Leaves out what is invalid in a runner's report, and keeps the rest: much of it comes from programs of others."""

from collections.abc import Callable, Collection, Iterable, MutableMapping, MutableSequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from weft.api.registry.v1.model_pb2 import ModelManifest
from weft.api.registry.v1.runner_pb2 import LeftOut
from weft.documents.left_out import left_out
from weft.documents.reach import needed_access
from weft.kernel.channels.outbound import is_link_local
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.schemas.field_rules import RuleError, check_rules, path_text, rules_of
from weft.kernel.values.address import is_loopback
from weft.kernel.values.reach import Reach

T = TypeVar("T", bound=Message)
DECLARE_OTHERS = "an operator declares others with weft apply"


def keep_valid(
    items: MutableSequence[T],
    kind: str,
    most: int,
    check: Callable[[T], None],
    *,
    name_field: str = "name",
    requires_all: bool = False,
) -> list[LeftOut]:
    """Removes items for which `check` raises, repeated names, and what exceeds `most`; returns what was removed.

    With `requires_all`, raises the error of the first such item instead.
    """
    removed: list[LeftOut] = []
    kept: dict[str, T] = {}
    for item in items:
        name = getattr(item, name_field)
        try:
            check(item)
            _require_room(name, kept, most)
        except WeftError as error:
            if requires_all:
                raise
            is_name_taken = error.reason is Reason.ALREADY_EXISTS
            removed.append(left_out(kind, name, error.message, is_name_taken=is_name_taken))
        else:
            kept[name] = item
    if removed:
        del items[:]
        items.extend(kept.values())
    return removed


def _require_room(name: str, kept: Collection[str], most: int) -> None:
    if name in kept:
        raise WeftError(Reason.ALREADY_EXISTS, "its name appears twice")
    if len(kept) >= most:
        raise WeftError(Reason.TOO_MANY_RESOURCES, f"a runner has at most {most}")


def clear_invalid(message: Message, name: str = "") -> list[LeftOut]:
    """Removes values that break a rule, or what requires them; returns them. `name` is that of the message.

    Raises INVALID_ARGUMENT naming the field if the message itself requires an invalid value.
    """
    removed: list[LeftOut] = []
    while True:
        try:
            check_rules(message)
        except RuleError as error:
            removed += _cleared(message, name, error.all)
        else:
            return removed


def _cleared(message: Message, name: str, errors: Iterable[RuleError]) -> list[LeftOut]:
    gone: set[tuple[str | int, ...]] = set()
    removed = []
    # The last one first, so that indexes stay valid.
    for error in reversed(list(errors)):
        path = error.path
        if any(path[:length] in gone for length in range(1, len(path) + 1)):
            continue
        gone.add(_clear(message, error))
        removed.append(left_out(str(path[0]), name, f"{path_text(path)}: {error.problem}"))
    return removed


def _clear(message: Message, error: RuleError) -> tuple[str | int, ...]:
    """Removes the innermost value around an invalid one that is not required; returns its path."""
    places: list[Any] = [message]
    for step in error.path[:-1]:
        last = places[-1]
        places.append(getattr(last, str(step)) if isinstance(last, Message) else last[step])
    for depth in range(len(places), 0, -1):
        place, step = places[depth - 1], error.path[depth - 1]
        if not isinstance(place, Message):
            del place[step]
            return error.path[:depth]
        field: Any = place.DESCRIPTOR.fields_by_name.get(str(step))
        if field is None or (rules := rules_of(field)).required or rules.min_items:
            continue
        most, value = rules.max_items, getattr(place, field.name)
        if most and not isinstance(value, MutableMapping) and len(value) > most:
            del value[most:]
        else:
            place.ClearField(field.name)
        return error.path[:depth]
    raise invalid_field(path_text(error.path), error.problem)


def drop_recipe(manifest: ModelManifest) -> list[LeftOut]:
    """Removes a wake recipe that would make a router connect to an address that a joined machine chose; returns it."""
    wake = manifest.wake
    packet = wake.by_mesh.wake_on_lan.broadcast_address
    is_packet = all(text.reach is Reach.PACKET for text, _ in needed_access(wake))
    if is_packet and not is_loopback(packet) and not is_link_local(packet):
        return []
    wake.ClearField("by_mesh")
    if not wake.by_runner:
        manifest.ClearField("wake")
    message = f"a joined machine may publish Wake-on-LAN recipes only; {DECLARE_OTHERS}"
    return [left_out("wake", manifest.name, message)]
