"""Feeds parsers with changed inputs for as long as wanted, and saves those that are neither read nor refused.

    make fuzz ARGS="gguf link --minutes 60"       # without names: all of them, one after the other

With atheris (pip install atheris, in the environment that runs it), inputs are chosen by the code that they reach, and
its own corpus is in --work, so that it goes on where it ended. Exit code 1: something was found.
"""

import argparse
import hashlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

try:
    import atheris  # type: ignore[import-untyped, import-not-found, unused-ignore]
except ImportError:
    atheris = None

from weft.kernel.telemetry.structured_logs import configure_logging

PACKAGES = ["gateway", "runner_svc", "weft", "weft_app"]
with atheris.instrument_imports(include=PACKAGES) if atheris else nullcontext():
    from network_parsers import CORPUS, PARSERS, clean_up, examples

MAX_BYTES = 64 * 1024
SLOW_SECONDS = 2.0
"""Processor time of an input that is a finding."""
MAX_RSS_MIB = 1024
MAX_FINDINGS = 20
"""Of one parser in one run with atheris."""
_HUGE = (
    *(b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\0" * 7),
    *(b"1e999", b"-1", b"9" * 40, b"[" * 200, b"{}", b"null", b'"\\ud800"'),
)


def mutated(content: bytes, numbers: random.Random, others: Sequence[bytes]) -> bytes:
    """Returns the content with one to eight changes."""
    changed = bytearray(content)
    for _ in range(numbers.randint(1, 8)):
        place, size = numbers.randint(0, len(changed)), numbers.randint(1, 16)
        match numbers.randrange(6):
            case 0 if place < len(changed):
                changed[place] ^= 1 << numbers.randrange(8)
            case 1:
                changed[place : place + size] = numbers.choice(_HUGE)
            case 2:
                del changed[place : place + size]
            case 3:
                changed[place:place] = numbers.randbytes(size)
            case 4:
                changed[place:place] = changed[place : place + numbers.randint(1, 200)]
            case _:
                other = numbers.choice(others)
                start = numbers.randint(0, len(other))
                changed[place : place + size] = other[start : start + numbers.randint(1, 200)]
    return bytes(changed[:MAX_BYTES])


def fault_of(name: str, content: bytes) -> Exception | None:
    """Returns what a parser raised that is no refusal, or that it took too long; None: it read or refused it."""
    began = time.process_time()
    try:
        PARSERS[name].judge(content)
    except Exception as error:  # noqa: BLE001 - it is the finding
        return error
    seconds = time.process_time() - began
    return TimeoutError(f"it takes {seconds:.1f} s") if seconds > SLOW_SECONDS else None


def _keep(name: str, content: bytes, fault: Exception) -> None:
    path = CORPUS / name / f"found-{hashlib.sha256(content).hexdigest()[:12]}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    sys.stdout.write(f"{name}: {type(fault).__name__}: {str(fault)[:300]}: {path}\n")
    sys.stdout.flush()


def _place_of(fault: Exception) -> tuple[str, int]:
    """Returns where it was raised, so that each place is reported once."""
    place = fault.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return type(fault).__name__, place.tb_lineno if place is not None else 0


def _by_chance(name: str, seconds: float) -> int:
    """Without atheris. Returns the number of findings."""
    numbers, found, count = random.Random(), set[tuple[str, int]](), 0
    pool = examples(name)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        content, count = mutated(numbers.choice(pool), numbers, pool), count + 1
        fault = fault_of(name, content)
        if fault is not None and (place := _place_of(fault)) not in found:
            found.add(place)
            _keep(name, content, fault)
    sys.stdout.write(f"{name}: {count} inputs in {seconds:.0f} s, {len(found)} findings\n")
    return len(found)


def _by_coverage(name: str, seconds: float, work: Path) -> int:
    """One process after the other, as libFuzzer ends the one that finds something. Returns the number of findings."""
    end, found = time.monotonic() + seconds, 0
    (work / name).mkdir(parents=True, exist_ok=True)
    while (left := end - time.monotonic()) > 1 and found < MAX_FINDINGS:
        arguments = ["--one", name, "--work", str(work), "--minutes", str(left / 60)]
        if not subprocess.run([sys.executable, __file__, *arguments], check=False).returncode:
            break
        found += 1
    sys.stdout.write(f"{name}: {found} findings in {seconds / 60:.1f} minutes\n")
    sys.stdout.flush()
    return found


def _follow_coverage(name: str, seconds: float, work: Path) -> None:
    def judge(content: bytes) -> None:
        if (fault := fault_of(name, content)) is not None:
            _keep(name, content, fault)
            raise fault

    limits = (f"-max_total_time={int(seconds)}", f"-max_len={MAX_BYTES}", f"-rss_limit_mb={MAX_RSS_MIB}", "-timeout=30")
    for number, content in enumerate(examples(name)):
        (work / name / f"example-{number}").write_bytes(content)
    (CORPUS / name).mkdir(exist_ok=True)
    folders = [str(work / name)]
    atheris.Setup([sys.argv[0], *folders, *limits, "-print_final_stats=1", f"-artifact_prefix={work}/"], judge)
    atheris.Fuzz()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PARSERS)}")
    parser.add_argument("--minutes", type=float, default=60.0, help="for each parser")
    parser.add_argument("--work", type=Path, default=Path(".fuzz"), help="folder of atheris' corpus")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    seconds, work = options.minutes * 60, options.work.absolute()
    configure_logging("fuzz", file=Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the end
    if options.one:
        _follow_coverage(options.one, seconds, work)
        return 0
    names = options.names or list(PARSERS)
    counts = [_by_coverage(name, seconds, work) if atheris else _by_chance(name, seconds) for name in names]
    clean_up()
    return int(any(counts))


if __name__ == "__main__":
    sys.exit(main())
