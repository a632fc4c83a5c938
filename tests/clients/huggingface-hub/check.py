"""The InferenceClient of huggingface_hub with a base URL of its own."""

from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, UnknownError
from report import BROKEN, KEY, MISSING, TALK, TOOLS, TOOLS_TEXT, V1, breaks_off, fails, holds, is_talk, run, same

client = InferenceClient(base_url=V1, api_key=KEY)
HELLO = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def chat_text() -> None:
    answer = client.chat.completions.create(model=TALK, messages=HELLO, max_tokens=32)
    is_talk(answer.choices[0].message.content)
    holds(answer.usage.completion_tokens > 0, "no usage")


def chat_stream() -> None:
    chunks = client.chat.completions.create(model=TALK, messages=HELLO, max_tokens=32, stream=True)
    is_talk("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def chat_tools() -> None:
    message = client.chat_completion(HELLO, model=TOOLS, tools=[WEATHER], tool_choice="auto").choices[0].message
    (call,) = message.tool_calls
    same((call.function.name, call.function.arguments), ("get_weather", '{"city": "Oslo"}'))
    asked = {"role": "assistant", "content": "", "tool_calls": [dict(call)]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    answer = client.chat_completion([*HELLO, asked, result], model=TOOLS, tools=[WEATHER])
    same(answer.choices[0].message.content, TOOLS_TEXT)


def chat_structured() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    answer = client.chat_completion(HELLO, model=TALK, response_format=wanted)
    same(answer.choices[0].message.content, '{"name":"tok0"}')


def chat_errors() -> None:
    error = fails(lambda: client.chat_completion(HELLO, model=MISSING), HfHubHTTPError)
    same(error.response.status_code, 404)


def chat_broken_stream() -> None:
    got = []

    def read() -> None:
        got.extend(client.chat_completion(HELLO, model=BROKEN, stream=True))

    breaks_off(read, UnknownError)
    holds(got, "nothing came before the failure")


run(globals())
