"""LlamaIndex through its OpenAI-like classes: chat, legacy completions and embeddings."""

import openai
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from report import BROKEN, KEY, MISSING, TALK, TOOLS, V1, breaks_off, fails, holds, is_talk, run, same


class City(BaseModel):
    """A city."""

    name: str
    population: int


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def model(name: str, **options: object) -> OpenAILike:
    settings = {"is_chat_model": True, "max_tokens": 32, "context_window": 4096, **options}
    return OpenAILike(model=name, api_base=V1, api_key=KEY, **settings)


HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello")]


def chat_text() -> None:
    is_talk(model(TALK).chat(HELLO).message.content)


def chat_stream() -> None:
    is_talk("".join(part.delta for part in model(TALK).stream_chat(HELLO)))


def chat_tools() -> None:
    speaker = model(TOOLS, is_function_calling_model=True)
    tools = [FunctionTool.from_defaults(get_weather)]
    asked = speaker.chat_with_tools(tools, user_msg="How is the weather in Oslo?")
    calls = speaker.get_tool_calls_from_response(asked)
    same([(call.tool_name, call.tool_kwargs) for call in calls], [("get_weather", {"city": "Oslo"})])


def chat_structured() -> None:
    answer = model(TALK, should_use_structured_outputs=True).as_structured_llm(City).complete("Which city?")
    holds(isinstance(answer.raw, City), f"not a City: {answer}")


def chat_errors() -> None:
    fails(lambda: model(MISSING).chat(HELLO), openai.NotFoundError)


def chat_broken_stream() -> None:
    got = []

    def read() -> None:
        got.extend(model(BROKEN, max_tokens=64).stream_chat(HELLO))

    breaks_off(read, openai.APIError)
    holds(got, "nothing came before the failure")


def completions_text() -> None:
    legacy = model(TALK, is_chat_model=False)
    is_talk(legacy.complete("Once").text)
    is_talk("".join(part.delta for part in legacy.stream_complete("Once")))


def embeddings_vectors() -> None:
    embedder = OpenAILikeEmbedding(model_name=TALK, api_base=V1, api_key=KEY)
    vectors = embedder.get_text_embedding_batch(["a cat", "a kitten"])
    same(len(vectors), 2)
    holds(len(vectors[0]) > 1, "no vector")


run(globals())
