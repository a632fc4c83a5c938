"""anthropic for Python: the Messages API."""

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel
from report import (
    BROKEN,
    CUT,
    CUT_WORDS,
    KEY,
    MISSING,
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

client = anthropic.Anthropic(base_url=URL, api_key=KEY)
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class City(BaseModel):
    name: str
    population: int


def messages_text() -> None:
    answer = client.messages.create(model=TALK, max_tokens=32, system="Be brief.", messages=HELLO)
    is_talk(answer.content[0].text)
    holds(answer.stop_reason in {"end_turn", "max_tokens"}, f"stop_reason {answer.stop_reason}")
    holds(answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 0, "no usage")
    holds(answer._request_id, "no request id")


def messages_stream() -> None:
    with client.messages.stream(model=TALK, max_tokens=32, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    is_talk(text)
    same(final.content[0].text, text)
    holds(final.usage.output_tokens > 0, "no usage")


def messages_tools() -> None:
    asked = client.messages.create(model=TOOLS, max_tokens=64, messages=HELLO, tools=[WEATHER])
    same(asked.stop_reason, "tool_use")
    (call,) = [block for block in asked.content if block.type == "tool_use"]
    same((call.name, call.input), ("get_weather", {"city": "Oslo"}))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns = [*HELLO, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=TOOLS, max_tokens=64, messages=turns, tools=[WEATHER])
    same([block.text for block in answer.content], [TOOLS_TEXT])


def messages_tool_stream() -> None:
    with client.messages.stream(model=TOOLS, max_tokens=64, messages=HELLO, tools=[WEATHER]) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        final = stream.get_final_message()
    same(partial, '{"city": "Oslo"}')
    same([block.input for block in final.content if block.type == "tool_use"], [{"city": "Oslo"}])


def messages_runner() -> None:
    cities = []

    @beta_tool
    def get_weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Its name.
        """
        cities.append(city)
        return "sunny"

    runner = client.beta.messages.tool_runner(model=TOOLS, max_tokens=64, messages=HELLO, tools=[get_weather])
    same((runner.until_done().content[0].text, cities), (TOOLS_TEXT, ["Oslo"]))


def messages_structured() -> None:
    answer = client.messages.parse(model=TALK, max_tokens=64, messages=HELLO, output_format=City)
    same(answer.parsed_output, City(name="tok0", population=1))


def messages_thinking() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(model=THINK, max_tokens=2048, messages=HELLO, thinking=thinking) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    holds("thinking" in events, f"no thinking among {events}")
    same([block.type for block in final.content], ["thinking", "text"])
    same((final.content[0].thinking, final.content[1].text), (THOUGHT, THINK_TEXT))


def messages_count() -> None:
    holds(client.messages.count_tokens(model=TALK, messages=HELLO).input_tokens > 0, "no tokens")


def messages_errors() -> None:
    missing = fails(
        lambda: client.messages.create(model=MISSING, max_tokens=32, messages=HELLO), anthropic.NotFoundError
    )
    same((missing.body["type"], missing.body["error"]["type"]), ("error", "not_found_error"))
    holds(missing.request_id, "no request id")
    fails(
        lambda: client.messages.create(
            model=TALK,
            max_tokens=32,
            messages=HELLO,
            metadata={"user_id": "meant-to-fail"},
            extra_body={"temperature": "hot"},
        ),
        anthropic.BadRequestError,
    )


def messages_key() -> None:
    stranger = anthropic.Anthropic(base_url=URL, api_key="meant-to-fail")
    refused = fails(
        lambda: stranger.messages.create(model=TALK, max_tokens=32, messages=HELLO), anthropic.AuthenticationError
    )
    same(refused.body["error"]["type"], "authentication_error")


def messages_broken_stream() -> None:
    got = []

    def read() -> None:
        with client.messages.stream(model=BROKEN, max_tokens=128, messages=HELLO) as stream:
            got.extend(stream.text_stream)

    breaks_off(read, anthropic.APIError)
    holds(got, "nothing came before the failure")


def messages_cut_answer() -> None:
    def read() -> None:
        with client.messages.stream(model=CUT, max_tokens=128, messages=HELLO) as stream:
            stream.until_done()

    breaks_off(read, anthropic.APIError, words=CUT_WORDS)


def models_list() -> None:
    names = [model.id for model in client.models.list()]
    holds(TALK in names, f"the model is not among {names}")
    same(client.models.retrieve(TALK).id, TALK)


run(globals())
