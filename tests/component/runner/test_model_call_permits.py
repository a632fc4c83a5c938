"""Calls of requests are served on streams only, and need a permit of the router."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from kit.fake_backend import run_fake_backend
from runner_harness import running_runner

from weft.api.common.v1 import audio_pb2, chat_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.api.runner.v1 import model_call_service_pb2 as pb
from weft.dispatch.operation_table import OPERATIONS
from weft.kernel.channels.rpc import open_channel
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.served_models import served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner
from weft_testing.carried import CarriedStub

REQUESTS: list[tuple[str, Any]] = [
    ("Rerank", pb.RerankRequest(payload=rerank_pb2.RerankPayload(query="a", documents=["b"]))),
    ("Tokenize", pb.TokenizeRequest(payload=tokenize_pb2.TokenizePayload(text="a"))),
    ("StreamImages", pb.StreamImagesRequest(payload=image_pb2.ImagePayload(prompt="a"))),
    (
        "StreamTranscription",
        pb.StreamTranscriptionRequest(payload=audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=b"a"))),
    ),
    ("Speak", pb.SpeakRequest(payload=audio_pb2.SpeechPayload(input="a", voice="b"))),
]


@pytest.mark.parametrize(("method", "request_"), REQUESTS, ids=[method for method, _ in REQUESTS])
async def test_call_without_a_permit_is_rejected(method: str, request_: Any, tmp_path: Path) -> None:
    async with run_fake_backend("--reranking", "--offers", "image,transcription,speech") as fake:
        offered = ["rerank", "tokenize", "image", "transcription", "speech"]
        model = {"name": "m", "url": f"{fake.base_url}/v1", "operations": offered}
        section = parse_section(ConfiguredRunner, {"name": "r1", "runtime": "openai_http", "models": [model]})
        async with (
            running_runner(tmp_path, [served_model(section, section.models[0], 1.0)]),
            open_channel(f"unix:{tmp_path}/runner.sock") as channel,
        ):
            call = getattr(CarriedStub(channel, pb), method)(request_, timeout=10)
            with pytest.raises(WeftError) as refused:
                await call.read()
    assert refused.value.reason is Reason.TICKET_INVALID


async def test_separate_grpc_call_of_a_request_is_unimplemented(tmp_path: Path) -> None:
    async with running_runner(tmp_path, []), open_channel(f"unix:{tmp_path}/runner.sock") as channel:
        for spec in OPERATIONS.values():
            rpc: Any = channel.unary_stream(spec.runner_rpc.path)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await rpc(b"", timeout=10).read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
