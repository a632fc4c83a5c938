"""The line at the end of a chat: what is not known is left out."""

from weft.api.common.v1 import receipt_pb2, usage_pb2
from weft_app.cli.chat import timings


def _receipt(**fields: object) -> receipt_pb2.Receipt:
    receipt = receipt_pb2.Receipt(host="atlas", **fields)  # type: ignore[arg-type]  # the fields' own types
    receipt.attempts.add(runner="left")
    return receipt


def test_unknown_speed_is_not_shown_as_zero() -> None:
    said = timings(_receipt(usage=usage_pb2.Usage(prompt_tokens=3, completion_tokens=4)))
    assert said == "3 + 4 tokens, queue 0 ms, left on atlas"


def test_known_speed_is_shown_and_a_slow_one_with_tenths() -> None:
    assert "42 tokens/s" in timings(_receipt(tokens_per_second=42.4))
    assert "0.4 tokens/s" in timings(_receipt(tokens_per_second=0.42))


def test_tokens_are_not_shown_without_counts() -> None:
    assert timings(_receipt()) == "queue 0 ms, left on atlas"
