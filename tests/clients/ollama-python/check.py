"""ollama for Python: Ollama's own library."""

import base64
import os

import ollama
from program import launched
from pydantic import BaseModel
from report import (
    BROKEN,
    CUT,
    CUT_WORDS,
    KEY,
    MISSING,
    OPERATOR_KEY,
    PULLED,
    PULLED_BYTES,
    TALK,
    THINK,
    THINK_TEXT,
    THOUGHT,
    TOOLS,
    TOOLS_TEXT,
    URL,
    breaks_off,
    fails,
    holds,
    is_talk,
    run,
    same,
)

HEADERS = {"Authorization": f"Bearer {KEY}"}
HELLO = [{"role": "user", "content": "Hello"}]
DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
client = ollama.Client(URL, headers=HEADERS)


class City(BaseModel):
    name: str
    population: int


def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: Its name.
    """
    return f"sunny in {city}"


def talk_text() -> None:
    answer = client.chat(TALK, HELLO, options={"num_predict": 32, "temperature": 0}, keep_alive="5m")
    is_talk(answer.message.content)
    holds(answer.done and answer.done_reason in {"stop", "length"}, f"done_reason {answer.done_reason}")
    holds(answer.eval_count and answer.prompt_eval_count, "no counts")
    holds(answer.total_duration and answer.total_duration > 0, "no duration")


def talk_stream() -> None:
    parts = list(client.chat(f"{TALK}:latest", HELLO, stream=True, options={"num_predict": 32}))
    is_talk("".join(part.message.content for part in parts))
    same([part.done for part in parts[:-1]], [False] * (len(parts) - 1))
    holds(parts[-1].done and parts[-1].eval_count, "no end with counts")


def talk_tools() -> None:
    asked = client.chat(TOOLS, HELLO, tools=[get_weather])
    (call,) = asked.message.tool_calls
    same((call.function.name, dict(call.function.arguments)), ("get_weather", {"city": "Oslo"}))
    result = {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)}
    answer = client.chat(TOOLS, [*HELLO, asked.message, result], tools=[get_weather])
    same(answer.message.content, TOOLS_TEXT)


def talk_tool_stream() -> None:
    parts = list(client.chat(TOOLS, HELLO, tools=[get_weather], stream=True))
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    same([dict(call.function.arguments) for call in calls], [{"city": "Oslo"}])


def talk_structured() -> None:
    answer = client.chat(TALK, HELLO, format=City.model_json_schema())
    same(City.model_validate_json(answer.message.content), City(name="tok0", population=1))


def talk_thinking() -> None:
    answer = client.chat(THINK, HELLO, think=True)
    same((answer.message.thinking, answer.message.content), (THOUGHT, THINK_TEXT))
    parts = list(client.chat(THINK, HELLO, think=True, stream=True))
    same("".join(part.message.thinking or "" for part in parts), THOUGHT)


def talk_image() -> None:
    is_talk(client.chat(TALK, [{"role": "user", "content": "What is this?", "images": [DOT]}]).message.content)


async def talk_async() -> None:
    friend = ollama.AsyncClient(URL, headers=HEADERS)
    is_talk((await friend.chat(TALK, HELLO)).message.content)
    text = ""
    async for part in await friend.chat(TALK, HELLO, stream=True):
        text += part.message.content
    is_talk(text)
    same(len((await friend.embed(TALK, ["a", "b"])).embeddings), 2)


def talk_errors() -> None:
    missing = fails(lambda: client.chat(MISSING, HELLO), ollama.ResponseError)
    same(missing.status_code, 404)
    holds(MISSING in missing.error, missing.error)
    same(fails(lambda: list(client.chat(MISSING, HELLO, stream=True)), ollama.ResponseError).status_code, 404)


def talk_key() -> None:
    stranger = ollama.Client(URL, headers={"Authorization": "Bearer meant-to-fail"})
    same(fails(lambda: stranger.chat(TALK, HELLO), ollama.ResponseError).status_code, 401)


def talk_broken_stream() -> None:
    got = []

    def read() -> None:
        got.extend(client.chat(BROKEN, HELLO, stream=True))

    breaks_off(read, ollama.ResponseError)


def talk_cut_answer() -> None:
    breaks_off(lambda: list(client.chat(CUT, HELLO, stream=True)), ollama.ResponseError, words=CUT_WORDS)


def generate_text() -> None:
    is_talk(client.generate(TALK, "Hello", system="Be brief.").response)


def generate_thinking() -> None:
    answer = client.generate(THINK, "Hello", think=True)
    same((answer.thinking, answer.response), (THOUGHT, THINK_TEXT))


def generate_stream() -> None:
    is_talk("".join(part.response for part in client.generate(TALK, "Hello", stream=True)))


def generate_raw() -> None:
    is_talk(client.generate(TALK, "Once upon a time", raw=True, options={"num_predict": 32}).response)


def embed_vectors() -> None:
    one, two = client.embed(TALK, ["a cat", "a kitten"]).embeddings
    holds(abs(sum(value * value for value in one) - 1) < 1e-3, "not of length 1")
    same(len(one), len(two))
    same(len(client.embed(TALK, "a cat").embeddings), 1)


def embedone_vector() -> None:
    holds(client.embeddings(TALK, "a cat").embedding, "no vector")


def tags_list() -> None:
    found = {model.model: model for model in client.list().models}
    holds(TALK in found, f"{TALK} is not among {sorted(found)}")
    same(len(found[TALK].digest), 64)


def show_model() -> None:
    found = client.show(TALK)
    holds("completion" in found.capabilities, f"capabilities {found.capabilities}")
    architecture = found.modelinfo["general.architecture"]
    holds(found.modelinfo[f"{architecture}.context_length"] > 0, "no context")


def ps_list() -> None:
    client.chat(TALK, HELLO)
    holds(TALK in {model.model for model in client.ps().models}, "a model that has just answered is not in memory")


def talk_launched() -> None:
    """Without an address and a key of its own: with the variables of `weft launch ollama`."""
    os.environ |= launched("ollama", TALK)[1]
    is_talk(ollama.Client().chat(TALK, HELLO).message.content)


def pull_model() -> None:
    operator = ollama.Client(URL, headers={"Authorization": f"Bearer {OPERATOR_KEY}"})
    parts = list(operator.pull(PULLED, stream=True))
    same(parts[-1].status, "success")
    sizes = [(part.completed, part.total) for part in parts if part.total]
    same(sizes[-1], (PULLED_BYTES, PULLED_BYTES))
    same(operator.pull("small-of-the-library:q4").status, "success")


def pull_refused() -> None:
    # A key for the use of models pulls none.
    refused = fails(lambda: client.pull("hf:meant-to-fail/model"), ollama.ResponseError)
    same(refused.status_code, 403)
    holds("operations:create" in refused.error, refused.error)


run(globals())
