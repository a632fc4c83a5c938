"""Cline, as it is run without a terminal."""

import json

from program import AGENT_TEXT, changed_and_tested, start
from report import KEY, MISSING, TALK, TALK_TEXT, URL, holds, run, same


def cline(model: str, prompt: str, *, fails: bool = False) -> list[dict]:
    start(
        "cline",
        "auth",
        "--provider",
        "openai-compatible",
        "--apikey",
        KEY,
        "--modelid",
        model,
        "--baseurl",
        f"{URL}/v1",
    )
    said = start("cline", "--json", "--retries", "1", prompt, fails=fails)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def result(events: list[dict]) -> dict:
    (last,) = [event for event in events if event["type"] == "run_result"]
    return last


def chat_stream() -> None:
    last = result(cline(TALK, "Say hello"))
    holds(last["text"] and (last["text"] == TALK_TEXT or not TALK_TEXT), f"it ended with {last}")
    holds(last["usage"]["outputTokens"] > 0, f"no usage: {last['usage']}")


def chat_agent() -> None:
    events = cline("agent-cline", "Put a lake in place of the sea in the notes.")
    called = [event["event"] for event in events if event["type"] == "agent_event"]
    tools = [event["toolName"] for event in called if event["type"] == "content_end" and event["contentType"] == "tool"]
    same(tools, ["read_files", "editor", "run_commands"])
    changed_and_tested(events)
    same(result(events)["text"], AGENT_TEXT)


def chat_errors() -> None:
    said = json.dumps(cline(MISSING, "Say hello", fails=True))
    holds("no-such-model" in said, f"it does not say what is wrong: {said}")


run(globals())
