"""Stop strings: what ends an answer, found in the texts of its tokens."""

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Finds stop strings in the bytes of the tokens, and returns the text that can be shown.

    It holds back the bytes of an incomplete character, and text that a stop string may begin with.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(text for text in stop if text)
        self._longest = max(map(len, self._stop), default=0)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False
        """Whether a stop string was found; it and the text after it are never shown."""

    def feed(self, piece: bytes) -> str:
        """Returns the text that can be shown after these bytes."""
        return self._show(self._decoder.decode(piece))

    def finish(self) -> str:
        """Returns the text that was held back, at the end of the generation."""
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
        """Returns the length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
