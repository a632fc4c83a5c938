"""Whether a server's list of models has the requested one, under any spelling of its name."""

import json
from typing import Any

import pytest

from runner_svc.policy.model_names import (
    MAX_NAME_CHARS,
    ListedModels,
    is_another_model,
    listed_models,
    not_listed_message,
    plain_name,
)


def listed(*entries: Any) -> ListedModels:
    return listed_models(json.dumps({"object": "list", "data": entries}).encode())


def named(*names: str) -> ListedModels:
    return listed(*({"id": name, "object": "model", "owned_by": "library"} for name in names))


@pytest.mark.parametrize(
    ("asked", "models"),
    [
        ("llama3.2", named("llama3.2:latest", "qwen3:8b")),
        ("llama3.2:latest", named("llama3.2")),
        ("llama3.2:3b", named("llama3.2:3b")),
        ("Qwen/Qwen3-8B", named("qwen/qwen3-8b")),
        ("qwen.gguf", named("/models/qwen.gguf")),
        ("/data/qwen.gguf", named("qwen")),
        ("base", listed({"id": "served", "root": "base"})),
        ("/srv/models/qwen", listed({"id": "qwen", "root": "/srv/models/qwen"})),
        ("small", listed({"id": "m", "aliases": ["small", "tiny"]})),
        ("anything", listed({"id": "/models/a.gguf", "owned_by": "llamacpp"})),
        ("tgi", listed({"id": "org/model", "owned_by": "org/model"})),
        ("anything", listed()),
        ("anything", listed({"name": "no id"}, 7, None)),
        ("anything", listed_models(b"<html>")),
        ("anything", listed_models(b"[1]")),
        ("anything", listed_models(b"\xff\xfe")),
        ("anything", listed_models(b"[" * 100_000)),
        ("anything", listed_models(b"")),
    ],
)
def test_server_with_the_model_or_without_a_list_is_used(asked: str, models: ListedModels) -> None:
    assert models.has(asked)


@pytest.mark.parametrize(
    ("asked", "models"),
    [
        ("llama", named("llama3.2:3b")),
        ("llama3.2", named("llama3.2:3b")),
        ("llama3.2:1b", named("llama3.2:3b", "llama3.2:latest")),
        ("b", listed({"id": "a", "owned_by": "llamacpp"}, {"id": "c", "owned_by": "llamacpp"})),
        ("org-a/model", named("org-b/model")),
    ],
)
def test_server_listing_only_other_models_does_not_have_it(asked: str, models: ListedModels) -> None:
    assert not models.has(asked)


def test_error_lists_server_models_with_close_names_first_up_to_a_limit() -> None:
    models = named("phi4", "gemma3", *(f"other{n}" for n in range(20)), "llama3.2:3b")
    message = not_listed_message("llama3", models)
    assert message.startswith("the server has no model llama3; it has llama3.2:3b, ")
    assert message.endswith(" and 18 more (set upstream_model)")
    hostile = not_listed_message("m", named("\x1b[31m" + "x" * 500))
    assert "\x1b" not in hostile
    assert len(hostile) < 300


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ("llama3.2:3b", "llama3.2:3b"),
        ("llama3.2", "llama3.2:latest"),
        ("smollm2", "/srv/models/SmolLM2.gguf"),
        ("smollm2-135m", "SmolLM2-135M-Q4_K_M.gguf"),
        ("org/model", "model"),
        ("model", "provider/org/Model"),
        ("gpt-4o", "gpt-4o-2024-08-06"),
        ("mistral-large", "mistral-large-2411"),
        ("C:\\models\\a.gguf", "a"),
        ("m", ""),
    ],
)
def test_different_spelling_of_a_name_is_the_same_model(asked: str, answered: str) -> None:
    assert not is_another_model(asked, answered)
    assert not is_another_model(answered, asked)


@pytest.mark.parametrize(
    ("asked", "answered"),
    [("llama3.2:3b", "llama3.2:1b"), ("gpt-4o", "gpt-4o-mini"), ("a", "b"), ("llama-3", "llama-3.1"), ("m", "mm")],
)
def test_different_model_is_detected(asked: str, answered: str) -> None:
    assert is_another_model(asked, answered)
    assert is_another_model(answered, asked)


def test_displayed_name_is_short_and_printable() -> None:
    assert plain_name("/x/\x1b[31mred\n" + "y" * 500) == ("[31mred" + "y" * 500)[:MAX_NAME_CHARS]
