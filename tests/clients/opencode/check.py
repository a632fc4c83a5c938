"""opencode: a coding agent for the terminal, as it is run without one."""

import json

from program import AGENT_TEXT, changed_and_tested, launch
from report import MISSING, TALK, TALK_TEXT, holds, run


def opencode(model: str, prompt: str, *, fails: bool = False) -> list[dict]:
    said = launch("opencode", model, "run", "--format", "json", prompt, fails=fails)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def texts(events: list[dict]) -> list[str]:
    return [event["part"]["text"].strip() for event in events if event["type"] == "text"]


def chat_stream() -> None:
    said = texts(opencode(TALK, "Hello"))
    holds(said and (said == [TALK_TEXT] or not TALK_TEXT), f"it said {said}")


def chat_agent() -> None:
    events = opencode("agent-opencode", "Put a lake in place of the sea in the notes.")
    tools = [event["part"] for event in events if event["type"] == "tool_use"]
    holds([tool["tool"] for tool in tools] == ["read", "edit", "bash"], f"the tools were {tools}")
    changed_and_tested(events)
    holds(texts(events) == [AGENT_TEXT], f"it said {texts(events)}")


def chat_errors() -> None:
    said = json.dumps(opencode(MISSING, "Hello", fails=True))
    holds("no-such-model" in said, f"the error does not name the model: {said}")


run(globals())
