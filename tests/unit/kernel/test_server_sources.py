"""Addresses of servers that are attached, as texts."""

import pytest

from weft.kernel.errors.error_tree import FieldError
from weft.kernel.models.model_source import server_location, server_source, suggested_server_name
from weft.kernel.values.names import is_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("http://127.0.0.1:11434", "ollama"),
        ("http://localhost:1234/v1/", "lmstudio"),
        ("http://127.0.0.1:9999", "server-9999"),
        ("http://box.lan:8000", "box"),
        ("https://api.example.com/openai/v1", "example"),
        ("http://192.168.1.5:8000", "192.168.1.5"),
        ("http://[fd00::1]:8000/v1", "fd00::1"),
    ],
)
def test_url_is_a_server_source_with_a_name(text: str, name: str) -> None:
    found = server_source(text, "source")
    assert found is not None
    assert suggested_server_name(found) == name
    assert is_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "https://host/model.gguf",
        "https://huggingface.co/acme/smol",
        "hf:acme/smol",
        "acme/smol",
        "ftp://host",
        "http://",
        "http://host:x",
        "/models/x.gguf",
        "http://host/" + "a" * 3_000,
        "",
    ],
)
def test_text_that_is_not_a_url_is_not_a_server_source(text: str) -> None:
    assert server_source(text, "source") is None


@pytest.mark.parametrize("text", ["http://me:secret@box:1", "http://box:1?key=secret", "http://box:1/v1#secret"])
def test_url_that_may_hold_a_credential_is_refused_without_echoing_it(text: str) -> None:
    with pytest.raises(FieldError) as refused:
        server_source(text, "source")
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("http://127.0.0.1:11434/", "127.0.0.1:11434"),
        ("http://localhost:11434/v1", "127.0.0.1:11434"),
        ("HTTP://LocalHost:11434/v1/", "127.0.0.1:11434"),
        ("0.0.0.0:11434", "127.0.0.1:11434"),
        ("http://[::1]:8000", "127.0.0.1:8000"),
        ("https://api.example./v1", "api.example:443"),
        ("http://box", "box:80"),
        ("http://127.0.0.2:11434", "127.0.0.2:11434"),
        ("https://api.example/openai/v1", "api.example:443/openai"),
        ("http://box:nonsense", "http://box:nonsense"),
    ],
)
def test_all_spellings_of_a_url_are_equal(url: str, place: str) -> None:
    assert server_location(url) == place
