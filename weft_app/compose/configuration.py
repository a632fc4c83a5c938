"""A configuration that can be reloaded: from its files, the environment and the command line."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from runner_svc.runtimes.runtime_settings import NOT_PULLED
from weft.kernel.machine.file_replacement import replace_file
from weft_app.compose.demo import DEMO_MODEL, DEMO_RUNNER, configured_runners, with_http_port
from weft_app.config.config import WeftConfig
from weft_app.config.document import Document, value_of
from weft_app.config.inference import with_inferred
from weft_app.config.loader import LoadedConfig, config_files, load_document, plain_document, read_files
from weft_app.config.runners import ConfiguredRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfiguration:
    """A parsed configuration and its source."""

    document: Document
    """The content of the files, without environment and command line."""
    files: tuple[Path, ...]
    """Later files override earlier ones; empty: there is no weft.yaml."""
    config: WeftConfig
    runners: tuple[ConfiguredRunner, ...]
    """The configured runners, or the demo runner."""
    removed: tuple[str, ...] = ()
    """See LoadedConfig.removed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationSource:
    """The sources of a process's configuration."""

    path: Path | None = None
    """The file of `--config`; None: the default file."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    below: Callable[[Document], Document] | None = None
    """Adds the settings of the environment."""
    runners: Callable[[], Sequence[Document]] | None = None
    """Returns the runners to serve if none is configured; None: the demo runner.

    A runner with the demo runner's name is always added, possibly without models, so that models added to the demo
    runner are kept."""
    http_port: int | None = None
    """HTTP port of the only runner, from the command line."""

    def files(self) -> tuple[Path, ...]:
        """Returns the absolute paths of the files that `read` would read. Raises as `config_files`."""
        return tuple(file.absolute() for file in config_files(self.path))

    def read(self) -> ReadConfiguration:
        """Reads all sources. Raises INVALID_ARGUMENT and MALFORMED_REQUEST, listing every problem."""
        files = self.files()
        return self.of_document(read_files(files), files)

    def of_document(self, document: Document, files: tuple[Path, ...]) -> ReadConfiguration:
        """As `read`, with a document in place of the files."""
        loaded = self._parsed(document, files[0] if files else None)
        runners = configured_runners(loaded.config)
        return ReadConfiguration(
            document=document, files=files, config=loaded.config, runners=runners, removed=loaded.removed
        )

    def load(self) -> LoadedConfig:
        """Reads all sources; errors name the file of the configuration."""
        files = config_files(self.path)
        return self._parsed(read_files(files), self.path or next(iter(files), None))

    def _parsed(self, document: Document, path: Path | None) -> LoadedConfig:
        below = self.below if self.runners is None else _with_runners(self.runners(), self.below)
        loaded = load_document(document, path, self.overrides, below)
        config = loaded.config if self.runners is None else _without_placeholders(loaded.config)
        return replace(loaded, config=config if self.http_port is None else with_http_port(config, self.http_port))

    def with_values_of(
        self, read: ReadConfiguration, other: ReadConfiguration, paths: Iterable[str]
    ) -> ReadConfiguration:
        """Returns `read` with the values of `other` at these paths. Raises as `read`."""
        document = read.document
        for path in paths:
            document = _with_value(document, other.document, path.split("."))
        return self.of_document(document, read.files)


def _with_runners(
    runners: Sequence[Document], below: Callable[[Document], Document] | None
) -> Callable[[Document], Document]:
    """Extends `below` to add these runners if none is configured, and placeholders for runners without models."""

    def with_them(document: Document) -> Document:
        if value_of(document.get("runners")) is None:
            # A configured runner needs at least one model. `_without_placeholders` removes this one.
            placeholder = {"name": DEMO_MODEL, "path": str(NOT_PULLED)}
            own = [] if any(each["name"] == DEMO_RUNNER for each in runners) else [DEMO_RUNNER]
            added = [*runners, *({"name": name, "models": [placeholder]} for name in own)]
            document = with_inferred({**document, "runners": added})
        return document if below is None else below(document)

    return with_them


def _without_placeholders(config: WeftConfig) -> WeftConfig:
    """Removes the placeholders of `_with_runners`."""
    return replace(
        config,
        runners=tuple(
            replace(runner, models=tuple(model for model in runner.models if model.location != str(NOT_PULLED)))
            for runner in config.runners or ()
        ),
    )


def _with_value(document: Document, other: Mapping[str, Any], steps: list[str]) -> Document:
    """Copies a value at a path from another document, or removes it if that one has none."""
    first, *rest = steps
    result = dict(document)
    if rest and isinstance(document.get(first), dict | None) and isinstance(other.get(first), dict | None):
        inner = _with_value(document.get(first) or {}, other.get(first) or {}, rest)
        if inner or first in other:
            result[first] = inner
        else:
            result.pop(first, None)
    elif first in other:
        result[first] = other[first]
    else:
        result.pop(first, None)
    return result


def write_snapshot(path: Path, document: Document) -> None:
    """Writes the document of the active configuration for the processes that use it. Raises OSError."""
    text = yaml.safe_dump(plain_document(document), sort_keys=False, allow_unicode=True)
    replace_file(path, text.encode())
