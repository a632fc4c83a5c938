"""The name of a model that is asked for by its source, and what counts as a source."""

import pytest

from weft.kernel.errors.error_tree import WeftError
from weft.kernel.models.model_source import (
    MAX_NUMBERED_NAMES,
    MAX_SUGGESTED_CHARS,
    asked_source,
    free_name,
    is_source,
    reaches_anywhere,
    suggested_name,
)
from weft.kernel.values.names import is_name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf:Qwen/Qwen3-8B-GGUF:Q4_K_M", "qwen3-8b-q4_k_m"),
        ("Qwen/Qwen3-8B-GGUF", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct@main", "llama-3.1-8b-instruct"),
        ("hf:acme/tiny:sub/Tiny-Q8_0-00001-of-00003.gguf", "tiny-q8_0"),
        ("https://example.com/models/Some%20Model-Q4.gguf?key=1", "some-model-q4"),
        ("/models/mistral-7b/", "mistral-7b"),
        ("~/m/My Model.gguf", "my-model"),
        ("ollama:llama3.2:3b", "llama3.2:3b"),
        ("ollama:someone/llama3.2", "llama3.2"),
        ("lmstudio:community/Qwen3-8B-GGUF", "qwen3-8b"),
        ("/", "model"),
        ("/models/模型.gguf", "xn--xgs754b"),
        ("/models/Über Modell.gguf", "xn--ber-modell-8db"),
        (f"/models/{'x' * 300}.gguf", "x" * MAX_SUGGESTED_CHARS),
    ],
)
def test_source_suggests_a_short_name(source: str, name: str) -> None:
    assert suggested_name(asked_source(source, "source")) == name
    assert is_name(name)


def test_taken_name_gets_a_numeric_suffix() -> None:
    taken = {"qwen", "qwen-2"}
    assert free_name("qwen", taken.__contains__) == "qwen-3"
    assert free_name("other", taken.__contains__) == "other"


def test_numeric_suffixes_are_bounded() -> None:
    with pytest.raises(ValueError, match=str(MAX_NUMBERED_NAMES)):
        free_name("qwen", lambda _: True)


@pytest.mark.parametrize("text", ["hf:a/b", "a/b", "/models/x", "./x.gguf", "~/x", "ollama:llama3", "https://h/x.gguf"])
def test_path_url_or_scheme_is_a_source(text: str) -> None:
    assert is_source(text)


@pytest.mark.parametrize("text", ["qwen", "qwen:q4", "llama3.2:3b"])
def test_name_is_not_a_source(text: str) -> None:
    assert not is_source(text)


@pytest.mark.parametrize(
    ("source", "anywhere"),
    [
        ("hf:a/b", False),
        ("a/b:Q4_0", False),
        ("ollama:x", False),
        ("hfcache:a/b", False),
        ("lmstudio:a/b", False),
        ("/etc/x.gguf", True),
        ("~/x.gguf", True),
        ("https://h/x.gguf", True),
    ],
)
def test_paths_and_urls_are_arbitrary_sources(source: str, *, anywhere: bool) -> None:
    assert reaches_anywhere(asked_source(source, "source")) is anywhere


def test_invalid_source_is_refused_with_its_field() -> None:
    with pytest.raises(WeftError, match="modelId"):
        asked_source("s3:bucket/x", "modelId")
