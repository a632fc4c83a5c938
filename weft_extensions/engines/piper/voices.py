"""Voice files of piper: a model in ONNX with its JSON configuration."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_extensions.engines.engine_host.http_server import RefusedError
from weft_extensions.engines.engine_host.speech import Voice

MAX_VOICES = 512
MAX_SPEAKERS = 1024
"""Maximum number of a voice's speakers that can be selected by name."""
MAX_LOOKED_AT = 20_000
"""Maximum number of files in a folder that is searched for voices."""
MAX_CONFIGURATION_BYTES = 4 * 1024 * 1024
"""The largest file in rhasspy/piper-voices, with 904 speakers, has 30 kB."""
MIN_RATE, MAX_RATE = 8_000, 48_000
SUFFIX = ".onnx"
PHONEMIZERS = ("espeak", "text", "hebrew")
"""Kinds of phonemes that the library generates itself; others need more libraries or downloads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceFiles:
    """A voice and its files."""

    name: str
    model: Path
    configuration: Mapping[str, Any]
    """The JSON configuration; empty: unusable."""
    fault: str = ""
    """Why it is unusable."""

    @property
    def speakers(self) -> Mapping[str, int]:
        """Indexes of the voice's speakers by name; empty: it has one speaker."""
        found = self.configuration.get("speaker_id_map")
        return dict(list(found.items())[:MAX_SPEAKERS]) if isinstance(found, dict) else {}

    @property
    def voice(self) -> Voice:
        """Description of the voice for clients."""
        language = self.configuration.get("language")
        code = language.get("code", "") if isinstance(language, dict) else self._espeak_voice
        return Voice(name=self.name, language=str(code), speakers=list(self.speakers), fault=self.fault)

    @property
    def _espeak_voice(self) -> str:
        espeak = self.configuration.get("espeak")
        return str(espeak.get("voice", "")) if isinstance(espeak, dict) else ""


def find_voices(folder: Path | None, named: Mapping[str, Path]) -> Sequence[VoiceFiles]:
    """Finds the voices in a folder with its subfolders (or in one file); `named` voices come first.

    Raises RefusedError if there is none, or too many.
    """
    models = dict(named)
    if folder is not None:
        for file in _models_in(folder):
            models.setdefault(file.name.removesuffix(SUFFIX), file)
    if not models:
        place = f"{folder}" if folder is not None else "the settings"
        raise RefusedError(f"there is no voice (NAME{SUFFIX} and NAME{SUFFIX}.json) in {place}")
    if len(models) > MAX_VOICES:
        raise RefusedError(f"there are {len(models)} voices; a model has at most {MAX_VOICES}")
    return [read_voice(name, model) for name, model in models.items()]


def read_voice(name: str, model: Path) -> VoiceFiles:
    """Reads a voice's configuration, or records its fault."""
    try:
        configuration = _configuration(model.with_name(f"{model.name}.json"))
        exists = model.is_file() and model.stat().st_size > 0
    except (_FaultyFileError, OSError) as error:
        return VoiceFiles(name=name, model=model, configuration={}, fault=str(error))
    fault = "" if exists else f"there is no model in {model}"
    return VoiceFiles(name=name, model=model, configuration=configuration, fault=fault)


class _FaultyFileError(Exception):
    """A voice file that cannot be used."""


def _models_in(folder: Path) -> Iterable[Path]:
    if folder.is_file():
        return (folder,)
    found: list[Path] = []
    for count, file in enumerate(folder.rglob("*")):
        if count >= MAX_LOOKED_AT:
            raise RefusedError(f"{folder} has more than {MAX_LOOKED_AT} files; name a smaller folder")
        if file.name.endswith(SUFFIX) and file.is_file():
            found.append(file)
    return sorted(found)


def _configuration(file: Path) -> Mapping[str, Any]:
    """Reads the configuration of a voice. Raises _FaultyFileError, OSError."""
    with file.open("rb") as opened:
        data = opened.read(MAX_CONFIGURATION_BYTES + 1)
    if len(data) > MAX_CONFIGURATION_BYTES:
        raise _FaultyFileError(f"{file.name} has more than {MAX_CONFIGURATION_BYTES} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _FaultyFileError(f"{file.name} is not valid JSON: {error}") from None
    fault = _fault_of(found)
    if fault:
        raise _FaultyFileError(f"{file.name} is not a voice configuration: {fault}")
    configuration: Mapping[str, Any] = found
    return configuration


def _fault_of(found: Any) -> str:
    """Returns the fault of a configuration; empty: none found."""
    if not isinstance(found, dict):
        return "it is not an object"
    audio, espeak = found.get("audio"), found.get("espeak")
    rate = audio.get("sample_rate") if isinstance(audio, dict) else None
    sort = found.get("phoneme_type", PHONEMIZERS[0])
    faults = {
        f"audio.sample_rate must be {MIN_RATE} to {MAX_RATE}": isinstance(rate, int) and MIN_RATE <= rate <= MAX_RATE,
        "espeak.voice is missing": isinstance(espeak, dict) and isinstance(espeak.get("voice"), str),
        "phoneme_id_map is missing": isinstance(found.get("phoneme_id_map"), dict),
        "num_symbols must be a whole number": isinstance(found.get("num_symbols"), int),
        "num_speakers must be a whole number": isinstance(found.get("num_speakers"), int),
        "inference is not an object": isinstance(found.get("inference", {}), dict),
        f"phonemes of the type {str(sort)[:32]} are not supported": sort in PHONEMIZERS,
    }
    return next((fault for fault, is_right in faults.items() if not is_right), "")
