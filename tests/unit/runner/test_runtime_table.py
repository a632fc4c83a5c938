"""The table of runtimes: weft's own folders, and entry points of other packages."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.runtime_plugin import install, write_distribution

from runner_svc.runtimes import table
from runner_svc.runtimes.runtime import Runtime
from weft.kernel.errors import FieldError
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

OWN = (
    "comfyui",
    "ctranslate2",
    "diffusers",
    "espeak_ng",
    "exllamav3",
    "faster_whisper",
    "llama_cpp_python",
    "llama_server",
    "openai_http",
    "openai_remote",
    "piper",
    "server",
    "vllm",
)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "engines.md"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    table.installed.cache_clear()
    yield tmp_path
    table.installed.cache_clear()


def _fault(name: str) -> str:
    (fault,) = {each.fault for each in table.installed() if each.name == name}
    with pytest.raises(FieldError) as refused:
        table.require_runtime(name)
    assert fault in refused.value.message
    return fault


def test_runtime_folders_match_the_built_in_runtimes() -> None:
    assert table.built_in_names() == OWN
    assert [runtime.name for runtime in table.built_in()] == list(OWN)


def test_runtime_is_found_by_its_alias_and_shown_by_its_name() -> None:
    runner = {"name": "gpu", "runtime": "vllm_serve", "models": [{"name": "qwen", "model": "org/qwen"}]}
    assert table.require_runtime("vllm_serve") is table.require_runtime("vllm")
    assert parse_section(ConfiguredRunner, runner).runtime == "vllm"


@pytest.mark.parametrize("name", OWN)
def test_built_in_runtime_has_a_row_on_the_page(name: str) -> None:
    assert f"| `{name}` |" in PAGE.read_text(encoding="utf-8")


def test_package_adds_a_runtime(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in install(site / "plugin"):
        monkeypatch.syspath_prepend(path)
    (found,) = table.installed()
    assert (found.name, found.package, found.fault) == ("ngram", "weft-ngram 0.1.0", "")
    assert isinstance(found.runtime, Runtime)
    assert table.require_runtime("ngram") is found.runtime
    assert table.usable_names() == (*OWN, "ngram")


def test_unimportable_package_is_reported_with_the_reason(site: Path) -> None:
    write_distribution(site, "weft-broken", "1.0", {"weft.runtimes:broken": "no_such_module:RUNTIME"})
    why = "ModuleNotFoundError: No module named 'no_such_module'"
    assert _fault("broken") == f"no_such_module:RUNTIME cannot be imported: {why}"
    assert table.installed()[0].package == "weft-broken 1.0"


def test_entry_point_that_is_not_a_runtime_is_refused(site: Path) -> None:
    write_distribution(site, "weft-strange", "1.0", {"weft.runtimes:strange": "pathlib:Path"})
    assert "must be a runner_svc.runtimes.runtime.Runtime" in _fault("strange")


def test_entry_point_with_a_different_name_than_its_runtime_is_refused(site: Path) -> None:
    value = "runner_svc.runtimes.openai_http.runtime:RUNTIME"
    write_distribution(site, "weft-alias", "1.0", {"weft.runtimes:alias": value})
    assert "calls itself openai_http" in _fault("alias")


def test_name_declared_by_two_packages_is_refused_naming_both(site: Path) -> None:
    for package in ("weft-a", "weft-b"):
        write_distribution(site, package, "1.0", {"weft.runtimes:twice": "pathlib:Path"})
    assert _fault("twice") == "weft-a 1.0 and weft-b 1.0 declare it; uninstall all but one"


def test_package_cannot_replace_a_built_in_runtime(site: Path) -> None:
    write_distribution(site, "weft-thief", "1.0", {"weft.runtimes:llama_server": "pathlib:Path"})
    (found,) = table.installed()
    assert found.runtime is None
    assert found.fault == "weft has a runtime of this name; the package must choose another"
    assert table.require_runtime("llama_server").name == "llama_server"


def test_unknown_runtime_is_refused_with_the_choices() -> None:
    names = "comfyui, ctranslate2, diffusers, espeak_ng, exllamav3, faster_whisper, llama"
    with pytest.raises(FieldError, match=f"must be one of: {names}"):
        table.require_runtime("sglang")
