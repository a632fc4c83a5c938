"""The server program of piper.

PYTHON .../runner_svc/engine_host/bootstrap.py runner_svc.runtimes.piper.server --folder FOLDER
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from runner_svc.engine_host.http_server import import_library, serve
from runner_svc.engine_host.speech import SpeechEngine
from runner_svc.runtimes.piper.speaker import PiperSpeaker
from runner_svc.runtimes.piper.voices import find_voices


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parses the flags of this program."""
    parser = argparse.ArgumentParser(prog="piper_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--folder", type=Path, help="folder of voices, or one of them")
    parser.add_argument("--voice", action="append", default=[], help="NAME=PATH of a voice, repeatable")
    parser.add_argument("--default-voice", default="", help="the voice that is loaded at the start")
    parser.add_argument("--threads", type=int, default=1, help="threads per request")
    parser.add_argument("--slots", type=int, default=1, help="requests at once")
    parser.add_argument("--max-loaded-voices", type=int, default=4)
    return parser.parse_args(argv)


def named_voices(texts: list[str]) -> Mapping[str, Path]:
    """Returns the voices of flags as NAME=PATH."""
    pairs = [text.partition("=") for text in texts]
    return {name: Path(path) for name, _, path in pairs}


def load(options: argparse.Namespace) -> SpeechEngine:
    """Finds the voices, and loads the one that is used most. Raises ImportError, RefusedError."""
    piper, onnx, encoders = map(import_library, ("piper", "onnxruntime", "av"))
    voices = find_voices(options.folder, named_voices(options.voice))
    speaker = PiperSpeaker(piper, onnx, voices, threads=options.threads, max_loaded=options.max_loaded_voices)
    usable = [voice.name for voice in voices if not voice.fault]
    speaker.load(options.default_voice or (usable or [voices[0].name])[0])
    return SpeechEngine(speaker, encoders, options.slots)


def main() -> None:
    """Load the voices, then speak."""
    options = parse_arguments()
    serve(lambda: load(options), options.port)


if __name__ == "__main__":
    main()
