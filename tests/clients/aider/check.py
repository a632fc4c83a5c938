"""aider: pair programming on the command line, as it is run without a person."""

from program import start
from report import KEY, MISSING, TALK, TALK_TEXT, V1, holds, run


def aider(model: str, *options: str) -> str:
    return start(
        "aider",
        "--model", f"openai/{model}",
        "--openai-api-base", V1,
        "--openai-api-key", KEY,
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--no-show-model-warnings",
        "--no-show-release-notes",
        "--analytics-disable",
        "--no-pretty",
        *options,
        "--message", "Hello",
    )  # fmt: skip


def chat_stream() -> None:
    holds(TALK_TEXT in aider(TALK), "the answer is not shown")


def chat_text() -> None:
    holds(TALK_TEXT in aider(TALK, "--no-stream"), "the answer is not shown")


def chat_errors() -> None:
    said = aider(MISSING, "--no-stream")
    holds("no-such-model" in said and "NotFoundError" in said, f"it does not say what is wrong: {said}")


run(chat__stream=chat_stream, chat__text=chat_text, chat__errors=chat_errors)
