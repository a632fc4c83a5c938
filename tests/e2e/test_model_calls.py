"""Reranking, tokens, images and sound through the whole mesh, over HTTP and gRPC, from a server that offers them."""

import asyncio
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import grpc
import httpx2
import openai
import pytest
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft.api.common.v1 import audio_pb2, chat_pb2, image_pb2, rerank_pb2, tokenize_pb2
from weft.api.router.v1 import inference_service_pb2 as pb
from weft.api.router.v1 import inference_service_pb2_grpc
from weft_testing.fake_backend.media_routes import WAVE_HEAD
from weft_testing.fake_backend.process import fake_backend_command

if TYPE_CHECKING:
    from weft.api.router.v1.inference_service_pb2_grpc import InferenceServiceStub

DOCUMENTS = ["a dog", "a grey cat", "a cat"]
MODELS = {"all", "plain", "ranker", "busy"}
EVERYTHING = ["chat", "rerank", "tokenize", "image", "transcription", "speech"]


@contextmanager
def _fake(*flags: str) -> Iterator[str]:
    command = fake_backend_command("--die-with-parent", *flags)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        try:
            found = next(found for line in process.stdout if (found := re.search(r"listening on (http://\S+)", line)))
            yield found[1]
        finally:
            process.kill()


def _offers(client: httpx2.Client) -> dict[str, list[str]]:
    return {model["id"]: model["meta"]["operations"] for model in client.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """One runner over a server that offers everything, and one that offers only what is usual."""
    folder = tmp_path_factory.mktemp("calls")
    with (
        _fake("--reranking", "--offers", "image,transcription,speech", "--speaks-vllm") as everything,
        _fake() as plain,
    ):
        models = [
            {"name": "all", "url": f"{everything}/v1", "operations": EVERYTHING, "context_tokens": 4096},
            {"name": "plain", "url": f"{plain}/v1"},
        ]
        ranker = fake_runner("one", pool="ranker")
        ranker["models"][0]["extra_arguments"] = ["--reranking"]
        busy = fake_runner("two", slots=1, pool="busy", answer_tokens=0, tokens_per_second=20)
        attached = {"name": "attached", "runtime": "openai_http", "models": models}
        config = write_config(folder, attached, ranker, busy)
        with running_mesh(folder / "home", "--config", str(config)) as mesh:
            with httpx2.Client(base_url=mesh.url) as client:
                asyncio.run(eventually(lambda: _offers(client).keys() >= MODELS, 20, "a model is missing"))
            yield mesh


@pytest.fixture
def http(mesh: MeshProcess) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=mesh.url, timeout=30) as client:
        yield client


@pytest.fixture
def sdk(mesh: MeshProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def stub(mesh: MeshProcess) -> Iterator["InferenceServiceStub"]:
    with grpc.insecure_channel(mesh.grpc) as channel:
        yield inference_service_pb2_grpc.InferenceServiceStub(channel)


def test_model_lists_its_operations(http: httpx2.Client) -> None:
    models = _offers(http)
    assert models["all"] == EVERYTHING
    assert models["plain"] == ["chat", "completion", "embedding"]
    assert models["ranker"] == ["rerank", "tokenize"]
    assert models["busy"] == ["chat", "completion", "embedding", "tokenize"]


def test_managed_server_reranks_if_its_flags_enable_it(http: httpx2.Client) -> None:
    answer = http.post("/rerank", json={"model": "ranker", "query": "grey cat", "documents": DOCUMENTS})
    assert [result["index"] for result in answer.json()["results"]] == [1, 2, 0]


def test_tokens_are_counted_while_the_only_slot_is_busy(http: httpx2.Client, sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "one two"}]
    stream = sdk.chat.completions.create(model="busy", messages=cast("Any", messages), stream=True)
    next(iter(stream))
    counted = http.post("/tokenize", json={"model": "busy", "messages": messages})
    assert (counted.status_code, counted.json()["count"]) == (200, 4)
    stream.close()


def test_grpc_supports_rerank_tokenize_images_and_audio(stub: "InferenceServiceStub") -> None:
    ranked = stub.Rerank(
        pb.RerankRequest(model="all", payload=rerank_pb2.RerankPayload(query="grey cat", documents=DOCUMENTS)),
        timeout=10,
    )
    counted = stub.Tokenize(
        pb.TokenizeRequest(model="all", payload=tokenize_pb2.TokenizePayload(text="one two")), timeout=10
    )
    made = stub.GenerateImages(
        pb.GenerateImagesRequest(model="all", payload=image_pb2.ImagePayload(prompt="a cat")), timeout=10
    )
    heard = stub.Transcribe(
        pb.TranscribeRequest(
            model="all",
            payload=audio_pb2.TranscriptionPayload(audio=chat_pb2.MediaPart(data=b"0", media_type="audio/wav")),
        ),
        timeout=10,
    )
    spoken = list(
        stub.Speak(pb.SpeakRequest(model="all", payload=audio_pb2.SpeechPayload(input="a", voice="b")), timeout=10)
    )
    assert [score.index for score in ranked.scores] == [1, 2, 0]
    assert (counted.result.count, counted.receipt.usage.prompt_tokens) == (2, 0)
    assert [image.image.media_type for image in made.images] == ["image/png"]
    assert heard.transcription.text == "1 bytes of sound"
    assert (spoken[0].media_type, spoken[-1].receipt.model) == ("audio/wav", "all")
    assert b"".join(piece.data for piece in spoken).startswith(WAVE_HEAD)
