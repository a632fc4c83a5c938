"""Scenarios with the real model: the same llama.cpp process through the mesh and directly."""

from pathlib import Path

import msgspec

from bench import measures
from bench.contender import WEFT, WEFT_REAL
from bench.launch import Target, run_load, running
from bench.load import Result
from bench.measures import Measure
from bench.report import Figures
from bench.scenarios import Options, chat

MODEL_SLOTS = 4
KEY_VARIABLE = "LLAMA_API_KEY"
LONG_PROMPT = "Write a long essay of two thousand words on the history of the Roman Empire, with many details."
"""Far from over after the tokens that are asked for: `ignore_eos` is not part of the API."""


def measure_real(options: Options, figures: Figures, folder: Path, stub: Target) -> None:
    """Tokens per second through the mesh over tokens per second asked directly, in turns."""
    with running(WEFT_REAL, options.root, folder, stub) as target:
        for connections, ratio, rate in (
            (1, measures.REAL_RATIO_ONE, measures.REAL_TOKENS_ONE),
            (MODEL_SLOTS, measures.REAL_RATIO_MANY, measures.REAL_TOKENS_MANY),
        ):
            _measure_ratio(options, figures, target, connections, (ratio, rate))


def _measure_ratio(
    options: Options, figures: Figures, target: Target, connections: int, into: tuple[Measure, Measure]
) -> None:
    body = chat(options.real_tokens, stream=True) | {
        "messages": [{"role": "user", "content": LONG_PROMPT}],
        "temperature": 0,
        "seed": 1,
        "stream_options": {"include_usage": True},
    }
    most = connections * options.real_requests
    mesh = target.job(body, connections=connections, seconds=600.0, max_requests=most, min_events=1)
    # The key that its runner gave it.
    headers = {"Authorization": f"Bearer {target.stub.environ()[KEY_VARIABLE]}"}
    direct = msgspec.structs.replace(mesh, port=target.stub_port, headers=headers)
    for job in (direct, mesh):
        run_load(msgspec.structs.replace(job, max_requests=connections), options.root)
    ratio, rate = into
    for repetition in range(options.repetitions):
        rates: dict[bool, float] = {}
        # The second one finds the processor warmer; so each is second half of the time.
        for through_mesh in (False, True) if repetition % 2 else (True, False):
            result = run_load(mesh if through_mesh else direct, options.root)
            rates[through_mesh] = result.tokens / result.wall_seconds
            name = WEFT.name if through_mesh else "llama.cpp (direct)"
            figures.add(rate, name, rates[through_mesh], _note(result, options))
        figures.add(ratio, WEFT.name, rates[True] / rates[False])


def _note(result: Result, options: Options) -> str:
    expected = result.requests * options.real_tokens
    short = "" if result.tokens == expected else f"{result.tokens} of {expected} tokens"
    return short or (f"{sum(result.failures.values())} failed" if result.failures else "")
