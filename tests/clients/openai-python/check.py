"""openai for Python: the client most others are built on."""

import asyncio
import base64
import struct
from typing import Literal

import openai
from pydantic import BaseModel
from report import (
    BROKEN,
    BROKEN_PAINTER,
    CUT,
    CUT_WORDS,
    EARS,
    KEY,
    MISSING,
    PAINTER,
    TALK,
    TALK_TEXT,
    TEXT_ONLY,
    THINK,
    THINK_TEXT,
    THOUGHT,
    TOOLS,
    TOOLS_TEXT,
    V1,
    VOICE,
    breaks_off,
    fails,
    holds,
    is_talk,
    run,
    same,
)

client = openai.OpenAI(base_url=V1, api_key=KEY)
HELLO = [{"role": "user", "content": "Hello"}]
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}


class City(BaseModel):
    name: str
    size: Literal["small", "large"]
    population: int


def chat_text() -> None:
    raw = client.chat.completions.with_raw_response.create(model=TALK, messages=HELLO, max_tokens=32)
    answer = raw.parse()
    is_talk(answer.choices[0].message.content)
    holds(answer.choices[0].finish_reason in {"stop", "length"}, f"finish {answer.choices[0].finish_reason}")
    same(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens)
    holds(answer.usage.prompt_tokens_details.cached_tokens is not None, "no cached_tokens")
    holds(raw.headers["x-request-id"], "no request id")


def chat_stream() -> None:
    with client.chat.completions.stream(
        model=TALK, messages=HELLO, max_tokens=32, stream_options={"include_usage": True}
    ) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        # Not get_final_completion(): it raises where the answer came to its limit, as a real model's may.
        final = stream.current_completion_snapshot
    is_talk(deltas)
    same(final.choices[0].message.content, deltas)
    holds(final.usage.completion_tokens > 0, "no usage")


def chat_several() -> None:
    with client.chat.completions.stream(
        model=TALK, messages=HELLO, n=2, logprobs=True, top_logprobs=2, stop=["tok3"]
    ) as stream:
        for _ in stream:
            pass
        choices = stream.get_final_completion().choices
    same([choice.message.content for choice in choices], ["tok0 tok1 tok2 ", "tok0 tok1 tok2 "])
    holds(all(choice.logprobs.content for choice in choices), "no logprobs")


def chat_tools() -> None:
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    asked = client.chat.completions.create(model=TOOLS, messages=messages, tools=[WEATHER], tool_choice="auto")
    message = asked.choices[0].message
    same(asked.choices[0].finish_reason, "tool_calls")
    (call,) = message.tool_calls
    same((call.function.name, call.function.arguments), ("get_weather", '{"city": "Oslo"}'))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(model=TOOLS, messages=messages, tools=[WEATHER])
    same(answer.choices[0].message.content, TOOLS_TEXT)


def chat_tool_stream() -> None:
    with client.chat.completions.stream(model=TOOLS, messages=HELLO, tools=[WEATHER]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    same([(event.name, event.parsed_arguments) for event in done], [("get_weather", {"city": "Oslo"})])
    same(message.tool_calls[0].function.parsed_arguments, {"city": "Oslo"})


def chat_structured() -> None:
    answer = client.chat.completions.parse(model=TALK, messages=HELLO, response_format=City)
    holds(isinstance(answer.choices[0].message.parsed, City), f"not a City: {answer.choices[0].message}")


def chat_reasoning() -> None:
    message = client.chat.completions.create(model=THINK, messages=HELLO, reasoning_effort="low").choices[0].message
    same((message.reasoning_content, message.content), (THOUGHT, THINK_TEXT))


def chat_async() -> None:
    async def several() -> list[str]:
        async with openai.AsyncOpenAI(base_url=V1, api_key=KEY) as aio:
            answers = await asyncio.gather(
                *(aio.chat.completions.create(model=TALK, messages=HELLO, max_tokens=32) for _ in range(8))
            )
        return [answer.choices[0].message.content for answer in answers]

    for text in asyncio.run(several()):
        is_talk(text)


def chat_errors() -> None:
    missing = fails(lambda: client.chat.completions.create(model=MISSING, messages=HELLO), openai.NotFoundError)
    same(missing.code, "model_not_found")
    holds(missing.request_id, "no request id")
    wrong = fails(
        lambda: client.chat.completions.create(model=TALK, messages=HELLO, temperature="hot", user="meant-to-fail"),
        openai.BadRequestError,
    )
    same(wrong.param, "temperature")


def chat_key() -> None:
    stranger = openai.OpenAI(base_url=V1, api_key="meant-to-fail")
    refused = fails(lambda: stranger.chat.completions.create(model=TALK, messages=HELLO), openai.AuthenticationError)
    same(refused.code, "invalid_api_key")


def chat_image() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    is_talk(
        client.chat.completions.create(model=TALK, messages=[{"role": "user", "content": parts}], max_tokens=32)
        .choices[0]
        .message.content
    )


def chat_broken_stream() -> None:
    got = []

    def read() -> None:
        for chunk in client.chat.completions.create(model=BROKEN, messages=HELLO, stream=True):
            got.extend(choice.delta.content for choice in chunk.choices if choice.delta.content)

    breaks_off(read, openai.APIError)
    holds(got, "nothing came before the failure")


def chat_cut_answer() -> None:
    def read() -> None:
        for _ in client.chat.completions.create(model=CUT, messages=HELLO, stream=True):
            pass

    breaks_off(read, openai.APIError, words=CUT_WORDS)
    whole = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
    breaks_off(
        lambda: whole.chat.completions.create(model=CUT, messages=HELLO), openai.InternalServerError, words=CUT_WORDS
    )


def chat_refused_image() -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": PIXEL}}]
    messages = [{"role": "user", "content": parts}]
    refused = fails(
        lambda: client.chat.completions.create(model=TEXT_ONLY, messages=messages, max_tokens=32),
        openai.BadRequestError,
    )
    holds("image input is not supported" in str(refused), f"it does not say why: {refused}")


def completions_text() -> None:
    answer = client.completions.create(model=TALK, prompt="Once", max_tokens=32)
    is_talk(answer.choices[0].text)
    chunks = client.completions.create(model=TALK, prompt="Once", max_tokens=32, stream=True)
    is_talk("".join(chunk.choices[0].text for chunk in chunks if chunk.choices))


def embeddings_vectors() -> None:
    texts = ["a cat", "a kitten"]
    packed = client.embeddings.create(model=TALK, input=texts).data
    floats = client.embeddings.create(model=TALK, input=texts, encoding_format="float").data
    holds(len(packed) == len(floats) == 2 and len(packed[0].embedding) > 1, "wrong number of vectors")
    single = [struct.unpack("<f", struct.pack("<f", value))[0] for value in floats[0].embedding]
    same(packed[0].embedding, single)
    text = client.embeddings.create(model=TALK, input="a cat", encoding_format="base64").data[0].embedding
    same(len(base64.b64decode(text)), 4 * len(single))


def responses_text() -> None:
    answer = client.responses.create(model=TALK, input="Hello", instructions="Be brief.", max_output_tokens=32)
    is_talk(answer.output_text)
    same(answer.status, "completed" if TALK_TEXT else answer.status)
    same(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens)
    holds(answer._request_id, "no request id")


def responses_stream() -> None:
    with client.responses.stream(model=TALK, input="Hello", max_output_tokens=32) as stream:
        events = list(stream)
        final = stream.get_final_response()
    is_talk("".join(event.delta for event in events if event.type == "response.output_text.delta"))
    is_talk(final.output_text)
    same([event.sequence_number for event in events], list(range(len(events))))
    same([events[0].type, events[1].type], ["response.created", "response.in_progress"])


def responses_tools() -> None:
    tool = {"type": "function", **WEATHER["function"]}
    question = [{"role": "user", "content": "How is the weather in Oslo?"}]
    asked = client.responses.create(model=TOOLS, input=question, tools=[tool])
    (call,) = [item for item in asked.output if item.type == "function_call"]
    same((call.name, call.arguments), ("get_weather", '{"city": "Oslo"}'))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = client.responses.create(model=TOOLS, input=[*question, *asked.output, result], tools=[tool])
    same(answer.output_text, TOOLS_TEXT)


def responses_tool_stream() -> None:
    tool = {"type": "function", **WEATHER["function"]}
    with client.responses.stream(model=TOOLS, input="How is the weather in Oslo?", tools=[tool]) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
        (call,) = stream.get_final_response().output
    same([event.arguments for event in done], ['{"city": "Oslo"}'])
    same(call.parsed_arguments, {"city": "Oslo"})


def responses_stored() -> None:
    tool = {"type": "function", **WEATHER["function"]}
    first = client.responses.create(model=TOOLS, input="How is the weather in Oslo?", tools=[tool])
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "sunny"}
    second = client.responses.create(model=TOOLS, input=[result], tools=[tool], previous_response_id=first.id)
    same((second.output_text, second.previous_response_id), (TOOLS_TEXT, first.id))
    same(client.responses.retrieve(second.id).output_text, TOOLS_TEXT)
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    holds(kinds[-1] == "function_call_output", f"its input was {kinds}")
    client.responses.delete(second.id)
    fails(lambda: client.responses.retrieve(second.id, extra_query={"why": "meant-to-fail"}), openai.NotFoundError)


def responses_conversation() -> None:
    made = client.conversations.create(items=HELLO, metadata={"kind": "check"})
    client.responses.create(model=TALK, input="And now?", conversation=made.id, max_output_tokens=32)
    same(
        [item.role for item in client.conversations.items.list(made.id, order="asc", limit=1)],
        ["user", "user", "assistant"],
    )
    client.conversations.delete(made.id)
    fails(lambda: client.conversations.retrieve(made.id, extra_query={"why": "meant-to-fail"}), openai.NotFoundError)


def responses_structured() -> None:
    answer = client.responses.parse(model=TALK, input="Which city?", text_format=City)
    same(answer.output_parsed, City(name="tok0", size="small", population=1))


def responses_reasoning() -> None:
    with client.responses.stream(model=THINK, input="Six times seven?", reasoning={"effort": "low"}) as stream:
        thought = "".join(event.delta for event in stream if event.type == "response.reasoning_text.delta")
        final = stream.get_final_response()
    same((thought, final.output_text), (THOUGHT, THINK_TEXT))
    same([item.type for item in final.output], ["reasoning", "message"])


def responses_errors() -> None:
    missing = fails(lambda: client.responses.create(model=MISSING, input="Hello"), openai.NotFoundError)
    same(missing.code, "model_not_found")
    holds(missing.request_id, "no request id")


def responses_broken_stream() -> None:
    events = []

    def read() -> None:
        with client.responses.stream(model=BROKEN, input="Hello") as stream:
            for event in stream:
                events.append(event)
                if event.type == "response.failed":
                    raise ValueError(event.response.error.message)

    breaks_off(read, ValueError, openai.APIError)
    holds(any(event.type == "response.output_text.delta" for event in events), "nothing came before the failure")


def responses_cut_answer() -> None:
    def read() -> None:
        with client.responses.stream(model=CUT, input="Hello") as stream:
            for event in stream:
                if event.type == "response.failed":
                    raise ValueError(event.response.error.message)

    breaks_off(read, ValueError, openai.APIError, words=CUT_WORDS)


PNG = base64.b64decode(PIXEL.partition(",")[2])
SOUND = ("talk.wav", b"0123456789", "audio/wav")


def is_picture(text: str | None) -> None:
    holds(text and base64.b64decode(text).startswith(b"\x89PNG"), "no image")


def images_several() -> None:
    answer = client.images.generate(
        model=PAINTER, prompt="a cat", n=2, size="1024x1024", output_format="png", quality="high",
        extra_body={"seed": 7, "steps": 4, "negative_prompt": "dogs"},
    )  # fmt: skip
    same(len(answer.data), 2)
    for image in answer.data:
        is_picture(image.b64_json)
    same((answer.size, answer.output_format, answer.quality), ("1x1", "png", "high"))
    holds(answer.usage.input_tokens > 0, "no usage")


def images_stream() -> None:
    stream = client.images.generate(model=PAINTER, prompt="a cat", stream=True, partial_images=2)
    events = list(stream)
    same([type(event).__name__ for event in events], ["ImageGenPartialImageEvent"] * 2 + ["ImageGenCompletedEvent"])
    same([event.partial_image_index for event in events[:2]], [0, 1])
    for event in events:
        is_picture(event.b64_json)
    holds(events[-1].usage.input_tokens > 0, "no usage")


def images_errors() -> None:
    missing = fails(lambda: client.images.generate(model=MISSING, prompt="a cat"), openai.NotFoundError)
    same(missing.code, "model_not_found")
    wrong = fails(
        lambda: client.images.generate(model=PAINTER, prompt="a cat", size="meant-to-fail"), openai.BadRequestError
    )
    same(wrong.param, "size")


def images_broken_stream() -> None:
    got = []

    def read() -> None:
        stream = client.images.generate(model=BROKEN_PAINTER, prompt="a", stream=True, partial_images=2)
        got.extend(event.type for event in stream)

    breaks_off(read, openai.APIError)
    same(got, ["image_generation.partial_image"])


def edits_files() -> None:
    image = ("cat.png", PNG, "image/png")
    answer = client.images.edit(model=PAINTER, prompt="a hat", image=[image, image], mask=image)
    is_picture(answer.data[0].b64_json)


def edits_stream() -> None:
    image = ("cat.png", PNG, "image/png")
    events = list(client.images.edit(model=PAINTER, prompt="a hat", image=image, stream=True, partial_images=1))
    same([event.type for event in events], ["image_edit.partial_image", "image_edit.completed"])
    is_picture(events[-1].b64_json)


def transcriptions_text() -> None:
    same(client.audio.transcriptions.create(model=EARS, file=SOUND).text, "10 bytes of sound")
    text = client.audio.transcriptions.create(model=EARS, file=SOUND, response_format="text")
    same(text.strip(), "10 bytes of sound")


def transcriptions_words() -> None:
    answer = client.audio.transcriptions.create(
        model=EARS,
        file=SOUND,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
        language="en",
    )
    same([word.word for word in answer.words], ["10", "bytes", "of", "sound"])
    same((answer.words[1].start, answer.segments[1].end, answer.duration), (1.0, 2.0, 4.0))


def transcriptions_captions() -> None:
    captions = client.audio.transcriptions.create(model=EARS, file=SOUND, response_format="srt")
    holds(captions.startswith("1\n00:00:00,000 --> 00:00:01,000\n"), f"captions {captions!r}")


def transcriptions_stream() -> None:
    events = list(client.audio.transcriptions.create(model=EARS, file=SOUND, stream=True))
    same("".join(event.delta for event in events if event.type == "transcript.text.delta"), "10 bytes of sound")
    same((events[-1].type, events[-1].text), ("transcript.text.done", "10 bytes of sound"))


def translations_text() -> None:
    same(client.audio.translations.create(model=EARS, file=SOUND).text, "10 bytes in English")


def speech_bytes() -> None:
    sound = client.audio.speech.create(model=VOICE, input="one two", voice="alloy", response_format="wav")
    holds(sound.content.startswith(b"RIFF"), "no recording")


def speech_stream() -> None:
    speaking = client.audio.speech.with_streaming_response
    with speaking.create(model=VOICE, input="one two", voice="alloy", speed=1.5) as answer:
        same(answer.headers["content-type"], "audio/wav")
        holds(b"".join(answer.iter_bytes()).startswith(b"RIFF"), "no recording")


def models_list() -> None:
    holds(TALK in [model.id for model in client.models.list()], "the model is not listed")
    same(client.models.retrieve(TALK).id, TALK)


run(globals())
