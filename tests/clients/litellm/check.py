"""LiteLLM: one call for every provider; weft is its `openai/` and its `anthropic/` provider."""

import litellm
from pydantic import BaseModel
from report import (
    BROKEN,
    KEY,
    MISSING,
    TALK,
    THINK,
    THINK_TEXT,
    THOUGHT,
    TOOLS,
    TOOLS_TEXT,
    URL,
    V1,
    breaks_off,
    fails,
    holds,
    is_talk,
    run,
    same,
)

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


class City(BaseModel):
    name: str
    population: int


def ask(model: str, messages: list = HELLO, **options: object) -> object:
    return litellm.completion(model=f"openai/{model}", api_base=V1, api_key=KEY, messages=messages, **options)


def chat_text() -> None:
    answer = ask(TALK, max_tokens=32)
    is_talk(answer.choices[0].message.content)
    holds(answer.usage.completion_tokens > 0, "no usage")


def chat_stream() -> None:
    chunks = list(ask(TALK, max_tokens=32, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    is_talk(whole.choices[0].message.content)
    holds(whole.usage.completion_tokens > 0, "no usage")


def chat_tools() -> None:
    message = ask(TOOLS, tools=[WEATHER], tool_choice="auto").choices[0].message
    (call,) = message.tool_calls
    same((call.function.name, call.function.arguments), ("get_weather", '{"city": "Oslo"}'))
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": "sunny"}
    answer = ask(TOOLS, [*HELLO, message.model_dump(), result], tools=[WEATHER])
    same(answer.choices[0].message.content, TOOLS_TEXT)


def chat_tool_stream() -> None:
    whole = litellm.stream_chunk_builder(list(ask(TOOLS, tools=[WEATHER], stream=True)))
    (call,) = whole.choices[0].message.tool_calls
    same((call.function.name, call.function.arguments), ("get_weather", '{"city": "Oslo"}'))


def chat_structured() -> None:
    City.model_validate_json(ask(TALK, response_format=City).choices[0].message.content)


def chat_reasoning() -> None:
    message = ask(THINK).choices[0].message
    same((message.reasoning_content, message.content), (THOUGHT, THINK_TEXT))


def chat_errors() -> None:
    fails(lambda: ask(MISSING), litellm.NotFoundError)
    fails(lambda: ask(TALK, top_p=7, extra_body={"metadata": {"why": "meant-to-fail"}}), litellm.BadRequestError)


def chat_broken_stream() -> None:
    got = []

    def read() -> None:
        got.extend(ask(BROKEN, stream=True))

    breaks_off(read, litellm.exceptions.APIError, litellm.exceptions.MidStreamFallbackError)
    holds(got, "nothing came before the failure")


def completions_text() -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{TALK}", api_base=V1, api_key=KEY, prompt="Once", max_tokens=32
    )
    is_talk(answer.choices[0].text)


def messages_text() -> None:
    answer = litellm.completion(model=f"anthropic/{TALK}", api_base=URL, api_key=KEY, messages=HELLO, max_tokens=32)
    is_talk(answer.choices[0].message.content)


def messages_stream() -> None:
    chunks = litellm.completion(
        model=f"anthropic/{TOOLS}",
        api_base=URL,
        api_key=KEY,
        messages=HELLO,
        tools=[WEATHER],
        max_tokens=64,
        stream=True,
    )
    (call,) = litellm.stream_chunk_builder(list(chunks)).choices[0].message.tool_calls
    same((call.function.name, call.function.arguments), ("get_weather", '{"city": "Oslo"}'))


def embeddings_vectors() -> None:
    answer = litellm.embedding(model=f"openai/{TALK}", api_base=V1, api_key=KEY, input=["a cat", "a kitten"])
    same(len(answer.data), 2)
    holds(len(answer.data[0]["embedding"]) > 1, "no vector")


run(globals())
