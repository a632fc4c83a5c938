"""Formats of values of documents, for tables and pages."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from weft.kernel.units import size_words, wait_words

MAX_SHORT_CHARS = 60
LEAST_SHOWN_SECONDS = 0.001
_SOURCES: Mapping[str, str] = MappingProxyType({"virtual": "runner", "public": "declared"})
"""Where a model or an agent comes from: a runner publishes it, or an operator declared it."""


def seconds_ago(seconds: float) -> str:
    """Returns an age as text: 5s, 3m, 2h, 4d."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{int(seconds // length)}{unit}"
    return f"{max(0, int(seconds))}s"


def keep_alive_text(seconds: float | None) -> str:
    """Returns how long a model stays loaded after a request, such as "300s"; "-": not configured."""
    if seconds is None:
        return "-"
    return "never" if seconds < 0 else f"{seconds:g}s"


def moment_in(value: datetime | str) -> datetime:
    """Returns a time of a record, which is a text in documents."""
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def age(moment: datetime | str | None) -> str:
    """Returns how long ago, such as "3h"."""
    return "-" if moment is None else seconds_ago((datetime.now(UTC) - moment_in(moment)).total_seconds())


def ago(moment: datetime | str | None) -> str:
    """Returns an age as text, such as "3h ago"."""
    return "-" if moment is None else f"{age(moment)} ago"


def local(moment: datetime | str) -> str:
    """Returns a time of day on this machine."""
    return f"{moment_in(moment).astimezone():%Y-%m-%d %H:%M:%S}"


def source_word(kind: str) -> str:
    """Returns where a model or an agent of a kind comes from."""
    return _SOURCES.get(kind, kind)


def labels_text(labels: Mapping[str, str]) -> str:
    """Returns labels as selectors have them: `team=a,zone=b`."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))


def _actor(name: str) -> str:
    from weft.kernel.principal import actor_words  # noqa: PLC0415 - it imports what verifies keys

    return actor_words(name)


def shortened(text: str) -> str:
    """Returns a text cut to a number of characters."""
    return text if len(text) <= MAX_SHORT_CHARS else f"{text[: MAX_SHORT_CHARS - 1]}…"


def span(seconds: float) -> str:
    """Returns a measured time with three digits, such as "0.313 s"; below a millisecond only that it is."""
    return f"{seconds:.3g} s" if seconds >= LEAST_SHOWN_SECONDS or seconds == 0 else "under 0.001 s"


FORMATS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "actor": _actor,
        "age": age,
        "ago": ago,
        "commas": ",".join,
        "keep": keep_alive_text,
        "labels": labels_text,
        "local": local,
        "short": lambda found: shortened(found if isinstance(found, str) else ",".join(found)),
        "source": source_word,
        "size": size_words,
        "span": span,
        "spaced": lambda word: str(word).replace("_", " "),
        "yes": lambda flag: "yes" if flag else "no",
        "wait": wait_words,
    }
)
"""Formats by their names."""


def formatted(value: Any, form: str) -> str:
    """Returns a value in one of FORMATS, or one of Python's, such as "{:g}s"."""
    return form.format(value) if "{" in form else FORMATS[form](value)


def value_at(record: Any, path: str) -> Any:
    """Returns what is at a path of a record, such as "status.instance.phase"; None: nothing."""
    for step in path.split("."):
        record = record.get(step) if isinstance(record, Mapping) else getattr(record, step, None)
        if record is None:
            return None
    return record


def text_at(record: Any, paths: str, form: str = "") -> str | None:
    """Returns the text of what is at a path, or at the first of several ("a|b") with a value; None: nothing.

    `form`: see `formatted`.
    """
    path, *others = paths.split("|")
    value = value_at(record, path)
    if others:
        value = value or next(filter(None, (value_at(record, other) for other in others)), None)
    if value is None or value in ("", [], {}, ()):
        return None
    if form:
        return formatted(value, form)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
