"""aider: pair programming on the command line, as it is run without a person."""

from program import launch
from report import MISSING, TALK, TALK_TEXT, holds, run


def aider(model: str, *options: str) -> str:
    return launch(
        "aider",
        model,
        "--no-git",
        "--yes-always",
        "--no-check-update",
        "--no-show-model-warnings",
        "--no-show-release-notes",
        "--analytics-disable",
        "--no-pretty",
        *options,
        "--message",
        "Hello",
    )


def chat_stream() -> None:
    holds(TALK_TEXT in aider(TALK), "the answer is not shown")


def chat_text() -> None:
    holds(TALK_TEXT in aider(TALK, "--no-stream"), "the answer is not shown")


def chat_errors() -> None:
    said = aider(MISSING, "--no-stream")
    holds("no-such-model" in said and "NotFoundError" in said, f"it does not say what is wrong: {said}")


run(globals())
