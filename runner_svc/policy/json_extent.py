"""Where a JSON object or array ends in a stream of text. Pure."""

import re

_MARKS = re.compile(r'["{}\[\]]')
_STRING_MARKS = re.compile(r'["\\]')


class JsonExtent:
    """Follows one object or array from its opening bracket on, by counting brackets. It need not be valid."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._skips = 0

    def feed(self, text: str) -> int | None:
        """Take the next piece. The number of its characters that belong to the value once it has ended, else None.

        Nothing may be fed after that, nor text before the opening bracket.
        """
        at = self._skips
        while at < len(text):
            found = (_STRING_MARKS if self._in_string else _MARKS).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            if self._take(found.group()):
                return at
            if found.group() == "\\":
                # Whatever is escaped is no mark, in this piece or the next.
                at += 1
        self._skips = at - len(text)
        return None

    def _take(self, mark: str) -> bool:
        if mark == '"':
            self._in_string = not self._in_string
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
        return self._depth == 0 and mark in "}]"
