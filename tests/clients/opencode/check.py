"""opencode: a coding agent for the terminal, as it is run without one."""

import json
from pathlib import Path

from program import AGENT_TEXT, start
from report import KEY, MISSING, TALK, TALK_TEXT, V1, holds, run

MODELS = [TALK, MISSING, "agent-opencode"]
provider = {
    "npm": "@ai-sdk/openai-compatible",
    "name": "weft",
    "options": {"baseURL": V1, "apiKey": KEY},
    "models": {name: {"name": name} for name in MODELS},
}
Path("opencode.json").write_text(
    json.dumps(
        {
            "$schema": "https://opencode.ai/config.json",
            "provider": {"weft": provider},
            "autoupdate": False,
            "share": "disabled",
            "small_model": f"weft/{TALK}",
        }
    )
)


def opencode(model: str, prompt: str, *, fails: bool = False) -> list[dict]:
    said = start("opencode", "run", "--format", "json", "--model", f"weft/{model}", prompt, fails=fails)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def texts(events: list[dict]) -> list[str]:
    return [event["part"]["text"].strip() for event in events if event["type"] == "text"]


def chat_stream() -> None:
    said = texts(opencode(TALK, "Hello"))
    holds(said and (said == [TALK_TEXT] or not TALK_TEXT), f"it said {said}")


def chat_agent() -> None:
    events = opencode("agent-opencode", "What are the notes about?")
    tools = [event["part"] for event in events if event["type"] == "tool_use"]
    holds([tool["tool"] for tool in tools] == ["read"], f"the tools were {tools}")
    holds("The sea is wide" in tools[0]["state"]["output"], f"it read {tools[0]}")
    holds(texts(events) == [AGENT_TEXT], f"it said {texts(events)}")


def chat_errors() -> None:
    said = json.dumps(opencode(MISSING, "Hello", fails=True))
    holds("no-such-model" in said, f"the error does not name the model: {said}")


run(chat__stream=chat_stream, chat__agent=chat_agent, chat__errors=chat_errors)
