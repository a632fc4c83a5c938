"""Inference requests with invalid or too large fields."""

from typing import Any

from bad_inputs_stage import Case, Send, later, of_kind, with_fields, with_member

_CHAT = of_kind("chat")
_TALKS = of_kind("chat", "messages", "count")
_GENERATES = of_kind("chat", "completions")
_SAMPLES = of_kind("chat", "completions", "messages", "responses")
_LENGTHS = of_kind("chat", "completions", "messages")
_COMPLETES = of_kind("chat", "completions")
_NAMED = of_kind("chat", "completions", "embeddings")
_FINE = frozenset({200})
_ANY = frozenset({200, 400})
_USER = {"role": "user", "content": "x"}


def _message(**fields: Any) -> Send:
    return with_fields({"messages": [{**_USER, **fields}]})


def _many(count: int) -> Send:
    return later(lambda: with_fields({"messages": [_USER] * count}))


def _floods() -> tuple[Case, ...]:
    texts = {
        "right to left": "\u202e" * 50_000,
        "zero width": "\u200b\u2060\ufeff" * 20_000,
        "combining": "a" + "\u0301" * 50_000,
    }
    return tuple(
        Case(f"C8 {name}", _message(content=text), _FINE, _TALKS, in_envelope=False) for name, text in texts.items()
    )


MESSAGES = (
    Case("C1 no messages", with_fields({"messages": []}), applies=_TALKS),
    Case("C1 messages missing", with_fields({}, without=("messages",)), applies=_TALKS),
    Case("C1 messages null", with_fields({"messages": None}), applies=_TALKS),
    Case("C1 messages an object", with_fields({"messages": {"0": _USER}}), applies=_TALKS),
    Case("C2 unknown role", _message(role="robot"), applies=_TALKS),
    Case("C2 role of another case", _message(role="User"), applies=_TALKS),
    Case("C4 content null", _message(content=None), applies=_TALKS),
    Case("C4 content a number", _message(content=7), applies=_TALKS),
    Case("C4 content an object", _message(content={"text": "x"}), applies=_TALKS),
    Case(
        "C4 part in a part", _message(content=[{"type": "text", "text": {"type": "text", "text": "x"}}]), applies=_TALKS
    ),
    Case("C4 list in a list", _message(content=[[{"type": "text", "text": "x"}]]), applies=_TALKS),
    Case("C4 part of no type", _message(content=[{"text": "x"}]), applies=_TALKS),
    Case("C4 part of an unknown type", _message(content=[{"type": "hologram"}]), applies=_CHAT),
    Case("C5 10,001 messages", _many(10_001), applies=_TALKS),
    Case("C5 90,000 messages", _many(90_000), frozenset({400, 413}), of_kind("chat")),
    Case("C6 answer to no call", _message(role="tool", tool_call_id="call-9"), applies=_CHAT),
    Case("C6 answer without an id", _message(role="tool"), applies=_CHAT),
    Case(
        "C6 result of no use",
        _message(content=[{"type": "tool_result", "tool_use_id": "t", "content": "x"}]),
        applies=of_kind("messages"),
    ),
    *_floods(),
)
NUMBERS = (
    *(
        Case(f"C10 max_tokens {value!r}", with_fields({"max_tokens": value}), applies=_LENGTHS)
        for value in (0, -2, 2**31, 2**63, 2**64, 1.5, "5", True, [1])
    ),
    # As in llama.cpp's server: no limit. Anthropic's API has no such word.
    Case("C10 no limit", with_fields({"max_tokens": -1}), frozenset({200}), _COMPLETES, in_envelope=False),
    Case("C10 no limit of a message", with_fields({"max_tokens": -1}), applies=of_kind("messages")),
    *(Case(f"C11 n {value!r}", with_fields({"n": value}), applies=_GENERATES) for value in (0, -1, 9, 10**9, "1", 1.0)),
    Case("C11 n times max_tokens", with_fields({"n": 8, "max_tokens": 2**31 - 1}), applies=_GENERATES),
    *(
        Case(f"C11 best_of {value!r}", with_fields({"best_of": value}), applies=of_kind("completions"))
        for value in (0, -1, 2, 10**9)
    ),
    *(
        Case(f"C12 temperature {value!r}", with_fields({"temperature": value}), applies=_SAMPLES)
        for value in (-1, 1e308, "hot", [0], True)
    ),
    *(
        Case(f"C13 top_p {value!r}", with_fields({"top_p": value}), applies=_SAMPLES)
        for value in (2, -0.1, 1.0001, "1")
    ),
    *(
        Case(f"C14 {name} {value}", with_fields({"logprobs": True, name: value}), applies=_CHAT)
        for name, value in (("top_logprobs", 10**6), ("top_logprobs", -1), ("top_logprobs", 21), ("logprobs", 5))
    ),
    Case("C14 logprobs of a text", with_fields({"logprobs": 10**6}), applies=of_kind("completions")),
    Case(
        "C15 100,000 biases",
        later(lambda: with_fields({"logit_bias": {str(n): 0 for n in range(100_000)}})),
        applies=_GENERATES,
    ),
    *(
        Case(f"C15 bias {bias}", with_fields({"logit_bias": bias}), applies=_GENERATES)
        for bias in ({"hello": 1}, {"-1": 1}, {"1.5": 1}, {"9" * 400: 1}, {"1": 101}, {"1": "1"}, {"\uff11": 1}, [1])
    ),
    *(
        Case(f"C17 seed {value!r}", with_fields({"seed": value}), applies=_GENERATES)
        for value in (2**64, -(2**64), 1.5, "1")
    ),
)
OPTIONS = (
    Case("C16 10,000 stops", with_fields({"stop": ["x"] * 10_000}), applies=_GENERATES),
    Case("C16 empty stop", with_fields({"stop": ""}), applies=_GENERATES),
    Case("C16 empty stop in a list", with_fields({"stop": ["a", ""]}), applies=_GENERATES),
    Case("C16 stop of 1 MB", with_fields({"stop": "x" * 1_000_000}), applies=_GENERATES),
    Case(
        "C16 10,000 stops of the other API",
        with_fields({"stop_sequences": ["x"] * 10_000}),
        applies=of_kind("messages"),
    ),
    Case("C19 options of no stream", with_fields({"stream_options": {"include_usage": True}}), applies=_GENERATES),
    Case("C19 stream a word", with_fields({"stream": "yes"}), applies=_SAMPLES),
    *(
        Case(f"C21 {name}", with_fields({name: value}), _ANY, _SAMPLES, in_envelope=False)
        for name, value in (
            ("api_base", "http://169.254.169.254/"),
            ("base_url", "http://evil.example"),
            ("api_key", "sk-theirs"),
            ("extra_headers", {"Authorization": "Bearer x"}),
            ("extra_body", {"model": "other"}),
        )
    ),
    Case("C22 cache salt", with_fields({"cache_salt": "mine"}), _ANY, _SAMPLES, in_envelope=False),
    Case("C24 user of 1 MB", with_fields({"user": "x" * 1_000_000}), applies=_NAMED),
    Case("C24 1,000 entries of metadata", with_fields({"metadata": {str(n): "x" for n in range(1000)}}), applies=_CHAT),
    Case("C25 10,000 unknown fields", with_fields({f"unknown_{n}": n for n in range(10_000)}), applies=_GENERATES),
    Case("C25 unknown field of 200 KB", with_fields({"unknown": "x" * 200_000}), applies=_GENERATES),
    Case("C25 unknown field without a name", with_member(b'"":1'), applies=_GENERATES),
    Case(
        "C26 no model",
        with_fields({}, without=("model",)),
        applies=of_kind("chat", "completions", "embeddings", "messages", "count"),
    ),
    Case("C26 allow_remote a word", with_fields({"allow_remote": "yes"}), applies=_NAMED),
    Case("C26 keep_alive", with_fields({"keep_alive": "soon"}), applies=_NAMED),
)
_PROMPTS: tuple[Any, ...] = ([], {}, None, [[]], ["a", 1], [-1], [2**31], [1.5])
_TEXTS: tuple[Any, ...] = ("", [], {}, None, [""], [[]], ["a", 1], [-1], [2**31])
INPUTS = (
    *(
        Case(f"C27 prompt {value!r}", with_fields({"prompt": value}), applies=of_kind("completions"))
        for value in _PROMPTS
    ),
    Case("C27 129 prompts", with_fields({"prompt": ["x"] * 129}), applies=of_kind("completions")),
    *(Case(f"C27 input {value!r}", with_fields({"input": value}), applies=of_kind("embeddings")) for value in _TEXTS),
    Case("C27 2,049 inputs", with_fields({"input": ["x"] * 2049}), applies=of_kind("embeddings")),
    *(
        Case(f"C27 dimensions {value!r}", with_fields({"dimensions": value}), applies=of_kind("embeddings"))
        for value in (0, -1, 10**9, 1.5)
    ),
    Case("C27 encoding", with_fields({"encoding_format": "zip"}), applies=of_kind("embeddings")),
)
CASES = (*MESSAGES, *NUMBERS, *OPTIONS, *INPUTS)
