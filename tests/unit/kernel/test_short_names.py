"""Short names of models: each is a name, and stands for files of a repository of the hub."""

from pathlib import Path

import pytest

from weft.kernel.models.model_source import HubSource, SourceScheme, is_source, parse_source
from weft.kernel.models.short_names import SHORT_NAMES, short_names_hint, short_source
from weft.kernel.values.names import is_name


@pytest.mark.parametrize(("name", "source"), SHORT_NAMES.items())
def test_every_entry_is_a_name_and_a_repository_of_gguf_files(name: str, source: str) -> None:
    found = parse_source(source, "source")
    assert isinstance(found, HubSource)
    assert (found.scheme, found.repository.lower().endswith("-gguf"), str(found)) == (SourceScheme.HUB, True, source)
    assert is_name(name)
    assert not is_source(name)
    assert name == name.lower()


def test_short_name_is_case_insensitive_and_accepts_the_latest_tag() -> None:
    assert short_source("Llama3.2:latest") == short_source("llama3.2") == SHORT_NAMES["llama3.2"]
    assert short_source("llama3.2:7b") is None


def test_unknown_name_error_suggests_close_names() -> None:
    assert short_names_hint("lama3.2") == "did you mean llama3.2 or llama3.2:1b or llama3.3?"
    assert "hf:OWNER/REPO" in short_names_hint("zzzzzzz")


def test_page_lists_every_short_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text("utf-8")
    assert [name for name, source in SHORT_NAMES.items() if f"| `{name}` | `{source}` |\n" not in page] == []
