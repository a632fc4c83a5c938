"""Label selectors, such as `tier=fast,team=a`, that restrict commands and lists to matching resources."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.kernel.errors.error_tree import invalid_field
from weft.kernel.values.names import is_name, is_token

if TYPE_CHECKING:
    from weft.api.registry.v1.agent_pb2 import AgentManifest
    from weft.api.registry.v1.model_pb2 import ModelManifest
    from weft.api.registry.v1.route_pb2 import RouteManifest
    from weft.api.registry.v1.tags_pb2 import Tags

MAX_SELECTOR_CHARS = 2048
MAX_REQUIREMENTS = 16
MAX_VALUE_CHARS = 128
TAG_FIELDS = ("tier", "owner")
"""Tag fields that selectors treat like labels; labels cannot have these names."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One comma-separated term of a selector."""

    key: str
    value: str | None
    """None: any value."""
    is_wanted: bool
    """Whether the value must be present (or must be absent)."""

    def holds(self, tags: "Tags") -> bool:
        """Whether tags satisfy this term."""
        return self.accepts(getattr(tags, self.key) if self.key in TAG_FIELDS else tags.labels.get(self.key, ""))

    def accepts(self, found: str) -> bool:
        """Whether a value, empty if the key is absent, satisfies this term."""
        return (bool(found) if self.value is None else found == self.value) is self.is_wanted


Selector = tuple[Requirement, ...]
"""Terms that must all hold; empty: selects everything."""


def parse_selector(text: str, field: str) -> Selector:
    """Returns the selector in `text`: parts `KEY=VALUE`, `KEY!=VALUE`, `KEY` (any value) and `!KEY`, joined by commas.

    An empty text selects everything. Raises INVALID_ARGUMENT naming the field.
    """
    if len(text) > MAX_SELECTOR_CHARS:
        raise invalid_field(field, f"must be at most {MAX_SELECTOR_CHARS} characters")
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) > MAX_REQUIREMENTS:
        raise invalid_field(field, f"must have at most {MAX_REQUIREMENTS} parts, has {len(parts)}")
    return tuple(_requirement(part, field) for part in parts)


def selects(selector: Selector, tags: "Tags") -> bool:
    """Whether tags match."""
    return all(requirement.holds(tags) for requirement in selector)


def require_labels(tags: "Tags", field: str) -> None:
    """Raises INVALID_ARGUMENT naming the field for a label with a reserved name or without a value."""
    for key, value in tags.labels.items():
        if key in TAG_FIELDS:
            raise invalid_field(f"{field}[{key}]", f"is not a label; set {key} itself")
        if not value:
            raise invalid_field(f"{field}[{key}]", "must not be empty")


def to_canonical_tags(manifest: "ModelManifest | AgentManifest | RouteManifest", field: str) -> None:
    """Clears empty tags. Raises INVALID_ARGUMENT for a label with a reserved name."""
    require_labels(manifest.tags, f"{field}.tags.labels")
    if not manifest.tags.ByteSize():
        manifest.ClearField("tags")


def _requirement(part: str, field: str) -> Requirement:
    key, separator, value = part.partition("=")
    is_wanted = True
    if separator and key.endswith("!"):
        key, is_wanted = key[:-1], False
    elif not separator and key.startswith("!"):
        key, is_wanted = key[1:], False
    key, value = key.strip(), value.removeprefix("=").strip()
    if not is_name(key) or (separator and not is_token(value, MAX_VALUE_CHARS)):
        raise invalid_field(
            field, f"{part[:64]!r} must be KEY=VALUE, KEY!=VALUE, KEY or !KEY, such as tier=fast,team=a"
        )
    return Requirement(key, value if separator else None, is_wanted)
