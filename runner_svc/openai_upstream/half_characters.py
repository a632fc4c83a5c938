"""Joins characters that a server split across two chunks: an emoji whose token has half of it. Pure."""

import re

from runner_svc.openai_upstream.chunks import ChunkChoice

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands for a half that no chunk completes."""
_BYTES = re.compile("[\udc80-\udcff]+")
"""Bytes that alone are not UTF-8, as Python's `surrogateescape` reads them."""
_HALVES = re.compile("[\ud800-\udfff]")
_ARGUMENTS = "arguments"
_MAX_PREFIX = 3
"""Maximum number of bytes of an incomplete character."""


class HalfCharacters:
    """The halves at the ends of the texts so far. `join` is called for each choice of a chunk that may have one."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, str], str] = {}
        """The halves that are held back, by choice and field."""

    def join(self, choice: ChunkChoice) -> None:
        """Complete the texts of a chunk; a half at the end of one is held back. Raises ValueError for invalid bytes."""
        choice.text = self._joined(choice.index, "text", choice.text)
        if (delta := choice.delta) is None:
            return
        delta.content = self._joined(choice.index, "content", delta.content)
        delta.reasoning_content = self._joined(choice.index, "reasoning_content", delta.reasoning_content)
        delta.reasoning = self._joined(choice.index, "reasoning", delta.reasoning)
        delta.refusal = self._joined(choice.index, "refusal", delta.refusal)
        for call in delta.tool_calls or ():
            if (function := call.function) is not None:
                place = f"{_ARGUMENTS} {call.index}"
                function.arguments = self._joined(choice.index, place, function.arguments)

    def rest(self) -> dict[int, str]:
        """Returns what stands for the halves that no chunk has completed, by choice. Raises ValueError as `join`."""
        held, self.held = self.held, {}
        found: dict[int, str] = {}
        for (choice, name), half in held.items():
            if _BYTES.search(half) or name.startswith(_ARGUMENTS):
                raise ValueError("it ends within a character")
            if name in {"text", "content"}:
                found[choice] = REPLACEMENT
        return found

    def _joined(self, choice: int, name: str, text: str | None) -> str | None:
        if not text or not (self.held or _HALVES.search(text)):
            return text
        held = self.held.pop((choice, name), "")
        # Two halves of UTF-16 are one character.
        whole = (held + text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        whole = _BYTES.sub(_decoded, whole)
        half = _half_at_end(whole)
        if half:
            self.held[choice, name] = half
            whole = whole[: -len(half)]
        return _HALVES.sub(REPLACEMENT, whole)


def _decoded(found: "re.Match[str]") -> str:
    """Returns the characters of bytes; an incomplete one at the end of the text stays."""
    raw = found.group().encode("ascii", "surrogateescape")
    for kept in range(_MAX_PREFIX + 1):
        try:
            text = raw[: len(raw) - kept].decode()
        except UnicodeDecodeError:
            continue
        rest = raw[len(raw) - kept :] if kept else b""
        if rest and not (found.end() == len(found.string) and _may_begin(rest)):
            break
        return text + rest.decode("ascii", "surrogateescape")
    raise ValueError("its text is not UTF-8")


def _may_begin(raw: bytes) -> bool:
    """Whether bytes are the beginning of a character."""
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _half_at_end(text: str) -> str:
    """Returns the half of a character at the end of a text; empty: none."""
    if text and "\ud800" <= text[-1] <= "\udbff":
        return text[-1]
    found = re.search("[\udc80-\udcff]+$", text)
    return found.group() if found else ""
