"""Qwen Code, as it is run without a terminal."""

import json

from program import AGENT_TEXT, changed_and_tested, start
from report import KEY, MISSING, TALK, TALK_TEXT, URL, holds, run, same


def qwen(model: str, prompt: str, *, fails: bool = False) -> list[dict]:
    command = ["qwen", "--auth-type", "openai", "--yolo", "--output-format", "json", prompt]
    variables = {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": f"{URL}/v1", "OPENAI_MODEL": model}
    said = start(*command, fails=fails, **variables)
    events, _ = json.JSONDecoder().raw_decode(said, said.index("[{"))
    return events


def result(events: list[dict]) -> dict:
    (last,) = [event for event in events if event["type"] == "result"]
    return last


def chat_stream() -> None:
    last = result(qwen(TALK, "Hello"))
    holds(last["result"] and (last["result"] == TALK_TEXT or not TALK_TEXT), f"it ended with {last}")
    holds(last["usage"]["output_tokens"] > 0, f"no usage: {last['usage']}")


def chat_agent() -> None:
    events = qwen("agent-qwen-code", "Put a lake in place of the sea in the notes.")
    blocks = [block for event in events if event["type"] == "assistant" for block in event["message"]["content"]]
    same([block["name"] for block in blocks if block["type"] == "tool_use"], 3 * ["run_shell_command"])
    changed_and_tested(events)
    same(result(events)["result"], AGENT_TEXT)


def chat_errors() -> None:
    said = json.dumps(qwen(MISSING, "Hello", fails=True))
    holds("no-such-model" in said, f"it does not say what is wrong: {said}")


run(globals())
