"""The `llm` command: models from its own file of OpenAI-compatible models."""

import os
import subprocess
from pathlib import Path

from report import BROKEN, KEY, MISSING, TALK, TOOLS, TOOLS_TEXT, V1, holds, is_talk, run, same

home = Path(os.environ["HOME"]) / "llm"
home.mkdir(exist_ok=True)
names = [TALK, TOOLS, BROKEN, MISSING]
(home / "extra-openai-models.yaml").write_text(
    "".join(
        f"- model_id: weft-{name}\n  model_name: {name}\n  api_base: {V1}\n  api_key_name: weft\n"
        "  supports_tools: true\n  supports_schema: true\n"
        for name in names
    )
)


def llm(*arguments: str, exit_code: int = 0) -> str:
    done = subprocess.run(
        ["llm", *arguments],
        env={**os.environ, "LLM_USER_PATH": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != exit_code:
        raise AssertionError(f"llm {arguments} ended with {done.returncode}: {done.stdout}\n{done.stderr}")
    return (done.stdout if exit_code == 0 else done.stdout + done.stderr).strip()


llm("keys", "set", "weft", "--value", KEY)


def chat_stream() -> None:
    is_talk(llm("-m", f"weft-{TALK}", "Hello"))


def chat_text() -> None:
    is_talk(llm("-m", f"weft-{TALK}", "--no-stream", "Hello"))


def chat_tools() -> None:
    function = "def get_weather(city: str) -> str:\n    'Weather of a city'\n    return f'sunny in {city}'\n"
    said = llm("-m", f"weft-{TOOLS}", "--functions", function, "--td", "How is the weather in Oslo?")
    same(said.splitlines()[-1], TOOLS_TEXT)


def chat_structured() -> None:
    said = llm("-m", f"weft-{TALK}", "--schema", "name, population int", "Which city?")
    same(said, '{"name":"tok0","population":1}')


def chat_errors() -> None:
    holds("no-such-model" in llm("-m", f"weft-{MISSING}", "Hello", exit_code=1), "the error does not name the model")


def chat_broken_stream() -> None:
    llm("-m", f"weft-{BROKEN}", "Hello", exit_code=1)


run(globals())
