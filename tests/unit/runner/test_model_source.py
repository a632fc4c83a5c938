"""Texts that say where a model comes from, and what is said of wrong ones; digests of files."""

import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.failures import fails

from runner_svc.model_files.digest import model_digest
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.runtime_settings import SourcedModelSettings
from runner_svc.runtimes.table import built_in
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.models.model_source import (
    HubSource,
    LmStudioSource,
    ModelSource,
    OllamaSource,
    PathSource,
    SourceScheme,
    UrlSource,
    hub_source,
    parse_source,
    shown_url,
)

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:Qwen/Qwen3-8B-GGUF", HubSource(repository="Qwen/Qwen3-8B-GGUF")),
        ("hf:Qwen/Qwen3-8B-GGUF:Q4_K_M", HubSource(repository="Qwen/Qwen3-8B-GGUF", wanted="Q4_K_M")),
        (
            "hf:a/b:sub/x-00001-of-00003.gguf@refs/pr/1",
            HubSource(repository="a/b", wanted="sub/x-00001-of-00003.gguf", revision="refs/pr/1"),
        ),
        ("hf:a/b@v1.0", HubSource(repository="a/b", revision="v1.0")),
        ("hf.co/a/b:Q8_0", HubSource(repository="a/b", wanted="Q8_0")),
        ("https://huggingface.co/a/b", HubSource(repository="a/b")),
        ("https://hf.co/a/b/tree/dev", HubSource(repository="a/b", revision="dev")),
        ("https://huggingface.co/a/b/blob/main/x.gguf?download=true", HubSource(repository="a/b", wanted="x.gguf")),
        ("hfcache:a/b:Q8_0", HubSource(repository="a/b", wanted="Q8_0", scheme=SourceScheme.HUB_CACHE)),
        ("https://example.com/x.gguf", UrlSource(url="https://example.com/x.gguf")),
        (f"https://h/x.gguf#sha256={DIGEST.upper()}", UrlSource(url="https://h/x.gguf", sha256=DIGEST)),
        ("https://h/x%20y.gguf?token=1", UrlSource(url="https://h/x%20y.gguf?token=1")),
        ("/models/x.gguf", PathSource(path="/models/x.gguf")),
        ("~/x", PathSource(path="~/x")),
        ("./x.gguf", PathSource(path="./x.gguf")),
        ("ollama:llama3.2", OllamaSource(name="llama3.2")),
        ("ollama:me/llama3.2:3b", OllamaSource(name="me/llama3.2", tag="3b")),
        ("ollama:hf.co/a/b:Q4_K_M", OllamaSource(name="hf.co/a/b", tag="Q4_K_M")),
        ("lmstudio:a/b", LmStudioSource(repository="a/b")),
        ("lmstudio:a/b:x.gguf", LmStudioSource(repository="a/b", wanted="x.gguf")),
    ],
)
def test_source_round_trips_as_text(text: str, source: ModelSource) -> None:
    assert parse_source(text, "source") == source
    assert parse_source(str(source), "source") == source


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "must be 1 to"),
        ("hf:a/b\n", "printable"),
        ("hf:" + "a" * 3000, "must be 1 to"),
        ("Qwen/Qwen3-8B", "write hf:Qwen/Qwen3-8B for the hub's repository, or ./Qwen/Qwen3-8B for a path"),
        ("Qwen/Qwen3-8B-GGUF:Q4_K_M", "write hf:Qwen/Qwen3-8B-GGUF:Q4_K_M"),
        ("qwen", "'qwen' must be hf:OWNER/REPO, a URL, or a path"),
        ("s3:bucket/x", "s3: is not known; there is hf:, ollama:, lmstudio:, hfcache:, https: or a path"),
        ("hf:a", "the repository 'a' must be OWNER/REPO"),
        ("hf:a/b/c", "the repository 'a/b/c' must be OWNER/REPO"),
        ("hf:a/..", "the repository 'a/..' must be OWNER/REPO"),
        ("hf:-a/b", "the repository '-a/b'"),
        ("hf:a--b/c", "the repository 'a--b/c'"),
        ("hf:a/b:", "after the colon a quantization or file is missing"),
        ("hf:a/b:../x.gguf", "'../x.gguf' must be a quantization, or the path"),
        ("hf:a/b:x\\y", "must be a quantization, or the path"),
        ("hf:a/b@", "the revision '' must be"),
        ("hf:a/b@x/../y", "the revision 'x/../y' must be"),
        ("hf:a/b@-x", "the revision '-x' must be"),
        ("https://user:secret@h/x.gguf", "user name or password"),
        ("https:///x.gguf", "must be a URL with a host"),
        ("https://h:99999/x.gguf", "is no URL"),
        ("https://h/x.bin", "'x.bin' must be a .gguf file"),
        ("https://h/x%2F..%2Fy.gguf", "must be a .gguf file"),
        ("https://h/x-00001-of-00002.gguf", "is one of 2 parts"),
        ("https://h/x.gguf#sha256=12", "64 hex digits"),
        ("https://h/x.gguf#top", "64 hex digits"),
        ("https://huggingface.co/a/b/discussions/1", "is not the page of a Hugging Face model"),
        ("ollama:a/b/c/d", "must be a name as `ollama list` shows it"),
        ("ollama:a:b c", "the tag 'b c' must be"),
        ("ollama:../x", "must be a name as `ollama list` shows it"),
        ("lmstudio:a", "the repository 'a' must be OWNER/REPO"),
    ],
)
def test_error_names_the_field_and_the_invalid_part(text: str, part: str) -> None:
    with fails(field="runners.gpu.models.qwen.source") as raised:
        parse_source(text, "runners.gpu.models.qwen.source")
    assert part in raised.value.message


def test_bare_hub_id_is_accepted_if_only_a_hub_source_is_possible() -> None:
    assert hub_source("meta-llama/Llama-3.1-8B-Instruct", "modelId").repository == "meta-llama/Llama-3.1-8B-Instruct"
    assert hub_source("hf:a/b:Q8_0", "modelId") == HubSource(repository="a/b", wanted="Q8_0")


def test_url_query_is_not_shown() -> None:
    source = parse_source("https://h/x.gguf?signature=secret", "source")
    assert isinstance(source, UrlSource)
    assert source.shown == "https://h/x.gguf?..."


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/x.gguf?sig=secret#sha256=ab", "https://h/x.gguf?...#sha256=ab"),
        ("http://me:secret@h:1/wake?token=secret", "http://...@h:1/wake?..."),
        ("https://h/x.gguf", "https://h/x.gguf"),
        ("https://h/a@b", "https://h/a@b"),
        ("is it hf:a/b?", "is it hf:a/b?"),
        ("", ""),
    ],
)
def test_url_for_display_has_neither_user_nor_query(text: str, shown: str) -> None:
    assert shown_url(text) == shown


@pytest.mark.parametrize(
    "runtime",
    [each for each in built_in() if issubclass(each.settings, SourcedModelSettings)],
    ids=lambda each: each.name,
)
def test_presigned_source_of_a_model_is_not_shown_to_the_mesh(runtime: Runtime[Any]) -> None:
    model = runtime.settings(name="m", source="https://h/x.gguf?sig=secret")
    assert (model.upstream_name, model.location) == ("https://h/x.gguf?...", "https://h/x.gguf?...")


def _read_again(text: str) -> ModelSource | FieldError:
    try:
        return parse_source(text, "source")
    except FieldError as error:
        return error


@given(st.text(max_size=200) | st.from_regex(r"hf:[\w./@:-]{0,60}", fullmatch=True))
def test_any_text_is_a_source_or_an_error_with_its_field(text: str) -> None:
    found = _read_again(text)
    if isinstance(found, FieldError):
        assert found.field == "source"
    else:
        assert _read_again(str(found)) == found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.mark.parametrize("content", [b"", b"\xff\xfe garbage", b"[1, 2]", b'{"a": 1}', b'{"cut": "off', b"[" * 9_999])
async def test_damaged_digest_cache_is_replaced(model: Path, tmp_path: Path, content: bytes) -> None:
    """The task that computes digests died of it, and no model had a digest."""
    memory = tmp_path / "digests.json"
    memory.write_bytes(content)
    expected = f"sha256:{sha256(b'weights').hexdigest()}"
    assert await model_digest(model, memory) == expected
    assert expected in memory.read_text()


async def test_unwritable_digest_cache_only_disables_caching(model: Path, tmp_path: Path) -> None:
    (tmp_path / "digests.json").mkdir()
    assert await model_digest(model, tmp_path / "digests.json") == f"sha256:{sha256(b'weights').hexdigest()}"


async def test_digest_of_a_file_below_a_name_that_is_not_text_is_kept(tmp_path: Path) -> None:
    """The task that computes digests died of it, and no model after this one had a digest or a price."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    (folder / "m.gguf").write_bytes(b"weights")
    (tmp_path / "link.gguf").symlink_to(folder / "m.gguf")
    expected = f"sha256:{sha256(b'weights').hexdigest()}"
    memory = tmp_path / "digests.json"
    assert await model_digest(tmp_path / "link.gguf", memory) == expected
    assert expected in memory.read_text("utf-8")
