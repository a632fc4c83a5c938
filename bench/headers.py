"""Reading the heads of model files: `python -m bench.headers [FILE ...]`. Prints a table; asserts nothing."""

import argparse
import statistics
import struct
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

from bench.machine import describe_machine
from runner_svc.memory.estimate import read_model_facts
from runner_svc.model_files.gguf import read_gguf_header
from weft_app.compose.demo import demo_model_path

GOAL_MILLISECONDS = 100.0
REPETITIONS = 20
LARGE_VOCABULARY = 262_144
"""Gemma's; the largest in use."""
ROOT = Path(__file__).resolve().parent.parent


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.headers", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="GGUF files; default: the demo model")
    return parser.parse_args(arguments)


def large_vocabulary(path: Path) -> Path:
    """A file with the head of a model with very many words, and no tensors."""
    words = b"".join(struct.pack("<Q", 12) + b"token%07d" % number for number in range(LARGE_VOCABULARY))
    scores = struct.pack("<f", 0.0) * LARGE_VOCABULARY
    entries = (
        _entry(b"tokenizer.ggml.tokens", struct.pack("<IIQ", 9, 8, LARGE_VOCABULARY) + words),
        _entry(b"tokenizer.ggml.scores", struct.pack("<IIQ", 9, 6, LARGE_VOCABULARY) + scores),
        _entry(b"tokenizer.ggml.eos_token_id", struct.pack("<II", 4, LARGE_VOCABULARY - 1)),
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + b"".join(entries))
    return path


def milliseconds(path: Path) -> list[float]:
    """How long each of some readings of a file takes; the file is in the cache of the system from the second on."""
    taken = []
    for _ in range(REPETITIONS):
        began = time.perf_counter()
        read_gguf_header(path)
        taken.append((time.perf_counter() - began) * 1e3)
    return taken


def peak_mebibytes(path: Path) -> float:
    """The most that one reading holds at once."""
    tracemalloc.start()
    try:
        read_model_facts(path)
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


def main() -> None:
    """Measure and print."""
    options = parse_arguments()
    machine = describe_machine(ROOT)
    lines = [
        "# Reading the heads of model files",
        "",
        f"- commit: {machine.commit}",
        f"- machine: {machine.cpu}, {machine.cores} cores; {machine.kernel}; {machine.python}",
        f"- measured at {machine.date}; load average before the run: {machine.load_average:.2f}",
        f"- median of {REPETITIONS} readings; goal: at most {GOAL_MILLISECONDS:g} ms",
        "",
        "| file | median | slowest | memory at once |",
        "| --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as folder:
        made = large_vocabulary(Path(folder) / f"{LARGE_VOCABULARY} words.gguf")
        for path in (*(options.files or (demo_model_path(),)), made):
            taken = milliseconds(path)
            figures = f"{statistics.median(taken):.1f} ms | {max(taken):.1f} ms | {peak_mebibytes(path):.1f} MiB"
            lines.append(f"| {path.name} | {figures} |")
    sys.stdout.write("\n".join(lines) + "\n")


def _entry(key: bytes, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + value


if __name__ == "__main__":
    main()
