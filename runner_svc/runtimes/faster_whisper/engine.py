"""The engine: one Whisper model in faster-whisper, which hears a recording piece by piece."""

import argparse
import copy
import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from runner_svc.engine_host.http_server import BUSY, OUT_OF_MEMORY, Caller, RefusedError
from runner_svc.engine_host.media_routes import TranscriptionEngine, TranscriptionRequest
from runner_svc.runtimes.faster_whisper.listening import Library, Listening
from runner_svc.runtimes.faster_whisper.recording import RecordingReader

TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.bin"
UNLOAD_SECONDS = 2.0
"""The library unloads nothing while a thread of it works, which goes on for some ms after the last answer: how long to
ask it again ..."""
UNLOAD_POLL_SECONDS = 0.01
"""... and how often."""
_OUT_OF_MEMORY = "out of memory"


class WhisperEngine(TranscriptionEngine):
    """A loaded model, see Engine."""

    def __init__(self, library: Library, options: argparse.Namespace) -> None:
        """Raises RefusedError for a folder that is no Whisper model, and where the memory does not suffice."""
        self._library, self._options, self.slots = library, options, options.slots
        folder = options.model
        for name in (WEIGHTS_FILE, TOKENIZER_FILE):
            # Without a tokenizer in the folder the library would look for one on the internet.
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
                raise RefusedError(f"{folder} is no Whisper model: {error}") from error

    def transcribe(self, request: TranscriptionRequest, caller: Caller) -> None:
        """See TranscriptionEngine.transcribe."""
        # Of its own, for the model is shared by the threads of several requests.
        model, options = copy.copy(self._model), self._options
        voices = options.voice_detection if request.voice_detection is None else request.voice_detection
        with _memory_errors():
            listening = Listening(self._library, model, request, caller, options.beam_size, detects_voices=voices)
            with RecordingReader(self._library.av, self._library.numpy, request.recording, options) as recording:
                listening.hear(recording)

    def sleep(self) -> None:
        """See Engine.sleep."""
        library, deadline = self._model.model, time.monotonic() + UNLOAD_SECONDS
        library.unload_model()
        while library.model_is_loaded and time.monotonic() < deadline:
            time.sleep(UNLOAD_POLL_SECONDS)
            library.unload_model()
        if library.model_is_loaded:
            raise RefusedError("the engine is at work; its memory cannot be freed now", BUSY)
        with suppress(AttributeError, OSError):
            # Freed memory goes back to the system; glibc keeps it for itself otherwise, others have no such call.
            ctypes.CDLL(None).malloc_trim(0)

    def wake(self) -> None:
        """See Engine.wake."""
        with _memory_errors():
            self._model.model.load_model()


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raises RefusedError with advice where the memory does not suffice."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY not in str(error):
            raise
        advice = "use a smaller compute_type (int8, int8_float16), fewer slots, a smaller beam_size or a smaller model"
        raise RefusedError(f"the memory of the device does not suffice: {advice}", OUT_OF_MEMORY) from error
