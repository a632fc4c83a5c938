"""Outcomes of tools, made fit for a model: bounded, valid text, no traces."""

from runner_svc.tools.port import ToolOutcome

MAX_FAILURE_BYTES = 2048
"""Most of an error text that a model is told."""


def described(error: BaseException) -> str:
    """An exception by its type and message, without a trace. The message is a stranger's code, which may fail too."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - whatever `__str__` raises
        text = "its message cannot be read"
    return f"{type(error).__name__}: {text}"


def failure(message: str) -> ToolOutcome:
    """The outcome of a call that did not succeed."""
    return bounded(ToolOutcome(content=f"The tool failed: {message}", failed=True), MAX_FAILURE_BYTES)


def bounded(outcome: ToolOutcome, max_bytes: int) -> ToolOutcome:
    """The outcome with at most `max_bytes` of UTF-8, cut between characters; the text says how much is missing.

    Half surrogates, which no message can carry, become question marks.
    """
    # Not the text's own method: a tool may return a kind of `str` that has another.
    encoded = str.encode(outcome.content, errors="replace")
    if len(encoded) <= max_bytes:
        return ToolOutcome(content=encoded.decode(), failed=outcome.failed, cut=outcome.cut)
    kept = encoded[:max_bytes].decode(errors="ignore")
    missing = len(encoded) - len(kept.encode())
    return ToolOutcome(content=f"{kept}\n[cut: {missing} bytes more]", failed=outcome.failed, cut=True)
