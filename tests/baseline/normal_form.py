"""The normal form of an output: what differs from run to run is replaced by a name, and equal ids stay equal."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

IDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("secret", re.compile(r"(?<=_)[0-9a-f]{40,64}\b")),
    ("hash", re.compile(r"\b[0-9a-f]{64}\b")),
    ("digest", re.compile(r"(?<='sha256-)[0-9A-Za-z+/]{43}=")),
    ("tag", re.compile(r'(?<=^")[0-9a-f]{16}(?="$)')),
    ("trace", re.compile(r"\b[0-9a-f]{32}\b")),
    ("uuid", re.compile(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")),
    ("id", re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{24}(?![0-9A-Za-z])")),
    ("key", re.compile(r"(?:(?<=key:)|(?<=/keys/)|(?<=weft_)|(?<=wjt_))[0-9a-z]{12}(?![0-9a-z])")),
)
"""Ids by what they are called; the texts of these that are equal stay equal."""
TEXT_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
        (r"\b(127\.0\.0\.1|localhost|\[::1\]):\d{4,5}\b", r"\1:<port>"),
        (r"\b(pid|PID|Process:|Process id:)([ =]+)\d+", r"\1\2<pid>"),
        (r"\b(Prefix \w+ tokens: +)\d+", r"\1<number>"),
        # A short host name may occur in a signature.
        (r"(?<=expires=)\d+|(?<=signature=)(?:[\w-]|<host>)+", "<signature>"),
        (r"\bcgroup /(?:<[^>]*>|[^\s<])+", "cgroup <path>"),
        (r"\b\d+(?:\.\d+)? tokens/s\b", "<speed> tokens/s"),
        (r"(router-<host>-)[0-9a-f]{6}\b", r"\1<start>"),
        # A duration in a message, such as the start of an attempt.
        (r"^\d+\.(?:\d{6}|\d{9})s$", "<number>"),
        # Whether the process of central models is among them follows from when the first one was declared.
        (r"there are attached, [\w, -]+, and those that", "there are <runners>, and those that"),
    )
)
"""Hold for every text: values of JSON, headers, lines of streams and of commands."""
TABLE_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"(?:\bunder )?(?<![\w.-])\d+(?:\.\d+)?(?: ?(?:ms|s|m|min|minutes|h|d)\b)(?: ?\d+ ?(?:s|m|min|h)\b)?",
            "<duration>",
        ),
        (r"(?<![\w.-])\d+(?:\.\d+)? ?(?:B|KB|MB|GB|KiB|MiB|GiB|TiB)\b", "<size>"),
        (r"(\d+/\d+(?:  +\S+){3}  +)\d+", r"\1<pid>"),
        (r"(?<=  )\d+\.\d+$|(?<=tokens/s )\S+", "<speed>"),
        (r"(?<=  Cpu )(\w+: +)\S+$", r"\1<number>"),
        (r"[█░]+ +\d+% +\d+ +[█░]+", "<use>"),
        (r"(ago  +)\d+((?:  +\S+){2}  +)\d+", r"\1<number>\2<number>"),
        (r"[─━]{2,}", "──"),
        (r"(?<=\S) {2,}", "  "),
        (r" +$", ""),
        (r"(?<=  2 req/min  )(?:\d of 2 req/min|-)(?=  )", "<used>"),
    )
)
"""Hold for what a command prints for people: widths of columns follow from durations."""
_WORD = r"(?<![0-9A-Za-z]){}(?![0-9A-Za-z])"
WAITING = re.compile(r"^: (?:queued|loading|keepalive|waiting|waking|starting)\b")
"""Comments of a stream that come while a request waits: how many there are follows from the load of the machine."""
SAMPLES = frozenset({"engineLoad"})
"""Members that are as of the moment in which an engine was last looked at."""
AUDIO = re.compile(r'"audio": "[^"]*"')
"""Where a recording is divided into events follows from the moment; events with nothing else are shown as one."""
NUMBERS = re.compile(
    r"^(?:created|until|outputChars|outputTokens|pid|processId|slotsUsed|port|cpu\w+|usual.*|prefix\w+Tokens)$|(?:[sS]equence|_at|At|_ms|_mj|Ms|_duration)$"
    r"|_(?:time|wait|to_first_token)$|reset_\w+$|(?:_per_second|PerSecond|[sS]econds|Percent)$"
    r"|^(?:total|free|used|available|measured|estimated|system|other|unowned|leased|budget|resident|memory|memoryTotal|memoryUsed)Bytes$"
    r"|^kept(?:PromptCount|Bytes|LimitBytes)$"
)
"""Members of JSON, of YAML and headers whose numbers are times, speeds and facts of the machine."""


class NormalForm:
    """Normalises one output; ids are numbered in the order in which they appear in it."""

    def __init__(self, places: Mapping[str, str]) -> None:
        """`places`: texts that are replaced by their names, such as the folder of the mesh.

        A word, such as a short host name, is replaced only if it is not a part of a key.
        """
        self._places = [
            (re.compile(_WORD.format(place) if place.isalnum() else re.escape(place)), name)
            for place, name in sorted(places.items(), key=lambda place: -len(place[0]))
        ]
        self._ids: dict[str, str] = {}

    def text(self, text: str) -> str:
        """Returns a text without ids, times, ports and paths."""
        for place, name in self._places:
            text = place.sub(name, text)
        for kind, pattern in IDS:
            text = pattern.sub(partial(self._numbered, kind), text)
        for pattern, replacement in TEXT_RULES:
            text = pattern.sub(replacement, text)
        return text

    def table(self, text: str) -> str:
        """Returns what a command printed for people, without what the machine and the moment decide."""
        lines = []
        for line in self.comment(text).splitlines():
            for pattern, replacement in TABLE_RULES:
                line = pattern.sub(replacement, line)  # noqa: PLW2901 - one rule after the other
            lines.append(line)
        return "\n".join(lines)

    def member(self, name: str, value: Any) -> Any:
        """Returns the value of a member of JSON, or of a header."""
        if name in SAMPLES:
            return "<figures>"
        if NUMBERS.search(name) and _is_number(value):
            return "<number>"
        if name == "id" and re.fullmatch(r"[0-9a-z]{12}", str(value)):
            return self.text(f"key:{value}").removeprefix("key:")
        return self.value(value)

    def value(self, value: Any) -> Any:
        """Returns a value of JSON, with its structure."""
        if isinstance(value, dict):
            return {self.text(name): self.member(name, member) for name, member in value.items()}
        if isinstance(value, list):
            return [self.value(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def json(self, text: str, indent: int | None = 1) -> str:
        """Returns a document of JSON, over several lines unless `indent` is None; text that is no JSON as text."""
        try:
            document = json.loads(text)
        except ValueError:
            return self.text(text)
        return json.dumps(self.value(document), indent=indent, ensure_ascii=False)

    def yaml(self, text: str) -> str:
        """Returns a document of YAML line by line, since its layout is a part of the answer."""
        lines = []
        for line in self.text(text).splitlines():
            name, colon, value = line.partition(": ")
            if colon and NUMBERS.search(name.strip(" -\"'")) and _is_number(value.strip("\"'")):
                line = f"{name}: <number>"  # noqa: PLW2901 - the line without its number
            lines.append(line)
        return "\n".join(lines)

    def stream(self, text: str, *, shows_waiting: bool = False) -> str:
        """Returns a stream of events or of JSON lines, one event per line."""
        lines: list[str] = []
        for line in text.splitlines():
            if WAITING.match(line) and not shows_waiting:
                continue
            start = "data: " if line.startswith("data: ") else ""
            data = line.removeprefix(start)
            shown = start + (self.json(data, None) if data[:1] in {"{", "["} else self.comment(data))
            shown = AUDIO.sub('"audio": "<audio>"', shown)
            is_repeated = "<audio>" in shown and shown in lines[-2:]
            if not is_repeated and (shown or (lines and lines[-1])):
                lines.append(shown)
        return "\n".join(lines).rstrip("\n")

    def comment(self, line: str) -> str:
        """Returns a line of a stream that is no JSON: its members are `name=value`."""
        named = re.sub(
            r"\b([A-Za-z_.-]+)=([0-9.]+)\b",
            lambda found: f"{found[1]}=<number>" if NUMBERS.search(found[1].replace("-", "_")) else found[0],
            line,
        )
        return self.text(re.sub(r"^id: \d+$", "id: <number>", named))

    def _numbered(self, kind: str, found: re.Match[str]) -> str:
        count = sum(1 for known in self._ids.values() if known.startswith(f"<{kind} "))
        return self._ids.setdefault(found[0], f"<{kind} {count + 1}>")


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        # Also durations such as 59.8s and 1m0s.
        return bool(re.fullmatch(r"(?:\d+[hm])*-?\d+(?:\.\d+)?(?:[eE]-?\d+)?[smhd]?", value))
    return isinstance(value, (int, float)) and not isinstance(value, bool)
