"""Whether a server's list of models has the requested one."""

import json
from typing import Any

import pytest

from runner_svc.policy.model_names import ListedModels, listed_models, not_listed_message


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
