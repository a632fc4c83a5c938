"""What `weft explain` says of a compacted conversation."""

from typing import Any

import pytest

from weft_app.cli.explain import receipt_lines

RECEIPT: dict[str, Any] = {"outcome": "completed", "queueWaitSeconds": 0, "loadWaitSeconds": 0, "leftPremises": False}


@pytest.mark.parametrize(
    ("compaction", "words"),
    [
        ({"passCount": 0}, "the answer is a summary of the conversation"),
        (
            {"passCount": 2, "promptTokens": 900, "completionTokens": 80},
            "to a summary, number of calls before the answer: 2 (900 + 80 tokens)",
        ),
    ],
)
def test_compaction_is_shown_with_its_calls_and_tokens(compaction: dict[str, int], words: str) -> None:
    text = " ".join("\n".join(receipt_lines(RECEIPT | {"compaction": compaction}, "req-1")).split())
    assert f"Compacted: {words}" in text


def test_request_that_was_not_compacted_has_no_such_line() -> None:
    assert "Compacted" not in "\n".join(receipt_lines(RECEIPT, "req-1"))
