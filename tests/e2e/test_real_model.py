"""The whole mesh with a real language model on the real llama.cpp server: no fake anywhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from kit.demo_answers import WITHOUT_END
from mesh_process import MeshProcess, run_weft, running_mesh

from weft.client import Message, connect
from weft_app.compose.demo import DEMO_MODEL

pytestmark = pytest.mark.real

PROMPT: list[Message] = [{"role": "user", "content": "Write one sentence about the sea."}]
ENDLESS = {"ignore_eos": True}
"""A parameter of llama.cpp: an answer ends at its limit of tokens."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """`weft up` with nothing configured but its home and port."""
    with running_mesh(tmp_path_factory.mktemp("real") / "home", "--port", "0") as mesh:
        yield mesh


@pytest.fixture
def client(mesh: MeshProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def _ask(client: openai.OpenAI, **options: object) -> openai.types.chat.ChatCompletion:
    """An answer that ends at its limit alone, and is greedy where nothing else is said."""
    return client.chat.completions.create(  # type: ignore[call-overload,no-any-return]  # options are free here
        model=DEMO_MODEL, messages=PROMPT, **{"temperature": 0.0, "extra_body": WITHOUT_END, **options}
    )


def test_tokenize_matches_embedding_tokens_and_detokenizes_to_the_text(client: openai.OpenAI) -> None:
    text = "The sea is wide, and naïve foxes 🦊 swim in it."
    counted = client.post("/tokenize", cast_to=object, body={"model": DEMO_MODEL, "content": text, "with_pieces": True})
    assert isinstance(counted, dict)
    pieces = [
        piece.encode() if isinstance(piece := token["piece"], str) else bytes(piece) for token in counted["tokens"]
    ]
    assert b"".join(pieces).decode() == text
    vectors = client.embeddings.create(model=DEMO_MODEL, input=text)
    assert counted["count"] == vectors.usage.prompt_tokens


def test_stop_string_ends_the_answer_and_is_excluded(client: openai.OpenAI) -> None:
    only = {"grammar": 'root ::= "waves come and go"'}
    assert _ask(client, max_tokens=24, extra_body=only).choices[0].message.content == "waves come and go"
    stopped = _ask(client, max_tokens=24, extra_body=only, stop=["and"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("waves come ", "stop")


def test_logprobs_include_alternatives(client: openai.OpenAI) -> None:
    logprobs = _ask(client, max_tokens=4, logprobs=True, top_logprobs=3).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 3 for token in logprobs.content)


def test_json_schema_is_enforced(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    answer = _ask(
        client,
        max_tokens=512,
        extra_body=None,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    document = json.loads(answer.choices[0].message.content or "")
    assert list(document) == ["name", "age"], "members come in schema order"
    assert isinstance(document["age"], int)


def test_grpc_client_calls_the_inference_service_directly(mesh: MeshProcess) -> None:
    with connect(mesh.grpc) as client:
        events = list(client.chat(DEMO_MODEL, PROMPT, max_tokens=16, timeout=60.0, extra_parameters=ENDLESS))
        vectors = client.embed(DEMO_MODEL, ["a", "b"], timeout=60.0)
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds.count("finished") == 1
    assert kinds[-1] == "finished"
    receipt = events[-1].finished.receipt
    assert receipt.usage.completion_tokens == 16
    assert re.fullmatch(r"sha256:[0-9a-f]{64}", receipt.model_digest)
    assert receipt.tokens_per_second > 0
    assert not receipt.HasField("gpu_time"), "no accelerator has computed it"
    assert receipt.host
    assert not receipt.left_premises
    assert [len(vector) for vector in vectors] == [576, 576]


async def test_demo_command_starts_chats_and_stops(tmp_path: Path) -> None:
    code, out, err = await run_weft("mesh", "demo", "--max-tokens", "8", home=tmp_path)
    assert code == 0, err
    assert "ok: up, chat, down" in out
