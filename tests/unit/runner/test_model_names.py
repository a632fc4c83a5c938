"""Names of models in answers, and mismatches with the request."""

import pytest

from runner_svc.policy.model_names import MAX_NAME_CHARS, is_another_model, plain_name


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
