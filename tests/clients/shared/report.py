"""What the checks of Python clients share: the mesh's address and its scripted models, and one JSON line per feature.

Only the standard library: this runs in every client's own environment.
"""

import asyncio
import inspect
import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

URL = os.environ["WEFT_URL"]
"""Without `/v1`."""
V1 = f"{URL}/v1"
KEY = os.environ["WEFT_KEY"]
OPERATOR_KEY = os.environ["WEFT_OPERATOR_KEY"]
"""Of one who may load and pull models; empty against the real model."""
PULLED = os.environ["WEFT_PULLED"]
"""A model of a hub, with one file of PULLED_BYTES."""
PULLED_BYTES = int(os.environ["WEFT_PULLED_BYTES"])

TALK = os.environ["WEFT_TALK_MODEL"]
"""Says TALK_TEXT, or JSON that follows a schema; also gives embeddings."""
TOOLS = "tools"
"""Calls get_weather(city="Oslo") where it is offered, and with the tool's result says TOOLS_TEXT."""
SLOW = "slow"
"""Says the same as TALK, a word at a time."""
TYPED = "typed"
"""Calls final_result(city="Oslo", population=700000) where a tool is offered."""
THINK = "think"
"""Thinks THOUGHT, then says THINK_TEXT."""
BROKEN = "broken"
"""Breaks off in the middle of its answer."""
CUT = "cut"
"""Ends in the middle of its answer, with a finish reason that says so."""
CUT_WORDS = "finish_reason 'abort'"
TEXT_ONLY = "text-only-meant-to-fail"
"""Answers an image as an engine without eyes does: with status 500."""
PAINTER, EARS, VOICE = "painter", "ears", "voice"
"""Makes images of one pixel; says how many bytes a recording has; speaks a RIFF file."""
BROKEN_PAINTER = "broken-painter"
"""Breaks off after the first preview."""
MISSING = "no-such-model"

TALK_TEXT = os.environ["WEFT_TALK_TEXT"]
"""Empty: a real model, whose words nobody knows."""
TOOLS_TEXT = "It is sunny in Oslo."
THOUGHT = "Six times seven."
THINK_TEXT = "The answer is 42."


def run(checks: Mapping[str, Any]) -> None:
    """Try each feature that WEFT_FEATURES names, and print how it went; `a_b` checks the feature `a.b`."""
    for feature in os.environ["WEFT_FEATURES"].split(","):
        _try(feature, checks[feature.replace(".", "_", 1)])


def _try(feature: str, check: Callable[[], Any]) -> None:
    try:
        done = check()
        if inspect.iscoroutine(done):
            asyncio.run(done)
    except BaseException as error:  # noqa: BLE001 - whatever a client throws is its verdict
        traceback.print_exc()
        line = {"feature": feature, "ok": False, "detail": f"{type(error).__name__}: {error}"[:500]}
    else:
        line = {"feature": feature, "ok": True}
    print(json.dumps(line), flush=True)  # noqa: T201


def same(got: object, wanted: object) -> None:
    """Fail unless they are equal."""
    if got != wanted:
        raise AssertionError(f"got {got!r}, wanted {wanted!r}")


def holds(condition: object, otherwise: str) -> None:
    """Fail with `otherwise` unless the condition holds."""
    if not condition:
        raise AssertionError(otherwise)


def is_talk(text: str | None) -> None:
    """Fail unless this is what the model TALK says."""
    if TALK_TEXT:
        same(text, TALK_TEXT)
    else:
        holds(text and text.strip(), f"no words: {text!r}")


def fails(act: Callable[[], Any], *kinds: type[BaseException]) -> BaseException:
    """The error that `act` ends with, which is one of these kinds."""
    try:
        done = act()
        if inspect.iscoroutine(done):
            asyncio.run(done)
    except kinds as error:
        return error
    raise AssertionError(f"it did not fail with {[kind.__name__ for kind in kinds]}")


def breaks_off(
    act: Callable[[], Any], *kinds: type[BaseException], words: str = "before the answer was complete"
) -> None:
    """Fail unless `act` ends with one of these kinds, which says in the words of the mesh that the answer broke off."""
    error = fails(act, *kinds)
    holds(words in f"{error} {error!r}", f"it does not say what happened: {error!r}")
