"""Items of a runner that the mesh does not serve, and texts about them."""

from collections.abc import Sequence

from weft.api.registry.v1.runner_pb2 import LeftOut

MAX_LEFT_OUT = 64
"""Maximum number of items in a report; the last one counts the others."""
MAX_NAME_CHARS = 128
MAX_MESSAGE_CHARS = 512
MAX_WORDS = 3
"""Maximum number of items in a text."""


def left_out(kind: str, name: str, message: str, *, server: str = "", is_name_taken: bool = False) -> LeftOut:
    """Returns an item with bounded texts on one line: what is left out may contain anything."""
    return LeftOut(
        kind=kind,
        name=_line(name, MAX_NAME_CHARS),
        message=_line(message, MAX_MESSAGE_CHARS),
        server=_line(server, MAX_NAME_CHARS),
        is_name_taken=is_name_taken,
    )


def bounded(items: Sequence[LeftOut]) -> list[LeftOut]:
    """Returns at most MAX_LEFT_OUT items, without repeated ones."""
    unique = list({(each.kind, each.name): each for each in items}.values())
    if len(unique) <= MAX_LEFT_OUT:
        return unique
    rest = len(unique) - MAX_LEFT_OUT + 1
    kept = unique[: MAX_LEFT_OUT - 1]
    return [*kept, left_out(unique[-1].kind, "", f"and {rest} more; the first of them: {unique[len(kept)].message}")]


def left_out_item(item: LeftOut) -> str:
    """Returns an item as text, such as "model box: its name is taken"."""
    return f"{item.kind} {item.name}: {item.message}" if item.name else item.message


def left_out_items(items: Sequence[LeftOut]) -> str:
    """Returns items as text, with at most MAX_WORDS of them; empty if there are none."""
    more = [f"and {len(items) - MAX_WORDS} more"] if len(items) > MAX_WORDS else []
    return "; ".join([*map(left_out_item, items[:MAX_WORDS]), *more])


def _line(text: str, most: int) -> str:
    line = "".join(char if char.isprintable() else " " for char in text[: most + 1])
    return line if len(line) <= most else f"{line[: most - 3]}..."
