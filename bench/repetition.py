"""What the repetition detector gets right and wrong on its corpus, and what it costs.

python -m bench.repetition                  print the tables
python -m bench.repetition --write          put them into docs/agents.md
python -m bench.repetition --also FOLDER    also count alarms in the text files of a folder
python -m bench.repetition --cost           also measure processor time per token
"""

import argparse
import re
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from runner_svc.policy.repetition import Repetition, RepetitionDetector

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests" / "corpus" / "repetition"
PAGE = ROOT / "docs" / "repetition.md"
BEGIN, END = "<!-- begin measured -->", "<!-- end measured -->"
CHARS_PER_TOKEN = 4
MIN_TAIL_CHARS = 400
"""The end of a loop that is looked for earlier in it, to find where the loop began."""
MAX_FILE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the detector said about one document."""

    name: str
    characters: int
    found: Repetition | None
    at: int
    """How many characters it had read by then; all of them when it found nothing."""
    begins: int | None
    """Where the loop begins in which the document ends; None: it does not end in exact repetition."""


def judge(name: str, text: str) -> Outcome:
    """Feed a document as tokens of four characters."""
    detector, found, at = RepetitionDetector(), None, len(text)
    for start in range(0, len(text), CHARS_PER_TOKEN):
        found = detector.feed(text[start : start + CHARS_PER_TOKEN])
        if found is not None:
            at = min(start + CHARS_PER_TOKEN, len(text))
            break
    return Outcome(name=name, characters=len(text), found=found, at=at, begins=loop_begins(text))


def loop_begins(text: str) -> int | None:
    """Where the exact repetition begins that lasts until the end; None: there is none. Independent of the detector."""
    tail = len(text) - MIN_TAIL_CHARS
    earlier = text.rfind(text[tail:], 0, len(text) - 1) if tail > 0 else -1
    if earlier < 0:
        return None
    period, place = tail - earlier, tail - 1
    while place >= period and text[place] == text[place - period]:
        place -= 1
    return max(place + 1 - period, 0)


def corpus(folder: str) -> list[Outcome]:
    """The outcomes of `legitimate` or `looping`, by name."""
    files = sorted((CORPUS / folder).glob("*.txt"))
    return [judge(file.name, file.read_text(encoding="utf-8")) for file in files]


def tables(legitimate: Sequence[Outcome], looping: Sequence[Outcome]) -> str:
    """The part of docs/agents.md that is measured."""
    lines = ["| good answers | documents | characters | false alarms |", "|---|---|---|---|"]
    for label, part in _parts(legitimate):
        lines.append(f"| {label} | {len(part)} | {_size(part)} | {_alarms(part)} |")
    count = len(legitimate)
    share = f"{3 / count:.1%}" if not _alarms(legitimate) else "see the rows"
    lines += ["", f"Upper bound of the false-positive rate per document, 95 % confidence (3 / {count}): {share}.", ""]
    lines += ["| loops | documents | characters | noticed | missed |", "|---|---|---|---|---|"]
    for label, part in _parts(looping):
        lines.append(f"| {label} | {len(part)} | {_size(part)} | {_alarms(part)} | {len(part) - _alarms(part)} |")
    delays = sorted(item.at - item.begins for item in looping if item.found is not None and item.begins is not None)
    middle, late = round(statistics.median(delays)), delays[int(len(delays) * 0.9)]
    lines += ["", "Characters from where a loop begins until it is noticed: "]
    lines[-1] += f"median {middle:,}, nine of ten at most {late:,}, worst {delays[-1]:,}."
    missed = [item for item in looping if item.found is None]
    lines += ["", "Missed:", "", *(f"- `{item.name}`, {_loop_length(item)}" for item in missed)]
    return "\n".join(lines)


def measured_part(page: str) -> str:
    """What stands between the marks of a page."""
    return page.split(BEGIN, 1)[1].split(END, 1)[0].strip()


def cost_per_token(outcomes_of: Iterable[Path], repetitions: int = 5) -> float:
    """Processor seconds for each token fed, the mean over the documents that have no loop."""
    documents = [path.read_text(encoding="utf-8") for path in outcomes_of]
    tokens = [re.findall(r"(?s).{1,4}", text) for text in documents]
    started = time.process_time()
    for _ in range(repetitions):
        for document in tokens:
            feed = RepetitionDetector().feed
            for token in document:
                feed(token)
    return (time.process_time() - started) / (repetitions * sum(map(len, tokens)))


def judge_folder(folder: Path) -> list[Outcome]:
    """Every text file below a folder."""
    outcomes = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink() or not 100 <= path.stat().st_size <= MAX_FILE_BYTES:
            continue
        try:
            outcomes.append(judge(str(path), path.read_text(encoding="utf-8")))
        except (UnicodeDecodeError, OSError):
            continue  # not a text
    return outcomes


def _parts(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    labels = (("made up", "made-"), ("written once the limits stood", "late-"), ("answers of a model", "model-"))
    parts = [(label, [item for item in outcomes if item.name.startswith(prefix)]) for label, prefix in labels]
    return [*((label, part) for label, part in parts if part), ("all", list(outcomes))]


def _alarms(outcomes: Sequence[Outcome]) -> int:
    return sum(item.found is not None for item in outcomes)


def _size(outcomes: Sequence[Outcome]) -> str:
    return f"{sum(item.characters for item in outcomes):,}"


def _loop_length(item: Outcome) -> str:
    if item.begins is None:
        return "which varies and never repeats exactly"
    return f"where the loop has only {item.characters - item.begins:,} characters before the text ends"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m bench.repetition", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"update {PAGE.relative_to(ROOT)}")
    parser.add_argument("--also", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--cost", action="store_true", help="processor time per token")
    options = parser.parse_args()
    measured = tables(corpus("legitimate"), corpus("looping"))
    print(measured)
    if options.write:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(page.replace(measured_part(page), measured) if measured_part(page) else page)
    for folder in options.also:
        outcomes = judge_folder(folder)
        print(f"\n{folder}: {len(outcomes)} files, {_size(outcomes)} characters, {_alarms(outcomes)} alarms")
        for item in outcomes:
            if item.found is not None:
                print(f"  {item.name}: {item.found}")
    if options.cost:
        print(f"\n{cost_per_token(sorted((CORPUS / 'legitimate').glob('*.txt'))) * 1e6:.2f} us of processor per token")


if __name__ == "__main__":
    main()
