"""Pieces, figures and errors of wrong forms, types and sizes."""

from typing import Any

from weft.kernel.reasons import Reason
from weft_testing.hostile_engine.row import FAILED, GOOD, HI, PROTOCOL, REJECTED, Row, stream
from weft_testing.hostile_engine.server import DONE, end, event

_TOOL = {"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}
_NO_TEXTS: tuple[object, ...] = (7, 1.5, True, ["Hi"], {"text": "Hi"})
_NO_OBJECTS: tuple[object, ...] = ("Hi", [], 1)
_NO_CHOICES: tuple[object, ...] = ({}, "none", 5, [5], ["a"], [None])


def _bad(name: str, *events: bytes, sees: Reason = PROTOCOL) -> Row:
    return Row(name=name, answer=stream(*events), sees=sees)


def _delta(**delta: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta}]})


def _wrong(name: str, **chunk: Any) -> Row:
    """A chunk with these fields in an answer that is in order otherwise."""
    return _bad(name, HI, event(chunk), *GOOD[1:])


def _usage(name: str, usage: object) -> Row:
    return _wrong(f"usage: {name}", choices=[], usage=usage)


def _stated(name: str, *events: bytes) -> tuple[Row, Row]:
    """An error before the content, and within it."""
    return (
        _bad(f"{name}, at once", *events, sees=FAILED),
        _bad(f"{name}, after content", HI, *events, end(), DONE, sees=FAILED),
    )


ROWS = (
    *(_bad(f"content: {value!r:.20}", _delta(content=value), *GOOD[1:]) for value in _NO_TEXTS),
    *(_wrong(f"delta: {value!r}", choices=[{"index": 0, "delta": value}]) for value in _NO_OBJECTS),
    *(_wrong(f"choices: {value!r}", choices=value) for value in _NO_CHOICES),
    _bad("tool_calls: an object", _delta(tool_calls=_TOOL), end("tool_calls"), DONE),
    _bad("tool_calls: a text", _delta(tool_calls="f()"), end("tool_calls"), DONE),
    _bad("a call -1", _delta(tool_calls=[{**_TOOL, "index": -1}]), end("tool_calls"), DONE),
    _bad("a call of a number", _delta(tool_calls=[{"index": 0, "function": {"name": 5}}]), end("tool_calls"), DONE),
    _bad(
        "arguments: an object",
        _delta(tool_calls=[{"function": {"name": "f", "arguments": {}}}]),
        end("tool_calls"),
        DONE,
    ),
    _bad("reasoning: a number", _delta(reasoning_content=1), *GOOD),
    _bad("refusal: a list", _delta(refusal=["no"]), *GOOD),
    _wrong("logprobs: a number", choices=[{"delta": {"content": "a"}, "logprobs": 1}]),
    _wrong("logprobs: no token", choices=[{"delta": {"content": "a"}, "logprobs": {"content": [{"logprob": 0}]}}]),
    _wrong(
        "logprobs: byte 256",
        choices=[{"delta": {}, "logprobs": {"content": [{"token": "a", "logprob": 0, "bytes": [256]}]}}],
    ),
    _usage("below nothing", {"prompt_tokens": -1}),
    _usage("beyond all numbers", {"completion_tokens": 10**30}),
    _usage("beyond exact numbers", {"completion_tokens": 2**60}),
    _usage("text", {"prompt_tokens": "3"}),
    _usage("half a token", {"prompt_tokens": 1.5}),
    _usage("a list", [1, 2]),
    _usage("a number", 5),
    _usage("cached below nothing", {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": -1}}),
    _wrong("timings: below nothing", choices=[], timings={"prompt_ms": -5.0}),
    _wrong("timings: a text", choices=[], timings={"prompt_ms": "fast"}),
    _wrong("timings: no end", choices=[], timings={"predicted_ms": 1e308}),
    _wrong("prompt_progress: below nothing", choices=[], prompt_progress={"total": -1}),
    _wrong("prompt_progress: a text", choices=[], prompt_progress="half"),
    *_stated("an error object", event({"error": {"message": "no tea", "type": "server_error", "code": 500}})),
    *_stated("an error text", event({"error": "no tea"})),
    *_stated("an empty error", event({"error": {}})),
    *_stated("an object 'error'", event({"object": "error", "message": "no tea", "code": 500})),
    *_stated("a detail", event({"detail": "no tea"})),
    *_stated("an event 'error' of text", b"event: error\ndata: no tea\n\n"),
    *_stated("an event 'error' of JSON", b'event: error\ndata: {"type":"error","error":{"message":"no tea"}}\n\n'),
    *_stated("an event 'error' that looks like an answer", b"event: error\n" + HI),
    _bad("an error: a number", HI, event({"error": 500}), end(), DONE),
    _bad("an error: a list", HI, event({"error": ["no"]}), end(), DONE),
    _bad("an error of a wrong form", HI, event({"error": {"message": {"text": "no"}}}), end(), DONE),
    _bad(
        "an error about the request",
        event({"error": {"message": "bad", "type": "invalid_request_error"}}),
        sees=REJECTED,
    ),
    _bad(
        "an error beside content",
        event({"error": "no tea", "choices": [{"delta": {"content": "Hi"}}]}),
        DONE,
        sees=FAILED,
    ),
    Row(name="an error: null", answer=stream(event({"error": None, "choices": []}), *GOOD), sees=None, text="Hi"),
    Row(name="no figures", answer=stream(HI, end(), DONE), sees=None, text="Hi"),
    Row(
        name="figures: null",
        answer=stream(HI, end(), event({"choices": [], "usage": None}), DONE),
        sees=None,
        text="Hi",
    ),
    Row(name="fields that nobody knows", answer=stream(event({"x": 1, "choices": []}), *GOOD), sees=None, text="Hi"),
    Row(
        name="the name of the model is a number",
        answer=stream(event({"model": 5, "choices": []}), *GOOD),
        sees=None,
        text="Hi",
    ),
    Row(
        name="the name of another model",
        answer=stream(event({"model": "other", "choices": []}), *GOOD),
        sees=None,
        text="Hi",
    ),
)
