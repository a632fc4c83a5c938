"""The command: `python -m bench [--quick] [--peers] [--only NAME]`."""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Never

from bench import measures
from bench.contender import PEERS, WEFT, Contender, InstallError, ensure_installed, load_contender
from bench.launch import LaunchError, Target, running, running_stub
from bench.machine import describe_machine
from bench.measures import Measure
from bench.placements import measure_placements
from bench.report import Figures, Report, markdown
from bench.scenarios import SCENARIO_NAMES, Options, measure_all
from bench.tasks import measure_tasks

ROOT = Path(__file__).resolve().parent.parent
ORDER = (
    *(value for value in vars(measures).values() if isinstance(value, Measure)),
    *measures.TASK_CLAIM.values(),
)

OWN_SCENARIOS: Mapping[str, Callable[[Options, Figures, Path], None]] = {
    "placements": measure_placements,
    "tasks": measure_tasks,
}
"""What is done to weft alone, each on a mesh of its own."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Measure weft against its goal figures. Writes <output>/<date>.md; asserts nothing.",
    )
    parser.add_argument("--quick", action="store_true", help="3 runs of 2 seconds each, for a first look")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also weft apart, envoy, sglang-router, smg, vllm-router and litellm, installed when missing",
    )
    parser.add_argument(
        "--contender", action="append", type=Path, default=[], metavar="FILE", help="also this one (see README)"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="NAME",
        help=f"only this contender, or this scenario of: {', '.join(SCENARIO_NAMES)}; may be given several times",
    )
    parser.add_argument("--seconds", type=float, help="length of one run; default 5")
    parser.add_argument("--connections", type=int, default=32, help="of the throughput scenarios, 1 to 64; default 32")
    parser.add_argument("--repetitions", type=int, help="runs of each kind; default 5")
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results", help="folder for the result")
    options = parser.parse_args(arguments)
    if not 1 <= options.connections <= 64:
        parser.error("--connections must be 1 to 64: the stub has 64 slots")
    return options


def options_of(arguments: argparse.Namespace) -> Options:
    """How much of everything, with --quick's smaller defaults."""
    quick = arguments.quick
    return Options(
        root=ROOT,
        seconds=arguments.seconds or (2.0 if quick else 5.0),
        connections=arguments.connections,
        repetitions=arguments.repetitions or (3 if quick else 5),
        latency_requests=200 if quick else 500,
        only=frozenset(arguments.only),
    )


def contenders_of(arguments: argparse.Namespace) -> list[Contender]:
    """Whom to measure. Exits with 2 for an unknown name."""
    own = map(load_contender, arguments.contender)
    known = [WEFT, *own, *PEERS]
    names = {contender.name for contender in known}
    unknown = set(arguments.only) - names - set(SCENARIO_NAMES)
    if unknown:
        sys.exit(f"bench: unknown: {', '.join(sorted(unknown))}; contenders: {', '.join(sorted(names))}")
    named = names & set(arguments.only)
    if named:
        return [contender for contender in known if contender.name in named]
    return known if arguments.peers else [contender for contender in known if contender not in PEERS]


def run(options: Options, contenders: Sequence[Contender], figures: Figures, folder: Path) -> None:
    """Measures all contenders in turns, then weft alone; one that does not start is skipped with the reason."""
    with running_stub(ROOT, folder / "stub") as stub:
        if any(map(options.wants, ("memory", "unary", "stream", "latency"))):
            with ExitStack() as started:
                targets = list(_start(contenders, figures, folder, stub, started))
                measure_all(options, figures, stub, targets)
        if WEFT in contenders:
            _measure_weft(options, figures, folder)


def _start(
    contenders: Sequence[Contender], figures: Figures, folder: Path, stub: Target, started: ExitStack
) -> Iterator[Target]:
    for number, contender in enumerate(contenders):
        print(f"bench: {contender.name}", file=sys.stderr, flush=True)
        try:
            ensure_installed(contender, ROOT)
            yield started.enter_context(running(contender, ROOT, folder / str(number), stub))
        except (InstallError, LaunchError) as error:
            figures.skipped.append(f"{contender.name}: {error}")


def _measure_weft(options: Options, figures: Figures, folder: Path) -> None:
    try:
        for name, measure in OWN_SCENARIOS.items():
            if options.wants(name):
                measure(options, figures, folder / name)
    except LaunchError as error:
        figures.skipped.append(f"{WEFT.name}: {error}")


def main() -> None:
    """Measure, write, print."""
    arguments = parse_arguments()
    contenders, options, figures = contenders_of(arguments), options_of(arguments), Figures()
    signal.signal(signal.SIGTERM, _end)
    machine = describe_machine(ROOT)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        run(options, contenders, figures, Path(folder))
    report = Report(
        machine=machine,
        settings={
            "seconds per run": f"{options.seconds:g}",
            "runs": str(options.repetitions),
            "connections": str(options.connections),
            "tokens per stream": str(options.stream_tokens),
        },
        packages={contender.name: " ".join(contender.packages) for contender in contenders if contender.packages},
        rows=figures.rows(ORDER),
        uses=figures.uses,
        skipped=figures.skipped,
    )
    page = arguments.output / f"{machine.date[:10]}{'-quick' if arguments.quick else ''}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(report), "utf-8")
    print(page.read_text("utf-8"))
    print(f"bench: written to {page}", file=sys.stderr)


def _end(number: int, frame: FrameType | None) -> Never:
    """A termination unwinds, so that what was started is ended."""
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
