"""Reranking, tokens, images and sound through the whole mesh, over HTTP and gRPC, from a server that offers them."""

import asyncio
import base64
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
from weft_testing.fake_backend.media_routes import PNG, WAVE_HEAD
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


def test_a_model_says_which_operations_it_offers(http: httpx2.Client) -> None:
    models = _offers(http)
    assert models["all"] == EVERYTHING
    assert models["plain"] == ["chat", "completion", "embedding"]
    assert models["ranker"] == ["rerank", "tokenize"]
    assert models["busy"] == ["chat", "completion", "embedding", "tokenize"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_ranked_the_best_first(http: httpx2.Client, path: str) -> None:
    documents = ["a dog", {"text": "a grey cat"}, "a cat"]
    asked = {"model": "all", "query": "grey cat", "documents": documents, "top_n": 2, "return_documents": True}
    answer = http.post(path, json=asked)
    assert answer.status_code == 200
    body = answer.json()
    assert body["model"] == "all"
    assert body["id"].startswith("rerank-")
    assert [(result["index"], result["document"]) for result in body["results"]] == [
        (1, {"text": "a grey cat"}),
        (2, {"text": "a cat"}),
    ]
    assert body["results"][0]["relevance_score"] > body["results"][1]["relevance_score"]
    assert body["usage"] == {"prompt_tokens": 13, "total_tokens": 13}
    assert answer.headers["x-left-premises"] == "false"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
def test_tokens_are_counted_in_either_servers_words(http: httpx2.Client, path: str) -> None:
    as_llama = http.post(path, json={"model": "all", "content": "one two", "with_pieces": True}).json()
    as_vllm = http.post(path, json={"model": "all", "prompt": "one two", "return_token_strs": True}).json()
    messages = [{"role": "user", "content": "one two"}]
    chat = http.post(path, json={"model": "all", "messages": messages}).json()
    assert [token["piece"] for token in as_llama["tokens"]] == as_vllm["token_strs"] == ["one", " two"]
    assert [token["id"] for token in as_llama["tokens"]] == as_vllm["tokens"]
    assert (as_llama["count"], as_vllm["count"], chat["count"]) == (2, 2, 4)
    assert as_vllm["max_model_len"] == 2048
    answered = http.post("/v1/chat/completions", json={"model": "all", "messages": messages}).json()
    assert answered["usage"]["prompt_tokens"] == chat["count"]


def test_a_server_that_weft_starts_ranks_where_its_flags_say_so(http: httpx2.Client) -> None:
    answer = http.post("/rerank", json={"model": "ranker", "query": "grey cat", "documents": DOCUMENTS})
    assert [result["index"] for result in answer.json()["results"]] == [1, 2, 0]


def test_tokens_are_counted_while_the_only_slot_is_busy(http: httpx2.Client, sdk: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "one two"}]
    stream = sdk.chat.completions.create(model="busy", messages=cast("Any", messages), stream=True)
    next(iter(stream))
    counted = http.post("/tokenize", json={"model": "busy", "messages": messages})
    assert (counted.status_code, counted.json()["count"]) == (200, 4)
    stream.close()


def test_images_are_made_from_words_and_from_images(sdk: openai.OpenAI) -> None:
    made = sdk.images.generate(model="all", prompt="a cat", n=2, size="1024x1024")
    edited = sdk.images.edit(model="all", prompt="a dog", image=("a.png", PNG, "image/png"))
    assert [base64.b64decode(image.b64_json or "") for image in made.data or ()] == [PNG, PNG]
    assert [image.revised_prompt for image in edited.data or ()] == ["a pixel of a dog"]


def test_a_recording_is_written_down_in_every_form(sdk: openai.OpenAI, http: httpx2.Client) -> None:
    sound = ("a.wav", b"0123456789", "audio/wav")
    whole = sdk.audio.transcriptions.create(model="all", file=sound)
    captions = sdk.audio.transcriptions.create(model="all", file=sound, response_format="srt")
    verbose = sdk.audio.transcriptions.create(model="all", file=sound, response_format="verbose_json", language="de")
    english = http.post("/v1/audio/translations", data={"model": "all"}, files={"file": sound}).json()
    assert whole.text == "10 bytes of sound"
    assert captions.startswith("1\n00:00:00,000 --> 00:00:01,000\n10\n\n2\n00:00:01,000 --> ")
    assert (verbose.language, verbose.duration, len(verbose.segments or ())) == ("de", 4.0, 4)
    assert english == {"text": "10 bytes in English"}


def test_words_are_spoken_as_bytes(sdk: openai.OpenAI) -> None:
    with sdk.audio.speech.with_streaming_response.create(model="all", input="one two", voice="alloy") as answer:
        sound = answer.read()
        assert answer.headers["content-type"] == "audio/wav"
    assert sound.startswith(WAVE_HEAD)
    assert len(sound) == len(WAVE_HEAD) + 8
    events = sdk.audio.speech.create(model="all", input="one two", voice="alloy", stream_format="sse").text
    assert events.count("speech.audio.delta") >= 1
    assert events.count("speech.audio.done") == 1


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/rerank", {"json": {"model": "plain", "query": "a", "documents": ["b"]}}),
    ("/tokenize", {"json": {"model": "plain", "content": "a"}}),
    ("/v1/images/generations", {"json": {"model": "plain", "prompt": "a"}}),
    ("/v1/images/edits", {"data": {"model": "plain", "prompt": "a"}, "files": {"image": ("a.png", PNG, "image/png")}}),
    ("/v1/images/variations", {"data": {"model": "all"}, "files": {"image": ("a.png", PNG, "image/png")}}),
    ("/v1/audio/transcriptions", {"data": {"model": "plain"}, "files": {"file": ("a.wav", b"0", "audio/wav")}}),
    ("/v1/audio/translations", {"data": {"model": "plain"}, "files": {"file": ("a.wav", b"0", "audio/wav")}}),
    ("/v1/audio/speech", {"json": {"model": "plain", "input": "a", "voice": "b"}}),
]


@pytest.mark.parametrize(("path", "asked"), ASKED, ids=[f"{place}{path}" for place, (path, _) in enumerate(ASKED)])
def test_what_no_runner_offers_is_a_clear_501(http: httpx2.Client, path: str, asked: dict[str, Any]) -> None:
    answer = http.post(path, **asked)
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert error["code"] == "unsupported_operation"
    assert answer.headers["x-should-retry"] == "false"
    if "variations" not in path:
        assert re.fullmatch(
            r"plain does not offer \w+; it offers chat, completion, embedding\. A runner .*", error["message"]
        )


def test_all_of_it_is_there_over_grpc_as_well(stub: "InferenceServiceStub") -> None:
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
