"""Which models of a server are served, under which names, while its list changes. Pure.

A server's list is untrusted input: it may be long, change at every look, or be empty for a moment.
"""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from weft.kernel.model_source import GGUF, LATEST_TAG, free_name
from weft.kernel.names import MAX_NAME_CHARS, ascii_name, is_model_name, is_resource_id

LOOKS_UNTIL_GONE = 2
"""So many lists in a row lack a model until it is served no longer: a server that starts lists nothing at first."""
_NUMBER_CHARS = 5
_UNNAMEABLE = re.compile(r"[^A-Za-z0-9._:-]+")
_FILE_PATH = re.compile(r"[/\\~.]|[A-Za-z]:[/\\]|.*\\")
"""The beginning of a text that is the path of a file or a folder, and no name with its owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedModel:
    """A model of a server that is followed."""

    name: str
    """In the mesh."""
    upstream: str
    """The server's own name of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListChange:
    """What a look at a server's list changes."""

    added: tuple[FollowedModel, ...] = ()
    gone: tuple[FollowedModel, ...] = ()
    left_out: int = 0
    """Models of the list that are not served, because there are more than may be."""


@dataclass(slots=True, kw_only=True)
class FollowedList:
    """The models that are served of one server."""

    server: str
    """Its name, which stands before the name of a model where that is taken."""
    most: int
    """Maximum number of models that are served."""
    listed_count: int = 0
    """Models of the latest list."""
    _served: dict[str, str] = field(default_factory=dict)
    """Names in the mesh by the server's own."""
    _missed: dict[str, int] = field(default_factory=dict)
    """How many lists in a row lack a model that is served."""
    _refused: set[str] = field(default_factory=set)
    """Names that others in the mesh have."""

    @property
    def served(self) -> tuple[FollowedModel, ...]:
        """The models, in the order in which they came."""
        return tuple(FollowedModel(name=name, upstream=upstream) for upstream, name in self._served.items())

    def restore(self, models: Iterable[FollowedModel]) -> None:
        """Serves models of an earlier run until a list says otherwise."""
        self._served |= {each.upstream: each.name for each in models}

    def step(self, listed: Sequence[str], is_taken: Callable[[str], bool]) -> ListChange:
        """Returns what a list changes, and takes it as served. `is_taken`: whether the runner has a model of a name."""
        wanted = dict.fromkeys(listed)
        self.listed_count = len(wanted)
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
        """Names that others in the mesh have; returns the models that had them, which the next look names otherwise."""
        self._refused |= set(names)
        lost = tuple(each for each in self.served if each.name in names)
        for each in lost:
            self.forget(each.upstream)
        return lost

    def forget(self, upstream: str) -> None:
        """Serves a model no longer, until a list has it."""
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


def _candidates(upstream: str, server: str) -> list[str]:
    """Returns names for a model, the best first: as the server has it, then with the server's name before it.

    Of a file or a folder it is the last part of its path.
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
