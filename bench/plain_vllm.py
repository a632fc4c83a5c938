"""vLLM asked directly: a plain loop over AsyncLLM, in its own environment and without weft.

    python plain_vllm.py FLAGS OF VLLM
    {"prompt": "...", "streams": 4, "requests": 8, "max_tokens": 64}

The lines on stdin and stdout are those of `plain_ctranslate2.py`; what vLLM itself prints goes to stderr.
"""

import asyncio
import json
import os
import sys
import time
from importlib import import_module
from typing import Any


class PlainLoop:
    """A loaded model, which tasks ask as the library's documentation shows."""

    def __init__(self, flags: list[str]) -> None:
        # They are in the environment of the engine alone.
        arguments: Any = import_module("vllm.engine.arg_utils").AsyncEngineArgs
        parser = arguments.add_cli_args(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
        given = arguments.from_cli_args(parser.parse_args(flags))
        self._sampling: Any = import_module("vllm.sampling_params")
        self._engine: Any = import_module("vllm.v1.engine.async_llm").AsyncLLM.from_engine_args(given)
        self._asked = 0

    def close(self) -> None:
        """Ends the library's processes."""
        self._engine.shutdown()

    async def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Generates the answers of one run, so many at once."""
        waiting = iter(range(job["requests"]))
        ended: list[tuple[int, float, float]] = []
        started = time.perf_counter()
        await asyncio.gather(*(self._work(waiting, job, ended) for _ in range(job["streams"])))
        firsts = sorted(first for _, first, _ in ended)
        latencies = sorted(whole for _, _, whole in ended)
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

    async def _work(self, waiting: Any, job: dict[str, Any], ended: list[tuple[int, float, float]]) -> None:
        for _ in waiting:
            self._asked += 1
            sampling = self._sampling.SamplingParams(
                temperature=0, max_tokens=job["max_tokens"], output_kind=self._sampling.RequestOutputKind.DELTA
            )
            started, first, tokens = time.perf_counter(), 0.0, 0
            async for output in self._engine.generate(job["prompt"], sampling, f"r{self._asked}"):
                tokens += len(output.outputs[0].token_ids)
                first = first or time.perf_counter() - started
            ended.append((tokens, first, time.perf_counter() - started))


async def main() -> None:
    """Loads the model, says that it has, and runs what is asked until stdin ends."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        loop = PlainLoop(sys.argv[1:])
        try:
            answers.write("{}\n")
            while line := await asyncio.to_thread(sys.stdin.readline):
                answers.write(json.dumps(await loop.run(json.loads(line))) + "\n")
        finally:
            loop.close()


if __name__ == "__main__":
    asyncio.run(main())
