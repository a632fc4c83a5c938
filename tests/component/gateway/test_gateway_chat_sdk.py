import pytest
from gateway_script import ScriptedDispatcher, Step, delta, finished, serving, usage
from openai import InternalServerError
from openai.types.chat import ChatCompletionMessageParam

from weft.api.common.v1 import chat_pb2, event_pb2
from weft.kernel.errors import WeftError
from weft.kernel.reasons import Reason
from weft.kernel.request import Operation, Priority

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello"}]


async def test_unary_chat_has_answer_usage_and_receipt() -> None:
    async with serving() as gateway:
        raw = await gateway.sdk.chat.completions.with_raw_response.create(model="chat", messages=MESSAGES)
        answer = raw.parse()
    assert answer.choices[0].message.content == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    facts = {name: value for name, value in raw.headers.items() if name.startswith("x-")}
    assert facts["x-queue-wait-ms"] == "150"
    assert facts["x-gpu-time-ms"] == "450"
    assert facts["x-cache-hit"] == "true"
    assert facts["x-cache-tokens-reused"] == "5"
    assert facts["x-request-id"].startswith("req-")


async def test_headers_and_body_reach_the_dispatcher_as_context_and_payload() -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving() as gateway:
        answer = await gateway.sdk.chat.completions.create(
            model="chat",
            messages=MESSAGES,
            temperature=0,
            max_completion_tokens=12,
            extra_headers={
                "X-Request-Id": "mine-1",
                "X-Tenant-ID": "acme",
                "X-Priority": "low",
                "traceparent": traceparent,
                "X-Request-Timeout-Seconds": "20",
            },
            extra_body={"allow_remote": True, "top_k": 40, "unheard_of": {"x": 1}},
        )
        assert answer._request_id == "mine-1"
        context, payload = gateway.dispatcher.contexts[0], gateway.dispatcher.payloads[0]
    assert (context.request_id, context.tenant, context.priority) == ("mine-1", "acme", Priority.LOW)
    assert (context.model, context.operation, context.allow_remote) == ("chat", Operation.CHAT, True)
    assert context.traceparent == traceparent
    assert context.timeout_seconds == 20
    assert isinstance(payload, chat_pb2.ChatPayload)
    assert payload.messages[0].content[0].text == "Say hello"
    assert payload.sampling.HasField("temperature")
    assert (payload.sampling.max_tokens, payload.sampling.top_k) == (12, 40)
    assert not payload.sampling.HasField("top_p")


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_include_bytes_and_alternatives(stream: bool) -> None:
    token = event_pb2.TokenLogprob(token="Hi", logprob=-0.5, raw_bytes=b"Hi")
    token.top.add(token="Yo", logprob=float("-inf"))
    steps: list[Step] = [[delta("Hi", logprobs=[token])], [delta(finish="STOP"), finished()]]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        if stream:
            async with gateway.sdk.chat.completions.stream(
                model="chat", messages=MESSAGES, logprobs=True, top_logprobs=1
            ) as events:
                answer = await events.get_final_completion()
        else:
            answer = await gateway.sdk.chat.completions.create(  # type: ignore[assignment]
                model="chat", messages=MESSAGES, logprobs=True, top_logprobs=1
            )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert (logprobs.content[0].token, logprobs.content[0].logprob, logprobs.content[0].bytes) == (
        "Hi",
        -0.5,
        [72, 105],
    )
    assert [(top.token, top.logprob, top.bytes) for top in logprobs.content[0].top_logprobs] == [("Yo", -9999.0, None)]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_returned_as_reasoning_content_and_counted(stream: bool) -> None:
    steps: list[Step] = [
        [delta(reasoning="Think")],
        [delta("Answer", finish="STOP"), usage(reasoning=2), finished()],
    ]
    async with serving(ScriptedDispatcher(steps)) as gateway:
        if stream:
            chunks = await gateway.sdk.chat.completions.create(
                model="chat", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
            )
            seen = [chunk async for chunk in chunks]
            reasoning = getattr(seen[1].choices[0].delta, "reasoning_content", None)
            counted = seen[-1].usage
        else:
            answer = await gateway.sdk.chat.completions.create(model="chat", messages=MESSAGES)
            reasoning = getattr(answer.choices[0].message, "reasoning_content", None)
            counted = answer.usage
    assert reasoning == "Think"
    assert counted is not None
    assert counted.completion_tokens_details is not None
    assert counted.completion_tokens_details.reasoning_tokens == 2


async def test_full_queue_returns_503_with_a_short_retry_after() -> None:
    rejection = WeftError(Reason.QUEUE_FULL, "the queue is full", retry_after_seconds=900)
    async with serving(ScriptedDispatcher([rejection])) as gateway:
        with pytest.raises(InternalServerError) as caught:
            await gateway.sdk.chat.completions.create(model="chat", messages=MESSAGES)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "60"
    assert caught.value.response.headers["x-should-retry"] == "true"
