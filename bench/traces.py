"""Traces with the shape of two public ones, and of longer conversations, with scenarios for `weft mesh simulate`.

The public ones are Mooncake's (FAST '25, github.com/kvcache-ai/Mooncake, FAST25-release/traces): an hour of
conversations and one of tool-using agents. Two of these have their numbers of requests, mean lengths, and shares of
blocks that an earlier prompt had. Eight engines replay them. A scenario takes the public files as well.

    python -m bench.traces FOLDER
    weft mesh simulate FOLDER/conversation.yaml --against least_loaded
"""

import itertools
import math
import random
import sys
from pathlib import Path
from typing import Any

import msgspec

from weft_extensions.simulate.scenario import BLOCK_TOKENS

SECONDS = 3_540.0
MAX_PROMPT_TOKENS = 126_000
VARIATION = 1.3
"""Standard deviation of lengths over their mean; they are log-normal."""
ADDED_TOKENS = 700.0
"""Mean of what each later request has besides the answer before it."""


SHAPES: dict[str, dict[str, Any]] = {
    "conversation": {
        "requests": 12_031,
        "system_prompts": 1,
        "system_blocks": 1,
        "first_tokens": 11_300,
        "answer_tokens": 343,
        "turns": 1.67,
        "pause_seconds": 60,
    },
    "long-conversation": {
        "requests": 12_031,
        "system_prompts": 1,
        "system_blocks": 1,
        "first_tokens": 8_000,
        "answer_tokens": 343,
        "turns": 8,
        "pause_seconds": 60,
    },
    "tool-agents": {
        "requests": 23_608,
        "system_prompts": 16,
        "system_blocks": 7,
        "first_tokens": 4_550,
        "answer_tokens": 182,
        "turns": 1.6,
        "pause_seconds": 10,
    },
}
SCENARIO = """\
name: {name}
duration_seconds: 3600
hosts: [{{name: gpu, count: 8}}]
models:
  - name: chat
    slots: 32
    loaded: true
    prefill_tokens_per_second: 6000
    decode_tokens_per_second: 40
    context_tokens: 131072
    cache_tokens: 1000000
tenants: [{{name: callers}}]
arrivals: [{{tenant: callers, target: chat, trace: {name}.jsonl}}]
"""


class Line(msgspec.Struct):
    """A request in Mooncake's format, its timestamp in milliseconds."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def trace(
    *,
    requests: int,
    system_prompts: int,
    system_blocks: int,
    first_tokens: float,
    answer_tokens: float,
    turns: float,
    pause_seconds: float,
) -> list[Line]:
    """Returns requests by time.

    Lengths are means: of a conversation's first request besides the system prompt, and of answers. The n-th system
    prompt is chosen in proportion to 1/n; turns are geometric, pauses exponential.
    """
    chance, ids = random.Random(1), itertools.count()  # noqa: S311 - a workload
    systems = [list(itertools.islice(ids, system_blocks)) for _ in range(system_prompts)]
    weights = [1 / number for number in range(1, system_prompts + 1)]
    lines: list[Line] = []
    while len(lines) < requests:
        (blocks,) = chance.choices(systems, weights)
        at, tokens = chance.random() * SECONDS, BLOCK_TOKENS * system_blocks + _length(first_tokens, chance)
        while at < SECONDS and tokens < MAX_PROMPT_TOKENS and len(lines) < requests:
            answer = _length(answer_tokens, chance)
            blocks = [*blocks, *itertools.islice(ids, math.ceil(tokens / BLOCK_TOKENS) - len(blocks))]
            lines.append(Line(round(1_000 * at), tokens, answer, blocks))
            if chance.random() * turns < 1:
                break
            at += chance.expovariate(1 / pause_seconds)
            blocks = blocks[: tokens // BLOCK_TOKENS]
            tokens += answer + _length(ADDED_TOKENS, chance)
    return sorted(lines, key=lambda line: line.timestamp)


def _length(mean: float, chance: random.Random) -> int:
    sigma = math.sqrt(math.log1p(VARIATION**2))
    return max(1, round(chance.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))


def main() -> None:
    """Write the traces and their scenarios."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in SHAPES:
        write(name, folder)


def write(name: str, folder: Path, requests: int | None = None) -> Path:
    """Writes a trace, or its first requests, and its scenario; returns the scenario's path."""
    (folder / f"{name}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(trace(**SHAPES[name])[:requests]))
    found = folder / f"{name}.yaml"
    found.write_text(SCENARIO.format(name=name))
    return found


if __name__ == "__main__":
    main()
