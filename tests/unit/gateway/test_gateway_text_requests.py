"""Legacy completions and embeddings: prompts in all their forms."""

import json

import pytest

from gateway.gateway_config import RequestLimits
from gateway.intake.json_guard import parse
from gateway.openai import completions as completion_payload
from gateway.openai import embeddings as embedding_payload
from gateway.openai.completions import CompletionRequest
from gateway.openai.embeddings import EmbeddingRequest
from weft.api.common.v1 import completion_pb2, embedding_pb2, usage_pb2
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason

LIMITS = RequestLimits()


def completion_of(**fields: object) -> completion_pb2.CompletionPayload:
    raw = json.dumps({"model": "m", "prompt": "p", **fields}).encode()
    return completion_payload.to_payload(parse(CompletionRequest, raw, max_depth=64), LIMITS)


def embedding_of(**fields: object) -> embedding_pb2.EmbeddingPayload:
    raw = json.dumps({"model": "m", "input": "p", **fields}).encode()
    return embedding_payload.to_payload(parse(EmbeddingRequest, raw, max_depth=64), LIMITS)


def prompts_of(prompts: "list[completion_pb2.PromptInput]") -> list[object]:
    return [list(prompt.tokens.ids) if prompt.HasField("tokens") else prompt.text for prompt in prompts]


FORMS = [
    ("one", ["one"]),
    (["one", "two"], ["one", "two"]),
    ([1, 2, 2**31 - 1], [[1, 2, 2**31 - 1]]),
    ([[1], [2, 3]], [[1], [2, 3]]),
]


@pytest.mark.parametrize(("given", "expected"), FORMS)
def test_prompts_and_inputs_have_four_forms(given: object, expected: list[object]) -> None:
    assert prompts_of(list(completion_of(prompt=given).prompts)) == expected
    assert prompts_of(list(embedding_of(input=given).inputs)) == expected


def test_empty_prompt_is_accepted_and_an_empty_input_is_refused() -> None:
    assert prompts_of(list(completion_of(prompt="").prompts)) == [""]
    with pytest.raises(FieldError, match="input: must not be empty"):
        embedding_of(input="")


@pytest.mark.parametrize(
    ("given", "suffix"),
    [
        ([], ""),
        ([[]], "[0]"),
        (5, ""),
        ({"a": 1}, ""),
        ([None], ""),
        ([True], "[0]"),
        ([1.5], ""),
        ([-1], "[0]"),
        ([2**31], "[0]"),
        ([1, "a"], "[1]"),
        (["a", 1], "[1]"),
        ([[1], ["a"]], "[1][0]"),
    ],
)
def test_other_forms_are_refused_with_the_entry(given: object, suffix: str) -> None:
    with pytest.raises(FieldError) as caught:
        completion_of(prompt=given)
    assert caught.value.field == f"prompt{suffix}"
    with pytest.raises(FieldError) as caught:
        embedding_of(input=given)
    assert caught.value.field == f"input{suffix}"


def test_limit_of_no_tokens_is_refused_with_the_reason() -> None:
    with pytest.raises(FieldError, match="max_tokens: must be at least 1: not every engine"):
        completion_of(max_tokens=0)


def test_completion_fields_are_passed_on() -> None:
    payload = completion_of(n=2, logprobs=0, echo=True, suffix="end", best_of=2, max_tokens=4, stop="x")
    assert (payload.choice_count, payload.logprobs, payload.echo, payload.suffix) == (2, 0, True, "end")
    assert payload.HasField("logprobs")
    assert (payload.sampling.max_tokens, list(payload.sampling.stop)) == (4, ["x"])
    assert completion_payload.choice_count(completion_of(prompt=["a", "b"], n=3)) == 6


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"echo": 1}, "echo"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
def test_invalid_completion_field_error_names_it(fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        completion_of(**fields)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"input": ["x"] * 2049}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 65_537}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_invalid_embedding_field_error_names_it(fields: dict[str, object], field: str) -> None:
    with pytest.raises(FieldError) as caught:
        embedding_of(**fields)
    assert caught.value.field == field


def test_vectors_are_returned_in_input_order() -> None:
    vectors = [embedding_pb2.Embedding(index=1, values=[2.0]), embedding_pb2.Embedding(index=0, values=[1.0])]
    body = json.loads(
        embedding_payload.to_body(
            vectors, expected=2, model="m", usage=usage_pb2.Usage(prompt_tokens=4), as_base64=False
        )
    )
    assert [(entry["index"], entry["embedding"]) for entry in body["data"]] == [(0, [1.0]), (1, [2.0])]
    assert body["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


@pytest.mark.parametrize("indexes", [[0, 0], [0], [0, 2], [0, 1, 2]])
def test_wrong_number_of_vectors_is_a_backend_error(indexes: list[int]) -> None:
    vectors = [embedding_pb2.Embedding(index=index, values=[1.0]) for index in indexes]
    with pytest.raises(WeftError) as caught:
        embedding_payload.to_body(vectors, expected=2, model="m", usage=usage_pb2.Usage(), as_base64=True)
    assert caught.value.reason is Reason.BACKEND_PROTOCOL_ERROR
