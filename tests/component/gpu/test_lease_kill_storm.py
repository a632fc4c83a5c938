"""Programs that hold memory under leases while `weft` and they themselves are killed at any moment.

Engines that find no room on a card die for want of memory and leave a mark: a double booking shows as a mark.
WEFT_TEST_KILLS sets how many programs are run.
"""

import asyncio
import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fake_cards_stage import GIB, Stage, needs_the_fake
from ledger_home import LedgerHome, acquire_command, program

pytestmark = [pytest.mark.nightly("a storm of processes"), needs_the_fake, pytest.mark.timeout(600)]

PROGRAMS = int(os.environ.get("WEFT_TEST_KILLS", "14"))
AT_ONCE = 5
SEED = 20261120
_WORK = """
import os, sys, time
from pathlib import Path
from weft_testing.fake_nvml import FakeCards, OutOfCardMemoryError
cards = FakeCards(Path(os.environ["FAKE_NVML_DIR"]))
visible = [int(number) for number in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")]
print("pid", os.getpid(), flush=True)
time.sleep(float(sys.argv[3]) / 4)
try:
    cards.take(os.getpid(), [(cards.card_at(visible[0]), int(sys.argv[1]))])
except OutOfCardMemoryError:
    Path(sys.argv[2], f"double-booking-{os.getpid()}").touch()
    sys.exit(99)
time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    made = Stage(tmp_path, 8 * GIB, 8 * GIB)
    (tmp_path / "marks").mkdir()
    return made


def _worker(marks: Path, amount: int, seconds: float) -> list[str]:
    return [sys.executable, "-c", _WORK, str(amount), str(marks), str(seconds)]


async def _one(stage: Stage, marks: Path, chance: random.Random) -> str:
    """One program, perhaps with an early end; what became of it."""
    amount, seconds = chance.randint(2, 7) * GIB, chance.uniform(0.3, 1.5)
    options = ("--max-devices", "1", "--wait", "120s")
    command = acquire_command(str(amount), *_worker(marks, amount, seconds), options=options)
    fate = chance.choice(["weft", "weft at once", "worker", "nobody"])
    async with program(stage.environment, *command) as weft:
        if fate == "weft at once":
            await asyncio.sleep(chance.uniform(0.3, 1.2))
            weft.signal(signal.SIGKILL)
        else:
            worker = int((await weft.says("pid ", seconds=240)).split()[1])
            await asyncio.sleep(chance.uniform(0.0, seconds))
            if fate == "weft":
                weft.signal(signal.SIGKILL)
            elif fate == "worker":
                with suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
        # With its output closed nobody of it is left: a worker outlives a killed `weft`.
        await weft.ended(240)
    return fate


async def test_random_program_deaths_neither_double_book_nor_lose_memory(stage: Stage, home: LedgerHome) -> None:
    marks, chance, gate = stage.cards.folder.parent / "marks", random.Random(SEED), asyncio.Semaphore(AT_ONCE)

    async def run(seed: int) -> str:
        async with gate:
            return await _one(stage, marks, random.Random(seed))

    fates = await asyncio.gather(*(run(chance.randrange(2**32)) for _ in range(PROGRAMS)))
    assert len(set(fates)) == 4, "every kind of end has been tried"
    assert list(marks.iterdir()) == []
    whole = acquire_command("16GiB", "true", options=("--wait", "60s"))
    async with program(stage.environment, *whole) as last:
        assert await last.ended(120) == 0, last.text
    await home.until(lambda: home.leases() == [])
    assert stage.cards.held_bytes() == [0, 0]


async def test_same_programs_collide_without_leases(stage: Stage) -> None:
    """The negative control."""
    marks = stage.cards.folder.parent / "marks"

    async def run() -> int:
        async with program(stage.environment, *_worker(marks, 5 * GIB, 2.0)) as worker:
            return await worker.ended(60)

    assert sorted(await asyncio.gather(*(run() for _ in range(3)))) == [0, 99, 99]
    assert len(list(marks.iterdir())) == 2
