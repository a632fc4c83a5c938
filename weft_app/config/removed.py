"""Takes out of a configuration what weft no longer has, and names what replaces it."""

from collections.abc import Iterator

from weft.kernel.removed import RUNTIMES
from weft_app.config.document import Document, GivenList, place_of, value_of

_RUNNERS = "runners"


def without_removed(document: Document) -> tuple[Document, tuple[str, ...]]:
    """Returns a document without what was removed from weft, and a message for each such part."""
    messages: list[str] = []
    runners = value_of(document.get(_RUNNERS))
    if isinstance(runners, list):
        kept = GivenList(_kept_runners(runners, messages))
        kept.source = place_of(runners)
        document = {**document, _RUNNERS: kept} if messages else document
    return document, tuple(messages)


def _kept_runners(runners: list[object], messages: list[str]) -> Iterator[object]:
    for runner in runners:
        runtime = value_of(runner.get("runtime")) if isinstance(runner, dict) else None
        if isinstance(runner, dict) and isinstance(runtime, str) and runtime in RUNTIMES:
            where = f" ({place_of(runner)})" if place_of(runner) else ""
            messages.append(
                f"the runner {value_of(runner.get('name'))}{where} is not started: its runtime {runtime} was removed; "
                f"use: {RUNTIMES[runtime]}"
            )
        else:
            yield runner
