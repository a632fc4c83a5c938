"""What a configured model is said to offer."""

from dataclasses import replace
from typing import Any

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.requests.request_values import TEXT_OPERATIONS, Operation
from weft_app.compose.served_models import runner_context, served_model
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

ENGINES: dict[str, dict[str, Any]] = {
    "llama_server": {"path": "model.gguf"},
    "openai_http": {"url": "http://127.0.0.1:1/v1"},
    "openai_remote": {"url": "https://api.example.com/v1"},
}


def _operations(runtime: str, **model: Any) -> frozenset[Operation]:
    fields = {"name": "r", "runtime": runtime, "models": [{"name": "m", **ENGINES[runtime], **model}]}
    section = parse_section(ConfiguredRunner, fields)
    return served_model(section, section.models[0], 1.0, replace(runner_context(section), environment={})).operations


@pytest.mark.parametrize(
    ("runtime", "model", "operations"),
    [
        ("openai_http", {}, TEXT_OPERATIONS),
        ("openai_http", {"embeddings": False}, {Operation.CHAT, Operation.COMPLETION}),
        ("openai_http", {"operations": ["chat", "tokenize"]}, {Operation.CHAT, Operation.TOKENIZE}),
        ("openai_http", {"operations": ["image"]}, {Operation.IMAGE}),
        ("openai_remote", {}, {Operation.CHAT}),
        ("openai_remote", {"embeddings": True}, {Operation.CHAT, Operation.EMBEDDING}),
        ("openai_remote", {"operations": ["speech"]}, {Operation.SPEECH}),
        ("llama_server", {}, TEXT_OPERATIONS | {Operation.TOKENIZE}),
        ("llama_server", {"extra_arguments": ["--reranking"]}, {Operation.RERANK, Operation.TOKENIZE}),
    ],
)
def test_model_offers_its_configured_or_default_operations(
    runtime: str, model: dict[str, Any], operations: set[Operation]
) -> None:
    assert _operations(runtime, **model) == operations


@pytest.mark.parametrize("runtime", ["openai_http", "openai_remote"])
def test_contradicting_operations_are_refused(runtime: str) -> None:
    with pytest.raises(FieldError) as refused:
        _operations(runtime, operations=["chat"], embeddings=True)
    assert refused.value.field == "runners.r.models.m.embeddings"


def test_managed_engine_declares_its_own_operations() -> None:
    with pytest.raises(FieldError, match=r"models.0.operations: .*because the runtime is llama_server"):
        _operations("llama_server", operations=["chat"])
