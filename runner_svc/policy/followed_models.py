"""Decides which models of a followed server to serve, and under which names, as its list changes. Pure.

The list is untrusted input: it may be long, different each time, or temporarily empty.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from weft.kernel.models.model_source import GGUF, LATEST_TAG, free_name
from weft.kernel.values.names import MAX_NAME_CHARS, ascii_name, is_model_name, is_resource_id

LOOKS_UNTIL_GONE = 2
"""Number of consecutive lists without a model after which it is removed: a starting server lists nothing at first."""
MAX_UPSTREAM_CHARS = 512
"""Maximum length of a model's name at its server, as in `ModelManifest.upstream`."""
_NUMBER_CHARS = 5
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._:-]+")
_FILE_PATH = re.compile(r"[/\\~.]|[A-Za-z]:[/\\]|.*\\")
"""Matches the beginning of a file or folder path, as opposed to an owner and a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedModel:
    """A served model of a followed server."""

    name: str
    """Its name in the mesh."""
    upstream: str
    """Its name at the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListChange:
    """The result of reading a server's list."""

    added: tuple[FollowedModel, ...] = ()
    gone: tuple[FollowedModel, ...] = ()
    left_out: int = 0
    """Number of listed models that are not served because the limit is reached."""


@dataclass(slots=True, kw_only=True)
class FollowedList:
    """The served models of one server."""

    server: str
    """The server's name, which prefixes a model's name if that is already taken."""
    most: int
    """Maximum number of served models."""
    listed_count: int = 0
    unusable: tuple[str, ...] = ()
    """Listed names of the last list that no request can state."""
    _served: dict[str, str] = field(default_factory=dict)
    """Names in the mesh by name at the server."""
    _missed: dict[str, int] = field(default_factory=dict)
    """Number of consecutive lists without a model, for served models."""
    _refused: set[str] = field(default_factory=set)
    """Names taken by others in the mesh."""

    @property
    def served(self) -> tuple[FollowedModel, ...]:
        """The models in the order in which they appeared."""
        return tuple(FollowedModel(name=name, upstream=upstream) for upstream, name in self._served.items())

    def restore(self, models: Iterable[FollowedModel]) -> None:
        """Serves models of an earlier run until a list contradicts."""
        self._served |= {each.upstream: each.name for each in models}

    def step(self, listed: Sequence[str], is_taken: Callable[[str], bool]) -> ListChange:
        """Applies a list and returns what changes. `is_taken`: whether the runner must not use a name for a model."""
        wanted = dict.fromkeys(listed)
        self.listed_count = len(wanted)
        self.unusable = tuple(upstream for upstream in wanted if not is_usable(upstream))
        for upstream in self.unusable:
            del wanted[upstream]
        gone = self._gone(wanted)
        new = [upstream for upstream in wanted if upstream not in self._served]
        room = max(0, self.most - len(self._served))
        added = []
        for upstream in new[:room]:
            name = self._name_for(upstream, is_taken)
            self._served[upstream] = name
            added.append(FollowedModel(name=name, upstream=upstream))
        return ListChange(added=tuple(added), gone=tuple(gone), left_out=max(0, len(new) - room))

    def note_taken(self, names: Collection[str]) -> tuple[FollowedModel, ...]:
        """Records names taken by others in the mesh; returns the models to rename at the next list."""
        self._refused |= set(names)
        lost = tuple(each for each in self.served if each.name in names)
        for each in lost:
            self.forget(each.upstream)
        return lost

    def forget(self, upstream: str) -> None:
        """Stops serving a model until a list contains it again."""
        self._served.pop(upstream, None)
        self._missed.pop(upstream, None)

    def _gone(self, wanted: Collection[str]) -> list[FollowedModel]:
        gone = []
        for each in self.served:
            missed = 0 if each.upstream in wanted else self._missed.get(each.upstream, 0) + 1
            self._missed[each.upstream] = missed
            if missed >= LOOKS_UNTIL_GONE:
                self.forget(each.upstream)
                gone.append(each)
        return gone

    def _name_for(self, upstream: str, is_taken: Callable[[str], bool]) -> str:
        def taken(name: str) -> bool:
            return name in self._refused or name in self._served.values() or is_taken(name)

        short, *others = _candidates(upstream, self.server)
        return next((name for name in (short, *others) if not taken(name)), None) or free_name(short, taken)


def is_usable(upstream: str) -> bool:
    """Whether a listed name can be sent to its server and shown: one line of limited length."""
    return 0 < len(upstream) <= MAX_UPSTREAM_CHARS and upstream.isprintable()


def _candidates(upstream: str, server: str) -> list[str]:
    """Returns names for a model, best first: the server's name for it, then the same with the server as a prefix.

    For a file or a folder, the name is the last part of its path.
    """
    plain = upstream.strip().removesuffix(f":{LATEST_TAG}")
    is_file = plain.lower().endswith(GGUF)
    plain = plain[: -len(GGUF)] if is_file else plain
    if is_file or _FILE_PATH.match(plain):
        plain = plain.replace("\\", "/").rstrip("/").rpartition("/")[2]
    names = [plain, _cleaned(plain), _cleaned(f"{server}-{plain}")]
    usable = [name for name in dict.fromkeys(names) if is_model_name(name) and not is_resource_id(name)]
    return usable or ["model"]


def _cleaned(text: str) -> str:
    parts = [_UNNAMEABLE.sub("-", part).strip("-._:") for part in ascii_name(text).split("/")]
    return "/".join(filter(None, parts))[: MAX_NAME_CHARS - _NUMBER_CHARS].rstrip("-._:/")
