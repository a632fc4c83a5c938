"""Claude Code, as it is run without a terminal."""

import json

from program import AGENT_TEXT, changed_and_tested, launch
from report import MISSING, TALK, TALK_TEXT, holds, run, same


def claude(model: str, prompt: str, *options: str, fails: bool = False) -> list[dict]:
    said = launch(
        "claude", model, "--print", prompt, "--output-format", "stream-json", "--verbose", *options, fails=fails
    )
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def result(events: list[dict]) -> dict:
    (last,) = [event for event in events if event["type"] == "result"]
    return last


def messages_stream() -> None:
    last = result(claude(TALK, "Hello"))
    holds(not last["is_error"] and last["result"], f"it ended with {last}")
    holds(last["result"] == TALK_TEXT or not TALK_TEXT, f"it said {last['result']}")
    holds(last["usage"]["output_tokens"] > 0, f"no usage: {last['usage']}")


def messages_agent() -> None:
    wanted = "Put a lake in place of the sea in the notes."
    events = claude("agent-claude-code", wanted, "--allowedTools", "Read", "Edit", "Bash")
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    same([block["name"] for block in blocks if block["type"] == "tool_use"], ["Read", "Edit", "Bash"])
    changed_and_tested(events)
    same(result(events)["result"], AGENT_TEXT)


def messages_errors() -> None:
    last = result(claude(MISSING, "Hello", fails=True))
    holds(last["is_error"] and "no-such-model" in last["result"], f"it does not say what is wrong: {last}")


run(globals())
