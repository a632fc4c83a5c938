"""Codex, OpenAI's coding agent, as it is run without a terminal."""

import json

from program import AGENT_TEXT, changed_and_tested, launch
from report import MISSING, TALK, TALK_TEXT, holds, run, same

RETRIES = [part for kind in ("request", "stream") for part in ("-c", f"model_providers.weft.{kind}_max_retries=1")]


def codex(model: str, prompt: str, *, fails: bool = False) -> list[dict]:
    said = launch(
        "codex", model, *RETRIES,
        "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt,
        fails=fails,
    )  # fmt: skip
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def items(events: list[dict], kind: str) -> list[dict]:
    return [event["item"] for event in events if event["type"] == "item.completed" and event["item"]["type"] == kind]


def responses_stream() -> None:
    events = codex(TALK, "Hello")
    said = [item["text"] for item in items(events, "agent_message")]
    holds(said and (said == [TALK_TEXT] or not TALK_TEXT), f"it said {said}")
    (done,) = [event for event in events if event["type"] == "turn.completed"]
    holds(done["usage"]["output_tokens"] > 0, f"no usage: {done}")


def responses_agent() -> None:
    events = codex("agent-codex", "Put a lake in place of the sea in the notes.")
    same(len(items(events, "command_execution")), 3)
    changed_and_tested(events)
    same([item["text"] for item in items(events, "agent_message")], [AGENT_TEXT])


def responses_errors() -> None:
    said = json.dumps(codex(MISSING, "Hello", fails=True))
    holds("no-such-model" in said, f"it does not say what is wrong: {said}")


run(globals())
