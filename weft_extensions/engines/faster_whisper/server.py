"""The server program of faster-whisper.

PYTHON .../weft_extensions/engines/engine_host/bootstrap.py weft_extensions.engines.faster_whisper.server --model FOLDER
"""

import argparse
import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weft_extensions.engines.engine_host.ctranslate2 import load_cuda_libraries, unload
from weft_extensions.engines.engine_host.http_server import (
    OUT_OF_MEMORY,
    Caller,
    RefusedError,
    import_library,
    positive,
    program_parser,
    serve,
)
from weft_extensions.engines.engine_host.media_routes import TranscriptionEngine, TranscriptionRequest
from weft_extensions.engines.faster_whisper.listening import Library, Listening
from weft_extensions.engines.faster_whisper.recording import RecordingReader

TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.bin"
_OUT_OF_MEMORY = "out of memory"


class WhisperEngine(TranscriptionEngine):
    """A loaded model, see Engine."""

    def __init__(self, library: Library, options: argparse.Namespace) -> None:
        """Raises RefusedError if the folder contains no Whisper model, or memory is insufficient."""
        self._library, self._options, self.slots = library, options, options.slots
        folder = options.model
        for name in (WEIGHTS_FILE, TOKENIZER_FILE):
            # Without a tokenizer in the folder the library would try to download one.
            if not (folder / name).is_file():
                message = f"{folder / name} does not exist; a model of faster-whisper is a folder with {WEIGHTS_FILE}, "
                raise RefusedError(f"{message}config.json, {TOKENIZER_FILE} and a vocabulary")
        with _memory_errors():
            try:
                self._model = library.whisper.WhisperModel(
                    str(folder),
                    device=options.device,
                    compute_type=options.compute_type,
                    cpu_threads=options.threads,
                    num_workers=options.slots,
                    local_files_only=True,
                )
            except (RuntimeError, ValueError, TypeError) as error:
                if _OUT_OF_MEMORY in str(error):
                    raise
                raise RefusedError(f"{folder} is not a Whisper model: {error}") from error

    def transcribe(self, request: TranscriptionRequest, caller: Caller) -> None:
        """See TranscriptionEngine.transcribe."""
        # Copied because several threads share the model.
        model, options = copy.copy(self._model), self._options
        voices = options.voice_detection if request.voice_detection is None else request.voice_detection
        with _memory_errors():
            listening = Listening(self._library, model, request, caller, options.beam_size, detects_voices=voices)
            with RecordingReader(self._library.av, self._library.numpy, request.recording, options) as recording:
                listening.hear(recording)

    def sleep(self) -> None:
        """See Engine.sleep."""
        unload(self._model.model)

    def wake(self) -> None:
        """See Engine.wake."""
        with _memory_errors():
            self._model.model.load_model()


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises RefusedError with advice if memory is insufficient."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY not in str(error):
            raise
        advice = "use a smaller compute_type (int8, int8_float16), fewer slots, a smaller beam_size or a smaller model"
        raise RefusedError(f"the device does not have enough memory: {advice}", OUT_OF_MEMORY) from error


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = program_parser("faster_whisper_server", __doc__)
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto")
    parser.add_argument("--compute-type", default="int8")
    parser.add_argument("--beam-size", type=positive, default=5)
    parser.add_argument("--voice-detection", action="store_true", help="leave out parts without a voice")
    parser.add_argument("--max-audio-seconds", type=float, default=14_400.0)
    parser.add_argument("--max-audio-bytes", type=positive, default=512 * 1024 * 1024)
    parser.add_argument("--max-channels", type=positive, default=8, help="they are mixed into one")
    parser.add_argument("--min-sample-rate-hz", type=positive, default=4_000)
    parser.add_argument("--max-sample-rate-hz", type=positive, default=192_000)
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> WhisperEngine:
    """Loads the model. Raises ImportError, RefusedError."""
    if options.device != "cpu":
        load_cuda_libraries(Path(sys.prefix))
    library = Library(
        whisper=import_library("faster_whisper"),
        vad=import_library("faster_whisper.vad"),
        av=import_library("av"),
        numpy=import_library("numpy"),
    )
    return WhisperEngine(library, options)


def main() -> None:
    """Loads the model and serves requests."""
    serve(load, parse_arguments())


if __name__ == "__main__":
    main()
