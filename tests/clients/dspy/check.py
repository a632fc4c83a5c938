"""DSPy: programs over language models. weft is declared as a provider that can call tools and follow schemas."""

import dspy
from dspy.lm15 import AccessPolicy, ModelSupport, OpenAIChatCompat, ProviderDefinition, register_provider
from dspy.utils.exceptions import LMError
from report import KEY, MISSING, TALK, TOOLS, V1, fails, holds, is_talk, run, same

register_provider(
    ProviderDefinition.chat(
        AccessPolicy(provider="weft", env_keys=("WEFT_API_KEY",), base_url=V1), compat=OpenAIChatCompat()
    ),
    supports=ModelSupport(function_calling=True, response_schema=True),
)


class Where(dspy.Signature):
    """Name a city."""

    question: str = dspy.InputField()
    city: str = dspy.OutputField()
    population: int = dspy.OutputField()


class Weather(dspy.Signature):
    """Answer with tools."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def model(name: str, provider: str = "weft", **options: object) -> dspy.LM:
    return dspy.LM(f"{provider}/{name}", api_base=V1, api_key=KEY, cache=False, max_tokens=64, **options)


def chat_text() -> None:
    is_talk(model(TALK)("Hello")[0])
    is_talk(model(TALK, provider="openai")("Hello")[0])


async def chat_stream() -> None:
    with dspy.context(lm=model(TALK), adapter=dspy.JSONAdapter()):
        program = dspy.streamify(dspy.Predict(Where))
        parts = [part async for part in program(question="Which city?")]
    holds(len(parts) > 2, f"it came in one piece: {parts}")
    same((parts[-1].city, parts[-1].population), ("tok0", 1))


def chat_structured() -> None:
    with dspy.context(lm=model(TALK), adapter=dspy.JSONAdapter()):
        answer = dspy.Predict(Where)(question="Which city?")
    same((answer.city, answer.population), ("tok0", 1))


def chat_tools() -> None:
    with dspy.context(lm=model(TOOLS), adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        calls = dspy.Predict(Weather)(question="Weather in Oslo?", tools=[dspy.Tool(get_weather)]).calls
    same([(call.name, call.args) for call in calls.tool_calls], [("get_weather", {"city": "Oslo"})])


def chat_errors() -> None:
    holds(MISSING in str(fails(lambda: model(MISSING)("Hello"), LMError)), "the error does not name the model")


def embeddings_vectors() -> None:
    vectors = dspy.Embedder(f"openai/{TALK}", api_base=V1, api_key=KEY, caching=False)(["a cat", "a kitten"])
    same(len(vectors), 2)
    holds(len(vectors[0]) > 1, "no vector")


run(globals())
