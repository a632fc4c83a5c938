"""Chunks of a stream that count as a token, or as prefill progress."""

from typing import Any

import msgspec
import pytest

from runner_svc.openai_upstream.stream import DONE, StreamReader

PREAMBLE = {"choices": [{"delta": {"role": "assistant", "content": None}}]}
PREFILL = {**PREAMBLE, "prompt_progress": {"total": 100, "cache": 0, "processed": 50, "time_ms": 9}}
USAGE = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def _token(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta}]}


@pytest.mark.parametrize(
    ("chunks", "token", "prefill"),
    [
        ([], False, False),
        ([PREAMBLE], False, False),
        ([USAGE], False, False),
        ([_token(content="")], False, False),
        ([PREFILL], False, True),
        ([_token(content="a")], True, False),
        ([_token(reasoning_content="a")], True, False),
        ([_token(tool_calls=[{"index": 0, "function": {"name": "f"}}])], True, False),
        ([{"choices": [{"text": "a"}]}], True, False),
        ([PREAMBLE, PREFILL, _token(content="a")], True, True),
    ],
)
def test_chunks_that_count_as_progress(chunks: list[Any], token: bool, prefill: bool) -> None:
    reader = StreamReader(1, 1)
    reader.read([msgspec.json.encode(chunk) for chunk in chunks])
    assert (reader.took_token, reader.took_prefill) == (token, prefill)


def test_progress_refers_to_the_last_read_only() -> None:
    reader = StreamReader(1, 1)
    reader.read([msgspec.json.encode(_token(content="a"))])
    reader.read([DONE])
    assert not reader.took_token


def test_invisible_token_is_progress_once_the_answer_has_started() -> None:
    reader = StreamReader(1, 1)
    reader.read([msgspec.json.encode(_token(content="a"))])
    assert reader.read([msgspec.json.encode(_token(content=""))]) == []
    assert reader.took_token
    reader.read([msgspec.json.encode(USAGE)])
    assert not reader.took_token
