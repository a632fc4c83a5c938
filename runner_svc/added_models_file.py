"""The files in which runners keep the models that callers have added."""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.json_format import MessageToJson, Parse, ParseError

from weft.api.runner.v1 import added_model_pb2
from weft.kernel.machine.file_replacement import replace_file
from weft.kernel.telemetry.log import get_logger

SCHEMA_VERSION = 1
MAX_FILE_BYTES = 16 * 1024**2
SUFFIX = ".added.json"
"""Suffix of each runner's file."""

log = get_logger("weft.runner")


def remembered_models(folder: Path) -> list[added_model_pb2.AddedModel]:
    """Returns the added models in the files of all runners in a folder; unreadable files are skipped."""
    found: list[added_model_pb2.AddedModel] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError, ParseError, UnicodeDecodeError):
            found += _parsed(path).models
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftBehind:
    """Added models of a runner that was removed from the configuration, so that no process serves them."""

    runner: str
    models: Sequence[str]
    """Their names, without those that were added to another runner since."""
    file: Path
    """The file to delete to forget them."""


def models_left_behind(folder: Path, runners: Collection[str]) -> list[LeftBehind]:
    """Returns the added models in the files of a folder that belong to none of these runners."""
    added = dict[Path, list[str]]()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError, ParseError, UnicodeDecodeError):
            added[path] = [each.name for each in _parsed(path).models]
    configured = {path for path in added if path.name.removesuffix(SUFFIX) in runners}
    served = {name for path in configured for name in added[path]}
    return [
        LeftBehind(runner=path.name.removesuffix(SUFFIX), models=names, file=path)
        for path in added
        if path not in configured and (names := [name for name in added[path] if name not in served])
    ]


def _parsed(path: Path) -> added_model_pb2.AddedModels:
    with path.open("rb") as file:
        return Parse(file.read(MAX_FILE_BYTES), added_model_pb2.AddedModels(), ignore_unknown_fields=True)


class AddedModelsFile:
    """A runner's file of added models, always replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[added_model_pb2.AddedModel]:
        """Returns the models. Logs an error, sets the file aside and returns none if it is unreadable."""
        try:
            found = _parsed(self._path)
        except FileNotFoundError:
            return []
        except (OSError, ParseError, UnicodeDecodeError) as error:
            log.error("the file of added models cannot be read", file=str(self._path), why=str(error)[:256])  # noqa: TRY400
            self._keep_aside()
            return []
        if found.schema_version > SCHEMA_VERSION:
            log.error("the file of added models was written by a later release of weft", file=str(self._path))
            self._keep_aside()
            return []
        return list(found.models)

    def write(self, models: list[added_model_pb2.AddedModel]) -> None:
        """Replaces the file. Raises OSError and leaves the old file if that fails."""
        message = added_model_pb2.AddedModels(schema_version=SCHEMA_VERSION, models=models)
        replace_file(self._path, f"{MessageToJson(message)}\n".encode())

    def _keep_aside(self) -> None:
        try:
            self._path.replace(self._path.with_suffix(".unreadable"))
        except OSError as error:
            log.warning("file could not be renamed", file=str(self._path), why=error.strerror)
