"""Deterministic answers of the fake model, one piece per token."""

import itertools
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from weft_testing.fake_backend.behaviour import Behaviour, ScriptedCall
from weft_testing.fake_backend.requests import GenerationRequest, words

_JSON_FRAGMENT_CHARS = 6
_MAX_SCHEMA_DEPTH = 16


class PieceKind(Enum):
    """The kind of a token; the value is its field in a chat delta."""

    CONTENT = "content"
    REASONING = "reasoning_content"
    CALL_START = "call_start"
    CALL_ARGUMENTS = "call_arguments"


class Piece(NamedTuple):
    """One token."""

    kind: PieceKind
    text: str
    """For CALL_START, the function's name."""
    call: int = 0
    """Number of its tool call."""


def answer(request: GenerationRequest, behaviour: Behaviour) -> Iterator[Piece]:
    """Yields the tokens of one choice up to its natural end; may be endless."""
    said = _scripted_turn if request.is_chat and behaviour.turns else _calls_or_content
    pieces = itertools.chain(_reasoning(request, behaviour), said(request, behaviour))
    if request.ignores_end:
        pieces = itertools.chain(pieces, _counted(0))
    return pieces


def fragments(text: str) -> list[str]:
    """Splits a text within words, as a real tokenizer splits JSON."""
    return [text[at : at + _JSON_FRAGMENT_CHARS] for at in range(0, len(text), _JSON_FRAGMENT_CHARS)]


def _reasoning(request: GenerationRequest, behaviour: Behaviour) -> Iterator[Piece]:
    if request.is_chat:
        yield from (Piece(PieceKind.REASONING, word) for word in words(behaviour.reasoning_text))


def _calls_or_content(request: GenerationRequest, behaviour: Behaviour) -> Iterator[Piece]:
    if request.offers_tools and not request.answers_tool and behaviour.scripted_calls:
        return _tool_calls(behaviour.scripted_calls)
    if behaviour.repeat_line:
        return _content(itertools.cycle(words(behaviour.repeat_line + "\n")))
    if behaviour.text is not None:
        return _content(words(behaviour.text))
    if request.wants_json:
        return _content(fragments(_json_text(request.json_schema)))
    if behaviour.echo:
        return _content(words(request.echo_text))
    return _counted(behaviour.answer_tokens)


def _scripted_turn(request: GenerationRequest, behaviour: Behaviour) -> Iterator[Piece]:
    turn = behaviour.turns[min(request.turn, len(behaviour.turns) - 1)]
    return itertools.chain(_content(words(turn.text)), _tool_calls(turn.calls if request.offers_tools else ()))


def _content(texts: Iterable[str]) -> Iterator[Piece]:
    return (Piece(PieceKind.CONTENT, text) for text in texts)


def _counted(count: int) -> Iterator[Piece]:
    """Yields the tokens of "tok0 tok1 tok2 ..."; endless if `count` is 0."""
    numbers: Iterable[int] = range(1, count) if count else itertools.count(1)
    yield Piece(PieceKind.CONTENT, "tok0")
    for number in numbers:
        yield Piece(PieceKind.CONTENT, f" tok{number}")


def _tool_calls(calls: Iterable[ScriptedCall]) -> Iterator[Piece]:
    for number, call in enumerate(calls):
        yield Piece(PieceKind.CALL_START, call.name, number)
        for fragment in fragments(call.arguments):
            yield Piece(PieceKind.CALL_ARGUMENTS, fragment, number)


def _json_text(schema: Any) -> str:
    value = {"answer": "tok0 tok1"} if schema is None else _instance(schema, schema, 0)
    return msgspec.json.encode(value).decode()


def _instance(schema: Any, root: Any, depth: int) -> Any:
    """Returns a small value for common JSON schemas; None for others."""
    if not isinstance(schema, dict) or depth > _MAX_SCHEMA_DEPTH:
        return None
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    if "$ref" in schema:
        return _instance(_resolve(str(schema["$ref"]), root), root, depth + 1)
    for alternatives in ("anyOf", "oneOf", "allOf"):
        if schema.get(alternatives):
            return _instance(schema[alternatives][0], root, depth + 1)
    return _instance_of_type(schema, root, depth)


def _instance_of_type(schema: dict[str, Any], root: Any, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[0]
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: _instance(member, root, depth + 1) for name, member in properties.items()}
    if kind == "array":
        count = max(1, int(schema.get("minItems", 1)))
        return [_instance(schema.get("items", {}), root, depth + 1) for _ in range(min(count, 64))]
    scalars: dict[str, Any] = {
        "string": "tok0",
        "integer": schema.get("minimum", 1),
        "number": schema.get("minimum", 1.5),
        "boolean": True,
    }
    return scalars.get(kind)


def _resolve(reference: str, root: Any) -> Any:
    target = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        target = target.get(part) if part and isinstance(target, dict) else target
    return target
