"""A stand-in for faster-whisper: one segment for each window of 29 seconds, whose text is the window's number.

As the real one it works on a window when its segment is asked for: it calls `encode`, and `generate` for each attempt.
SCRIPTED_FASTER_WHISPER holds switches as JSON.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numpy import Samples
from scripted_faults import misbehave_at_load

SWITCHES: dict[str, Any] = json.loads(os.environ.get("SCRIPTED_FASTER_WHISPER", "{}"))
WINDOW_SECONDS = 29
RATE = 16_000

if SWITCHES.get("import_fails"):
    raise ImportError("libctranslate2.so: cannot open shared object file")


class _Library:
    def __init__(self) -> None:
        self.model_is_loaded = True

    def unload_model(self) -> None:
        self.model_is_loaded = False
        sys.stderr.write("unloaded\n")

    def load_model(self) -> None:
        self.model_is_loaded = True

    def encode(self, _: Any) -> None:
        if SWITCHES.get("fault"):
            raise RuntimeError(SWITCHES["fault"])

    def generate(self) -> None:
        time.sleep(float(SWITCHES.get("seconds_per_window", 0.0)))


class WhisperModel:
    frames_per_second = 100

    def __init__(
        self,
        folder: str,
        *,
        device: str,
        compute_type: str,
        cpu_threads: int,
        num_workers: int,
        local_files_only: bool,
    ) -> None:
        assert (Path(folder) / "model.bin").is_file()
        assert local_files_only
        assert os.environ["HF_HUB_OFFLINE"] == "1"
        misbehave_at_load(SWITCHES)
        if fault := SWITCHES.get("load_error"):
            raise RuntimeError(fault)
        sys.stderr.write(f"loaded on {device} as {compute_type}, {cpu_threads} threads, {num_workers} at once\n")
        self.supported_languages = SWITCHES.get("languages", ["en", "nl"])
        self.model = _Library()
        self.hf_tokenizer = SimpleNamespace(encode=_encoded)

    def transcribe(self, audio: Samples, **options: Any) -> tuple[Iterator[Any], Any]:
        sys.stderr.write(f"heard {len(audio) / RATE:g} s with {json.dumps(options)}\n")
        info = SimpleNamespace(language=options["language"] or SWITCHES.get("detects", "en"))
        return self._segments(audio, options), info

    def _segments(self, audio: Samples, options: dict[str, Any]) -> Iterator[Any]:
        seconds = len(audio) / RATE
        for number in range(SWITCHES.get("most_windows", 1_000_000)):
            begin = number * WINDOW_SECONDS
            if begin >= seconds:
                return
            self.model.encode(None)
            for _ in range(SWITCHES.get("attempts", 1)):
                self.model.generate()
            end = min(float(begin + WINDOW_SECONDS), seconds)
            word = SimpleNamespace(start=begin, end=end, word=f" {number}", probability=0.5)
            yield SimpleNamespace(
                seek=begin * self.frames_per_second,
                start=float(begin),
                end=end,
                text=f" {number}",
                tokens=[number],
                temperature=float(SWITCHES.get("temperature", 0.0)),
                avg_logprob=-0.5,
                compression_ratio=1.5,
                no_speech_prob=0.25,
                words=[word] if options["word_timestamps"] else None,
            )


def _encoded(text: str, *, add_special_tokens: bool) -> Any:
    assert not add_special_tokens
    return SimpleNamespace(ids=[ord(letter) for letter in text])
