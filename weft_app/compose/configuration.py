"""The configuration of a process that reads it again while it runs: its files, the environment and the command line."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from runner_svc.runtimes.settings import NOT_PULLED
from weft.kernel.file_replacement import replace_file
from weft_app.compose.demo import DEMO_MODEL, DEMO_RUNNER, configured_runners, with_http_port
from weft_app.config.config import WeftConfig
from weft_app.config.document import Document, value_of
from weft_app.config.inference import with_inferred
from weft_app.config.loader import config_files, load_document, plain_document, read_files
from weft_app.config.runners import ConfiguredRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadConfiguration:
    """A configuration that has been read."""

    document: Document
    """What the files say, without environment and command line."""
    files: tuple[Path, ...]
    """Later ones over earlier ones; none: there is no weft.yaml."""
    config: WeftConfig
    runners: tuple[ConfiguredRunner, ...]
    """The runners of the configuration, or the demo's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationSource:
    """Where the configuration of a process comes from."""

    path: Path | None = None
    """The file of `--config`; None: the usual one."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """What the command line says."""
    below: Callable[[Document], Document] | None = None
    """Adds what the environment says."""
    runners: Callable[[], Sequence[Document]] | None = None
    """Returns the runners that are served where none is configured; None: the demo's.

    With them one of the demo runner's name is served in any case, so that it has the models that were added to that
    one; it may have no others.
    """
    http_port: int | None = None
    """The HTTP port of the only runner, as the command line says."""

    def files(self) -> tuple[Path, ...]:
        """Returns the files that a reading would read, as absolute paths. Raises as `config_files`."""
        return tuple(file.absolute() for file in config_files(self.path))

    def read(self) -> ReadConfiguration:
        """Reads everything again. Raises INVALID_ARGUMENT and MALFORMED_REQUEST naming all that is wrong."""
        files = self.files()
        return self.of_document(read_files(files), files)

    def of_document(self, document: Document, files: tuple[Path, ...]) -> ReadConfiguration:
        """As `read`, of a document that stands for the files."""
        config = self._parsed(document, files[0] if files else None)
        return ReadConfiguration(document=document, files=files, config=config, runners=configured_runners(config))

    def load(self) -> WeftConfig:
        """Returns the configuration alone, read again; errors name its file as the command line does."""
        files = config_files(self.path)
        return self._parsed(read_files(files), self.path or next(iter(files), None))

    def _parsed(self, document: Document, path: Path | None) -> WeftConfig:
        below = self.below if self.runners is None else _with_runners(self.runners(), self.below)
        config = load_document(document, path, self.overrides, below).config
        if self.runners is not None:
            config = _without_placeholders(config)
        return config if self.http_port is None else with_http_port(config, self.http_port)

    def with_values_of(
        self, read: ReadConfiguration, other: ReadConfiguration, paths: Iterable[str]
    ) -> ReadConfiguration:
        """Returns `read` with the settings at these paths as `other` has them. Raises as `read`."""
        document = read.document
        for path in paths:
            document = _with_value(document, other.document, path.split("."))
        return self.of_document(document, read.files)


def _with_runners(
    runners: Sequence[Document], below: Callable[[Document], Document] | None
) -> Callable[[Document], Document]:
    """Returns `below` for a document that gets these runners where none is configured, and placeholders of models."""

    def with_them(document: Document) -> Document:
        if value_of(document.get("runners")) is None:
            # A configured runner has a model at least; this one is taken out again.
            placeholder = {"name": DEMO_MODEL, "path": str(NOT_PULLED)}
            own = [] if any(each["name"] == DEMO_RUNNER for each in runners) else [DEMO_RUNNER]
            added = [*runners, *({"name": name, "models": [placeholder]} for name in own)]
            document = with_inferred({**document, "runners": added})
        return document if below is None else below(document)

    return with_them


def _without_placeholders(config: WeftConfig) -> WeftConfig:
    """Returns the configuration without the models that `_with_runners` put in place of none."""
    return replace(
        config,
        runners=tuple(
            replace(runner, models=tuple(model for model in runner.models if model.location != str(NOT_PULLED)))
            for runner in config.runners or ()
        ),
    )


def _with_value(document: Document, other: Mapping[str, Any], steps: list[str]) -> Document:
    """Returns a document with the value of another one at a path; without it where the other one has none."""
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
    """Writes the document of a configuration in force, for the processes that serve by it. Raises OSError."""
    text = yaml.safe_dump(plain_document(document), sort_keys=False, allow_unicode=True)
    replace_file(path, text.encode())
