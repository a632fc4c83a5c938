"""Measures whether a tenant learns from its time to the first token which prompts another tenant has sent.

python -m bench.cache_isolation                 print the table
python -m bench.cache_isolation --write         put it into docs/memory.md
python -m bench.cache_isolation --probes 200    more probes than usual

Tenant B sends prompts that tenant A has just sent (probes), alternating with new prompts (the comparison). The two
samples of times are compared by their ranks (Mann-Whitney, with ties, normal approximation): a small p means that B
can distinguish them. The control does the same with an engine without isolation of tenants.
"""

import argparse
import asyncio
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner_svc.backend.port import CacheUse, CallInfo
from runner_svc.cache.model_cache import ModelCache, RequestCache
from runner_svc.runtimes.llama_server.backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import llama_command
from runner_svc.runtimes.llama_server.settings import LlamaServerModel
from runner_svc.runtimes.model_engine import ModelContext
from weft.api.common.v1 import completion_pb2, sampling_pb2
from weft.dispatch.frames import has_content
from weft.kernel.request import Handling
from weft_app.compose.demo import demo_model_path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "memory.md"
BEGIN, END = "<!-- begin measured -->", "<!-- end measured -->"
PROBES = 60
SLOTS = 4
SENTENCE = "The parcel number {number} was left at the door of the green house behind the old mill. "
MIN_TELLING_P = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Times to the first token in milliseconds, and how many of the requests found something cached."""

    times: list[float]
    hits: int


def rank_sum_p(left: Sequence[float], right: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney test by its normal approximation; good from 20 values a side on."""
    ordered = sorted([(value, True) for value in left] + [(value, False) for value in right])
    ranks, ties, begin = 0.0, 0.0, 0
    while begin < len(ordered):
        end = begin
        while end < len(ordered) and ordered[end][0] == ordered[begin][0]:
            end += 1
        count = end - begin
        ranks += sum(is_left for _, is_left in ordered[begin:end]) * (begin + end + 1) / 2
        ties += count**3 - count
        begin = end
    n, m, total = len(left), len(right), len(left) + len(right)
    spread = math.sqrt(n * m / 12 * (total + 1 - ties / (total * (total - 1))))
    return 1.0 if not spread else math.erfc(abs(ranks - n * (total + 1) / 2) / spread / math.sqrt(2))


class Bench:
    """One engine that gets requests of two tenants."""

    def __init__(self) -> None:
        self._backend = LlamaServerBackend(
            LlamaServerModel(name="m", path=demo_model_path(), slots=SLOTS, context_tokens=512, threads=1),
            ModelContext(where="model", command=llama_command(None)),
        )
        self._cache = ModelCache("m", self._backend)

    async def measure(self, probes: int, *, isolated: bool) -> tuple[Sample, Sample]:
        """Returns the times of B for prompts that A has sent, and for new prompts."""
        await self._backend.start()
        try:
            await self._first_token("b", _prompt(-1), isolated=isolated)
            probed, fresh = Sample(times=[], hits=0), Sample(times=[], hits=0)
            for number in range(probes):
                secret = _prompt(2 * number)
                await self._first_token("a", secret, isolated=isolated)
                probed = _with(probed, await self._first_token("b", secret, isolated=isolated))
                await self._first_token("a", _prompt(-2 - number), isolated=isolated)
                fresh = _with(fresh, await self._first_token("b", _prompt(2 * number + 1), isolated=isolated))
            return probed, fresh
        finally:
            await self._cache.close()
            await self._backend.stop()

    async def _first_token(self, tenant: str, prompt: str, *, isolated: bool) -> tuple[float, int]:
        """Milliseconds, and cached tokens by the engine's figures."""
        payload = completion_pb2.CompletionPayload(
            prompts=[completion_pb2.PromptInput(text=prompt)], sampling=sampling_pb2.SamplingParams(max_tokens=1)
        )
        began, first, cached = time.perf_counter(), math.nan, 0
        async with RequestCache(self._cache, tenant, Handling()).generating(payload) as turn:
            use = turn.use if isolated else CacheUse()
            async for frame in self._backend.generate(payload, CallInfo(request_id="r", traceparent="", cache=use)):
                turn.worked = True
                if math.isnan(first) and has_content(frame):
                    first = (time.perf_counter() - began) * 1e3
                if frame[-1].HasField("finished"):
                    cached = frame[-1].finished.receipt.usage.cached_prompt_tokens
        return first, cached


def _prompt(number: int) -> str:
    """Prompts of equal length that differ from their first words on."""
    return SENTENCE.format(number=f"{number + 50_000:06d}") * 4


def _with(sample: Sample, outcome: tuple[float, int]) -> Sample:
    return Sample(times=[*sample.times, outcome[0]], hits=sample.hits + (outcome[1] > MIN_CACHED))


MIN_CACHED = 20
"""All prompts of one tenant begin alike for a few tokens."""


def row(name: str, probed: Sample, fresh: Sample) -> str:
    """One line of the table."""
    p = rank_sum_p(probed.times, fresh.times)
    told = "no" if p > MIN_TELLING_P else "**yes**"
    return (
        f"| {name} | {probed.hits} of {len(probed.times)} | {statistics.median(probed.times):.1f} ms "
        f"| {statistics.median(fresh.times):.1f} ms | {p:.2g} | {told} |"
    )


async def table(probes: int) -> str:
    """The measured table."""
    lines = [
        "| | probes that hit | first token of probes, median | of prompts that were never sent | p | can B tell? |",
        "|---|---|---|---|---|---|",
    ]
    for name, isolated in (("as weft runs it", True), ("control: isolation off", False)):
        lines.append(row(name, *await Bench().measure(probes, isolated=isolated)))
    return "\n".join(lines)


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--probes", type=int, default=PROBES)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.probes < 20:
        parser.error("--probes must be at least 20")
    measured = asyncio.run(table(options.probes))
    print(measured)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        block = f"{BEGIN}\n{measured}\n{END}"
        PAGE.write_text(re.sub(f"{BEGIN}.*?{END}", lambda _: block, page, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
