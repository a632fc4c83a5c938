"""The table of runtimes: weft's own folders, and those of extensions;
no other module names a runtime, and a folder's engine is chosen from it."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from kit.failures import fails
from kit.runtime_plugin import forget_extensions, install, install_runtime, write_distribution

from runner_svc.policy.engine_choice import EngineCandidate, WeightFormat, choose_engine, folder_format
from runner_svc.runtimes import table
from runner_svc.runtimes.runtime import Runtime
from runner_svc.runtimes.table import built_in_names
from weft.kernel.errors.error_tree import FieldError, WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

OWN = (
    "comfyui",
    "ctranslate2",
    "diffusers",
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
    forget_extensions()
    yield tmp_path
    forget_extensions()
    for module in [name for name in sys.modules if name.endswith("_extension")]:
        del sys.modules[module]


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


def test_unimportable_runtime_is_reported_with_the_reason(site: Path) -> None:
    install_runtime(site, "weft-broken", "broken", "no_such_module:RUNTIME")
    why = "ModuleNotFoundError: No module named 'no_such_module'"
    assert _fault("broken") == f"no_such_module:RUNTIME cannot be imported: {why}"
    assert table.installed()[0].package == "weft-broken 1.0"


def test_hook_that_is_not_a_runtime_is_refused(site: Path) -> None:
    install_runtime(site, "weft-strange", "strange", "pathlib:Path")
    assert "must be a runner_svc.runtimes.runtime.Runtime" in _fault("strange")


def test_hook_with_a_different_name_than_its_runtime_is_refused(site: Path) -> None:
    value = "runner_svc.runtimes.openai_http.runtime:RUNTIME"
    install_runtime(site, "weft-alias", "alias", value)
    assert "calls itself openai_http" in _fault("alias")


def test_name_declared_by_two_packages_is_refused_naming_both(site: Path) -> None:
    for package in ("weft-a", "weft-b"):
        install_runtime(site, package, "twice", "pathlib:Path")
    assert _fault("twice") == "weft-a 1.0 and weft-b 1.0 have it; uninstall all but one"


def test_package_cannot_replace_a_built_in_runtime(site: Path) -> None:
    install_runtime(site, "weft-thief", "llama_server", "pathlib:Path")
    (found,) = table.installed()
    assert found.runtime is None
    assert found.fault == "weft has a runtime of this name; the package must choose another"
    assert table.require_runtime("llama_server").name == "llama_server"


def test_refusal_names_an_extension_that_cannot_be_used(site: Path) -> None:
    write_distribution(site, "weft-lost", "1.0", {"weft.extensions:lost": "no_such_package:EXTENSION"})
    with pytest.raises(FieldError, match=r"the extension of weft-lost 1\.0 cannot be used: ModuleNotFoundError"):
        table.require_runtime("lost")


def test_runtime_of_a_disabled_extension_says_why_it_is_off(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in install(site / "plugin"):
        monkeypatch.syspath_prepend(path)
    why = "the runtime ngram belongs to the extension ngram, which is off: extensions.disabled names it"
    assert table.why_off("ngram", ["ngram"]) == why
    assert table.why_off("ngram", []) == ""
    assert table.why_off("llama_server", ["ngram"]) == ""


def test_unknown_runtime_is_refused_with_the_choices() -> None:
    names = "comfyui, ctranslate2, diffusers, exllamav3, faster_whisper, llama"
    with pytest.raises(FieldError, match=f"must be one of: {names}"):
        table.require_runtime("sglang")


RUNTIMES = built_in_names()
QUOTED_OR_IMPORTED = re.compile(rf"(?<=[\"'.])(?:{'|'.join(map(re.escape, RUNTIMES))})(?=[\"'. ])")
"""Finds every runtime that a text names, and more. Parsing all modules takes seconds."""
ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "runner_svc",
    "weft",
    "weft_app",
    "weft_testing",
    "gateway",
    "router_svc",
    "registry_svc",
    "weft_extensions",
)
ALLOWED = {
    "runner_svc/runtimes/table.py": "the default runtime, and the one of `weft runner join --url`",
    "runner_svc/runtimes/unmanaged_server.py": "`server` is the word of messages for a running server",
    "weft_testing/fake_backend/vllm_routes.py": "`vllm` owns the models that its server lists",
    "weft_app/compose/provider_models.py": "models that operators declare are those of `openai_remote`",
    "weft_extensions/comfyui/extension.py": "it adds the runtime",
    "weft_extensions/engines/extension.py": "it adds the runtimes",
    "weft_extensions/ollama/models.py": "`server` is the name of a field",
    "weft_extensions/mcp/caller.py": "`server` is a key of ASGI scopes",
    "runner_svc/added_models.py": "`server` is the name of a field",
    "gateway/responses/schema.py": "`server` says who runs a search for tools",
    "runner_svc/model_files/pipeline_folder.py": "`diffusers` is a library that the components of a folder name",
    "registry_svc/operations/job.py": "`server` is the name of a field",
    "runner_svc/discovery.py": "`vllm` and `server` are kinds of programs that run already",
    "weft/kernel/models/model_source.py": "`server` is the suggested name of a server without one",
    "weft/kernel/telemetry/tracing.py": "`server` is a kind of span",
    "weft_app/cli/operations.py": "`server` is the name of a field",
    "weft_app/compose/discovered_here.py": "`server` is the name of a field",
    "weft_app/compose/followed_servers.py": "`server` is the suggested name of a server without one",
    "weft_app/cli/doctor.py": "`server` is a check of `weft doctor`",
}
"""Modules that may name a runtime, with the reason."""


def _modules() -> Iterator[Path]:
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            where = path.relative_to(ROOT).as_posix()
            if not where.startswith("weft/api/"):
                yield path


def _names_in(path: Path, own: str = "") -> set[str]:
    """Returns the other runtimes that a module names, by a string or by an import from the folder."""
    text = path.read_text(encoding="utf-8")
    names = set(QUOTED_OR_IMPORTED.findall(text)) - {own}
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)) if names else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = node.module.partition("runtimes.")[2] or node.module.partition("weft_extensions.engines.")[2]
            found.add(inner.partition(".")[0])
    return found & names


def test_no_module_outside_its_folder_names_a_runtime() -> None:
    named = {}
    for path in _modules():
        where = path.relative_to(ROOT).as_posix()
        folder = re.match(r"(?:runner_svc/runtimes|weft_extensions/engines|weft_extensions(?=/comfyui/))/(\w+)/", where)
        own = folder[1] if folder else ""
        if where not in ALLOWED and (others := _names_in(path, own)):
            named[where] = sorted(others)
    assert named == {}


@pytest.mark.parametrize("where", ALLOWED)
def test_exceptions_are_still_needed(where: str) -> None:
    assert _names_in(ROOT / where)


def _engine(name: str, weights: WeightFormat, remedy: str = "") -> EngineCandidate:
    return EngineCandidate(name=name, formats=frozenset({weights}), remedy=remedy)


@pytest.mark.parametrize(
    ("names", "configuration", "weights"),
    [
        (["config.json", "model.safetensors"], {}, WeightFormat.SAFETENSORS),
        (["a.safetensors"], {"quantization_config": {"quant_method": "awq"}}, WeightFormat.SAFETENSORS),
        (["a.safetensors"], {"quantization_config": {"quant_method": "exl3"}}, WeightFormat.EXL3),
        (["model.bin", "config.json"], {}, WeightFormat.CTRANSLATE2),
        (["model.bin", "config.json"], {"alignment_heads": [[1, 0]], "suppress_ids": []}, WeightFormat.WHISPER),
        (["model_index.json", "whole.safetensors"], {}, WeightFormat.PIPELINE),
        (["model.bin", "a.safetensors"], {"quantization_config": "odd"}, WeightFormat.SAFETENSORS),
    ],
)
def test_weight_format_of_a_folder_is_detected(
    names: list[str], configuration: Mapping[str, object], weights: WeightFormat
) -> None:
    assert folder_format(names, configuration) is weights


def test_folder_without_weights_is_refused() -> None:
    with fails(Reason.UNSUPPORTED_OPERATION, match="no supported weights"):
        folder_format(["pytorch_model.bin", "config.json"], {})


def test_runtime_of_the_runner_is_preferred_and_reported() -> None:
    candidates = [_engine("a", WeightFormat.GGUF), _engine("own", WeightFormat.GGUF)]
    choice = choose_engine(WeightFormat.GGUF, "own", candidates)
    assert choice.name == "own"
    assert "own runtime" in choice.reason


def test_another_installed_engine_serves_formats_the_own_one_cannot_load() -> None:
    candidates = [
        _engine("own", WeightFormat.GGUF),
        _engine("absent", WeightFormat.SAFETENSORS, "weft runtime install absent"),
        _engine("there", WeightFormat.SAFETENSORS),
    ]
    assert choose_engine(WeightFormat.SAFETENSORS, "own", candidates).name == "there"


def test_refusal_without_an_installed_engine_shows_the_install_command() -> None:
    candidates = [
        _engine("own", WeightFormat.GGUF),
        _engine("x", WeightFormat.SAFETENSORS, "weft runtime install x"),
        _engine("x_too", WeightFormat.SAFETENSORS, "weft runtime install x"),
    ]
    with fails(Reason.UNSUPPORTED_OPERATION, match=r"run: weft runtime install x$"):
        choose_engine(WeightFormat.SAFETENSORS, "own", candidates)


def test_format_that_no_runtime_loads_is_refused() -> None:
    with pytest.raises(WeftError, match="no runtime of this release"):
        choose_engine(WeightFormat.EXL3, "own", [_engine("own", WeightFormat.GGUF)])
