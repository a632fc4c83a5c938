"""The attempts of a request, and its next one, as text."""

from datetime import UTC, datetime, timedelta
from typing import Any

from weft_app.cli.explain import agent_words, explanation, retry_words, tries_words

RETRY: dict[str, Any] = {"error": {"reason": "backend_error", "message": "boom"}, "failedCount": 2, "maxAttempts": 5}
REQUEST: dict[str, Any] = {
    "requestId": "task-1",
    "tenant": "ann",
    "target": "qwen",
    "priority": "durable",
    "state": "queued",
    "arrivedAt": "2026-11-29T12:00:00Z",
}


def test_retry_names_the_failed_attempts_the_reason_and_the_next_start() -> None:
    later = (datetime.now(UTC) + timedelta(seconds=9.5)).isoformat()
    assert retry_words({"retry": RETRY | {"nextAt": later}}).startswith(
        "2 of 5 attempts failed (backend_error: boom); the next one"
    )
    assert retry_words({"retry": RETRY}).endswith("the next one starts with a free slot")


def test_bug_retried_request_was_told_as_one_attempt() -> None:
    tried = [
        {"model": "qwen", "runner": "titan", "startSeconds": 0.1, "durationSeconds": 0.2, "reason": "backend_error"},
        {"runner": "", "startSeconds": 2.5},
    ]
    assert tries_words(REQUEST | {"attempts": tried}) == tries_words({"receipt": {"attempts": tried}}) == ", 2 attempts"
    assert tries_words(REQUEST | {"attempts": tried[:1]}) == ""
    text = explanation(REQUEST | {"attempts": tried, "retry": RETRY})
    assert "qwen on titan (+0.100 s, for 200 ms): backend_error" in text
    assert "an unknown runner (+2.500 s): runs" in text
    assert "2 of 5 attempts failed" in text


def test_coding_agent_of_a_request_is_named_with_what_it_asks_for_beside_a_turn() -> None:
    labels = {"program": "claude-code", "agent": "sub", "purpose": "turn"}
    assert "claude-code, sub-agent" in explanation(REQUEST | {"labels": labels})
    assert (
        agent_words({"labels": {"program": "codex", "agent": "main", "purpose": "compaction"}}) == "codex, compaction"
    )
    assert agent_words({"labels": {"program": "codex", "agent": "main", "purpose": "turn"}}) == "codex"
    assert agent_words(REQUEST) is None


def test_parameters_that_an_alias_changed_are_named_with_it() -> None:
    receipt = {
        "requestId": "r",
        "outcome": "completed",
        "queueWaitSeconds": 0,
        "loadWaitSeconds": 0,
        "leftPremises": False,
        "changedParameters": [
            {"name": "temperature", "author": "alias/calm"},
            {"name": "top_p", "author": "alias/calm", "removed": True},
        ],
    }
    text = explanation(REQUEST | {"state": "ended", "receipt": receipt})
    assert "temperature replaced by alias/calm, top_p removed by alias/calm" in text
