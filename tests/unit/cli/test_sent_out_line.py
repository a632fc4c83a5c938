"""What `weft explain` says of the tools that sent bytes out of the mesh."""

from typing import Any

from weft_app.cli.explain import receipt_lines

RECEIPT: dict[str, Any] = {"outcome": "completed", "queueWaitSeconds": 0, "loadWaitSeconds": 0, "leftPremises": True}


def test_each_search_is_shown_with_its_host_and_bytes() -> None:
    search = {"tool": "web_search", "host": "search\x1b.example", "sentByteCount": 90, "receivedByteCount": 2048}
    runs = [search | {"resultCount": 3}, search | {"failed": True}, {"tool": "clock"}]
    text = " ".join("\n".join(receipt_lines(RECEIPT | {"toolRuns": runs}, "req-1")).split())
    assert "web_search to search" in text
    assert ".example: 90 bytes sent, 2 KiB received, 3 results; web_search" in text
    assert text.count("web_search") == 2
    assert "0 results, failed" in text
    assert "\x1b" not in text
    assert "clock" not in text


def test_request_that_sent_nothing_has_no_such_line() -> None:
    assert "Sent" not in "\n".join(receipt_lines(RECEIPT, "req-1"))
