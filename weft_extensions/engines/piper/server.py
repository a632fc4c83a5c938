"""The server program of piper.

PYTHON .../weft_extensions/engines/engine_host/bootstrap.py weft_extensions.engines.piper.server --folder FOLDER
"""

import argparse
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_extensions.engines.engine_host.http_server import (
    Caller,
    FieldRefusedError,
    RefusedError,
    import_library,
    positive,
    program_parser,
    serve,
)
from weft_extensions.engines.engine_host.speech import SpeechEngine, SpeechRequest, Voice
from weft_extensions.engines.piper.voices import VoiceFiles, find_voices

INPUTS = frozenset({"input", "input_lengths", "scales"})
SPEAKER_INPUT = "sid"


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoadedVoice:
    voice: Any
    """The library's voice object."""
    rate: int
    length_scale: float


class PiperSpeaker:
    """Voices in files, see Speaker. Keeps the most recently used ones in memory."""

    def __init__(self, piper: Any, onnx: Any, voices: Sequence[VoiceFiles], *, threads: int, max_loaded: int) -> None:
        """`piper` and `onnx`: the libraries piper and onnxruntime."""
        self._piper, self._onnx = piper, onnx
        self._files = {files.name: files for files in voices}
        self._threads, self._max_loaded = threads, max_loaded
        self._loaded: OrderedDict[str, _LoadedVoice] = OrderedDict()
        self._loading = threading.Lock()

    @property
    def voices(self) -> Sequence[Voice]:
        """See Speaker.voices."""
        return [files.voice for files in self._files.values()]

    def sample_rate(self, voice: str) -> int:
        """See Speaker.sample_rate."""
        return self.load(voice).rate

    def samples(self, text: str, request: SpeechRequest, caller: Caller) -> Iterator[bytes]:
        """See Speaker.samples."""
        del caller
        loaded = self.load(request.voice)
        number = self._files[request.voice].speakers.get(request.speaker)
        wanted = self._piper.SynthesisConfig(speaker_id=number, length_scale=loaded.length_scale / request.speed)
        for chunk in loaded.voice.synthesize(text, wanted):
            yield chunk.audio_int16_bytes

    def load(self, name: str) -> _LoadedVoice:
        """Loads a voice if necessary and returns it. Raises RefusedError for invalid files."""
        with self._loading:
            loaded = self._loaded.get(name)
            if loaded is None:
                loaded = self._loaded[name] = self._load(name)
                while len(self._loaded) > self._max_loaded:
                    # Running requests keep a reference to their voice.
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(name)
            return loaded

    def _load(self, name: str) -> _LoadedVoice:
        files = self._files.get(name)
        if files is None or files.fault:
            raise FieldRefusedError("voice", f"{name} cannot be used: {files.fault if files else 'unknown'}")
        try:
            session, configuration = self._session(files.model), self._piper.PiperConfig.from_dict(files.configuration)
            voice = self._piper.PiperVoice(
                session=session, config=configuration, download_dir=Path("/dev/null/no-downloads")
            )
            _check_inputs(session, configuration.num_speakers)
            return _LoadedVoice(
                voice=voice, rate=int(configuration.sample_rate), length_scale=float(configuration.length_scale)
            )
        except RefusedError:
            raise
        except Exception as error:  # noqa: BLE001 - the library raises various errors for unreadable files
            message = " ".join(str(error).split())[:300]
            raise FieldRefusedError("voice", f"{name} cannot be loaded: {message}") from None

    def _session(self, model: Path) -> Any:
        options = self._onnx.SessionOptions()
        options.intra_op_num_threads = self._threads
        return self._onnx.InferenceSession(str(model), sess_options=options, providers=["CPUExecutionProvider"])


def _check_inputs(session: Any, speaker_count: int) -> None:
    """Raises RefusedError if the model is not a piper voice."""
    needed = INPUTS | {SPEAKER_INPUT} if speaker_count > 1 else INPUTS
    names = {each.name for each in session.get_inputs()}
    if not needed <= names <= needed | {SPEAKER_INPUT}:
        raise FieldRefusedError(
            "voice",
            f"its model has the inputs {', '.join(sorted(names))[:200]} instead of {', '.join(sorted(needed))}",
        )


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = program_parser("piper_server", __doc__, needs_model=False)
    parser.add_argument("--voice", action="append", default=[], help="NAME=PATH of a voice, repeatable")
    parser.add_argument("--default-voice", default="", help="voice that is loaded at startup")
    parser.add_argument("--max-loaded-voices", type=positive, default=4, help="the least recently used one makes room")
    return parser.parse_args(argv)


def named_voices(texts: list[str]) -> Mapping[str, Path]:
    """Parses NAME=PATH flags of voices."""
    pairs = [text.partition("=") for text in texts]
    return {name: Path(path) for name, _, path in pairs}


def load(options: argparse.Namespace) -> SpeechEngine:
    """Finds the voices and loads the default one. Raises ImportError, RefusedError."""
    piper, onnx, encoders = map(import_library, ("piper", "onnxruntime", "av"))
    voices = find_voices(options.model, named_voices(options.voice))
    speaker = PiperSpeaker(piper, onnx, voices, threads=options.threads, max_loaded=options.max_loaded_voices)
    usable = [voice.name for voice in voices if not voice.fault]
    speaker.load(options.default_voice or (usable or [voices[0].name])[0])
    return SpeechEngine(speaker, encoders, options.slots)


def main() -> None:
    """Loads the voices and serves requests."""
    serve(load, parse_arguments())


if __name__ == "__main__":
    main()
