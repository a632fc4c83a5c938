"""Text as it is generated: whole characters out of bytes, and an end where a stop string begins."""

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Takes the bytes of one token after the other and gives what can be shown.

    Held back are the bytes of an unfinished character and whatever may turn out to be the beginning of a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; it and what follows is never shown."""

    def feed(self, piece: bytes) -> str:
        """What can be shown now that `piece` has come."""
        return self._show(self._decoder.decode(piece))

    def finish(self) -> str:
        """What was held back, at the end of the generation."""
        shown = self._show(self._decoder.decode(b"", final=True))
        rest, self._held = ("" if self.stopped else self._held), ""
        return shown + rest

    def _show(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string may begin with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
