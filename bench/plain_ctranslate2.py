"""CTranslate2 asked directly: a plain loop over the library, in its own environment and without weft.

    python plain_ctranslate2.py MODEL_FOLDER SLOTS THREADS
    {"prompt": "...", "streams": 4, "requests": 8, "max_tokens": 64}

Each line of JSON on stdin is one run, and its figures are a line on stdout, with the names of
`bench.load.Result`; its CPU time is for who started it to read.
"""

import json
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

# They are in the environment of the engine alone.
ctranslate2: Any = import_module("ctranslate2")
tokenizers: Any = import_module("tokenizers")


class PlainLoop:
    """A loaded model, which threads ask as the library's documentation shows."""

    def __init__(self, folder: Path, slots: int, threads: int) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._generator = ctranslate2.Generator(
            str(folder), device="cpu", compute_type="int8", inter_threads=slots, intra_threads=threads
        )

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Generates the answers of one run, so many at once."""
        prompt = self._tokenizer.encode(job["prompt"], add_special_tokens=False).tokens
        waiting: SimpleQueue[None] = SimpleQueue()
        for _ in range(job["requests"]):
            waiting.put(None)
        ended: list[tuple[int, float, float]] = []
        started = time.perf_counter()
        workers = [
            threading.Thread(target=self._work, args=(waiting, prompt, job["max_tokens"], ended))
            for _ in range(job["streams"])
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        firsts, latencies = [
            sorted(times) for times in zip(*((first, whole) for _, first, whole in ended), strict=True)
        ]
        tokens = sum(count for count, _, _ in ended)
        return {
            "requests": len(ended),
            "events": tokens,
            "tokens": tokens,
            "failures": {},
            "reconnects": 0,
            "wall_seconds": time.perf_counter() - started,
            "cpu_seconds": 0.0,
            "latency_p50": 1e3 * latencies[len(latencies) // 2],
            "latency_p99": 1e3 * latencies[-1],
            "first_p50": 1e3 * firsts[len(firsts) // 2],
            "first_p99": 1e3 * firsts[-1],
        }

    def _work(
        self, waiting: "SimpleQueue[None]", prompt: list[str], limit: int, ended: list[tuple[int, float, float]]
    ) -> None:
        while True:
            try:
                waiting.get_nowait()
            except Empty:
                return
            started, first, numbers = time.perf_counter(), 0.0, []
            for step in self._generator.generate_tokens(prompt, max_length=limit):
                numbers.append(step.token_id)
                self._tokenizer.decode(numbers[-1:])
                first = first or time.perf_counter() - started
            ended.append((len(numbers), first, time.perf_counter() - started))


def main() -> None:
    """Loads the model, says that it has, and runs what is asked."""
    folder, slots, threads = sys.argv[1:]
    loop = PlainLoop(Path(folder), int(slots), int(threads))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(loop.run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
