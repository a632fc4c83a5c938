from gateway_script import serving
from openai.types.chat import ChatCompletionMessageParam

from weft.api.common.v1 import chat_pb2
from weft.kernel.requests.request_values import Operation, Priority

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello"}]


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
