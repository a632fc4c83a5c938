"""Changes that wait for the reader of one stream: bounded, and of each thing its newest state alone."""

from gateway.watch.source import Change, ChangeType

_Key = tuple[str, str, str]
_MARKS = frozenset({ChangeType.SYNCED, ChangeType.RESET, ChangeType.UNAVAILABLE})


class CoalescingBuffer:
    """A queue of changes by kind and name. A change replaces the one that waits for the same name, in its place."""

    def __init__(self, max_names: int) -> None:
        """`max_names`: how many names may wait at once, those of all kinds together."""
        self._max_names = max_names
        self._waiting: dict[_Key, Change] = {}
        self._names = 0

    def __len__(self) -> int:
        """How many changes wait."""
        return len(self._waiting)

    def offer(self, kind: str, change: Change) -> bool:
        """Queues a change; returns False where there is no room for another name.

        A `reset` drops what waits of its kind: all of it is sent again. Changes of a whole kind always have room, since
        at most one of each type waits.
        """
        if change.type in _MARKS:
            if change.type is ChangeType.RESET:
                self._drop(kind)
            key = (kind, "", change.type.value)
            # The mark stands after everything that was offered before it.
            self._waiting.pop(key, None)
            self._waiting[key] = change
            return True
        key = (kind, change.name, "")
        if key not in self._waiting:
            if self._names >= self._max_names:
                return False
            self._names += 1
        self._waiting[key] = change
        return True

    def take(self) -> tuple[str, Change] | None:
        """Removes the oldest change; returns it with its kind. None: nothing waits."""
        key = next(iter(self._waiting), None)
        if key is None:
            return None
        return key[0], self._removed(key)

    def _drop(self, kind: str) -> None:
        for key in [key for key in self._waiting if key[0] == kind]:
            self._removed(key)

    def _removed(self, key: _Key) -> Change:
        self._names -= not key[2]
        return self._waiting.pop(key)
