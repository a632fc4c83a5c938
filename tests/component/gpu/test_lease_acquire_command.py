"""`weft mesh lease acquire` over a real ledger, fake cards and real processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from fake_cards_stage import GIB, Stage, needs_the_fake
from ledger_home import LedgerHome, acquire_command, program, weft_command

from weft.gpu.process import is_alive, process_id_of

pytestmark = [pytest.mark.slow("starts registries and commands on a device"), needs_the_fake]

PYTHON = sys.executable
_SHOW = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'], os.environ['CUDA_DEVICE_ORDER'], flush=True)"
_WORK = f"{_SHOW}; print('pid', os.getpid(), flush=True); import time; time.sleep(120)"
_TIDY = (
    "import os, signal, sys, time\n"
    "def end(number, frame):\n    print('got', number, flush=True); sys.exit(40 + number)\n"
    "[signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]\n"
    "print('pid', os.getpid(), flush=True)\n"
    "time.sleep(120)\n"
)


async def test_command_sees_its_devices_and_its_exit_status_is_returned(stage: Stage, home: LedgerHome) -> None:
    code = f"{_SHOW}; print(os.environ['WEFT_LEASE_ID']); import sys; sys.exit(7)"
    async with program(stage.environment, *acquire_command("10GiB", PYTHON, "-c", code)) as weft:
        assert await weft.ended() == 7
    assert "sees 0,1 PCI_BUS_ID" in weft.lines
    assert "lease-" in weft.text
    await home.until(lambda: home.leases() == [])


async def test_memory_is_reserved_while_the_command_runs_and_freed_afterwards(stage: Stage, home: LedgerHome) -> None:
    command = acquire_command("6GiB", PYTHON, "-c", _WORK, options=("--devices", "1", "--purpose", "night"))
    async with program(stage.environment, *command) as weft:
        await weft.says("sees 1 ")
        assert home.leases() == [("night", "HELD", {1: 6 * GIB})]
        weft.signal(signal.SIGTERM)
        assert await weft.ended() == 128 + signal.SIGTERM
    await home.until(lambda: home.leases() == [], seconds=2.0)


async def test_command_without_room_waits_names_the_holder_and_runs_next(stage: Stage, home: LedgerHome) -> None:
    first = acquire_command("12GiB", PYTHON, "-c", _WORK, options=("--purpose", "first"))
    second = acquire_command("12GiB", PYTHON, "-c", _WORK, options=("--wait", "30s", "--purpose", "second"))
    async with program(stage.environment, *first) as one:
        await one.says("sees 0,1")
        async with program(stage.environment, *second) as two:
            assert "first" in await two.says("waiting: ")
            assert [purpose for purpose, _, _ in home.leases()] == ["first"]
            one.signal(signal.SIGTERM)
            await two.says("sees 0,1")
            assert [purpose for purpose, _, _ in home.leases()] == ["second"]


async def test_memory_of_a_killed_weft_is_not_granted_while_its_command_runs(stage: Stage, home: LedgerHome) -> None:
    async with program(stage.environment, *acquire_command("12GiB", PYTHON, "-c", _WORK)) as one:
        worker = process_id_of(int((await one.says("pid ")).split()[1]))
        assert worker is not None
        one.signal(signal.SIGKILL)
        await one.status()
        await home.until(lambda: [state for _, state, _ in home.leases()] == ["ORPHANED"])
        assert is_alive(worker)
        late = acquire_command("12GiB", PYTHON, "-c", _WORK, options=("--wait", "30s"))
        async with program(stage.environment, *late) as two:
            await two.says("waiting: ")
            await asyncio.sleep(2.0)  # several sightings, all of them with the worker alive
            assert [state for _, state, _ in home.leases()] == ["ORPHANED"]
            os.kill(worker.pid, signal.SIGKILL)
            await two.says("sees 0,1")
            assert [state for _, state, _ in home.leases()] == ["HELD"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
async def test_signals_reach_the_command_and_its_exit_status_is_returned(
    stage: Stage, home: LedgerHome, number: signal.Signals
) -> None:
    async with program(stage.environment, *acquire_command("1GiB", PYTHON, "-c", _TIDY)) as weft:
        await weft.says("pid ")
        weft.signal(number)
        assert await weft.ended() == 40 + number
    assert f"got {number.value}" in weft.text
    await home.until(lambda: home.leases() == [])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
async def test_cancelled_wait_leaves_the_queue(
    stage: Stage, home: LedgerHome, number: signal.Signals, status: int
) -> None:
    async with program(stage.environment, *acquire_command("16GiB", PYTHON, "-c", _WORK)) as one:
        await one.says("sees 0,1")
        async with program(stage.environment, *acquire_command("1GiB", PYTHON, "-c", _WORK)) as two:
            await two.says("waiting: ")
            assert [host.waiting_count for host in home.hosts()] == [1]
            two.signal(number)
            assert await two.ended() == status
        assert "sees" not in two.text
        await home.until(lambda: [host.waiting_count for host in home.hosts()] == [0])


async def test_registry_restart_ends_no_command(stage: Stage, home: LedgerHome) -> None:
    async with program(stage.environment, *acquire_command("12GiB", PYTHON, "-c", _WORK)) as weft:
        await weft.says("pid ")
        before = home.leases()
        await home.stop()
        await asyncio.sleep(2.0)  # longer than the time to live
        await home.start()
        # A gRPC channel takes some seconds to find its way back.
        await home.until(lambda: bool(home.hosts()) and home.leases() == before)
        assert weft.process.returncode is None
        assert [line for line in weft.lines if line.startswith("weft: ")] == weft.lines[:1], "nothing was said of it"


async def test_wait_timeout_names_the_memory_holder(stage: Stage, home: LedgerHome) -> None:
    async with program(stage.environment, *acquire_command("16GiB", PYTHON, "-c", _WORK)) as one:
        await one.says("pid ")
        late = acquire_command("1GiB", PYTHON, "-c", _WORK, options=("--wait", "1500ms"))
        async with program(stage.environment, *late) as two:
            assert await two.ended() == 1
        name = Path(PYTHON).name
        assert name in two.lines[-1]
        assert home.leases() == [(name, "HELD", {0: 8 * GIB, 1: 8 * GIB})], "the program's name is its purpose"


async def test_process_left_running_by_a_command_keeps_its_memory(stage: Stage, home: LedgerHome) -> None:
    code = (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL, start_new_session=True)\n"
        "print('left', left.pid, flush=True)\n"
        "import time; time.sleep(2)\n"
    )
    async with program(stage.environment, *acquire_command("3GiB", PYTHON, "-c", code)) as weft:
        left = process_id_of(int((await weft.says("left ")).split()[1]))
        assert left is not None
        stage.cards.take(left.pid, [(0, GIB)])
        assert await weft.ended() == 0
        assert "1 processes that" in weft.text
        assert [state for _, state, _ in home.leases()] == ["RELEASING"]
        os.kill(left.pid, signal.SIGKILL)
        async with program(stage.environment, *acquire_command("16GiB", PYTHON, "-c", _SHOW)) as late:
            assert await late.ended() == 0


async def test_unrunnable_command_requests_nothing(stage: Stage, home: LedgerHome) -> None:
    async with program(stage.environment, *acquire_command("1GiB", "no-such-program")) as weft:
        assert await weft.ended() == 2
    assert "there is no program 'no-such-program'" in weft.text
    assert home.hosts() == [], "the ledger was not even told of this host"


async def test_list_shows_devices_and_leases(stage: Stage, home: LedgerHome) -> None:
    command = acquire_command("6GiB", PYTHON, "-c", _WORK, options=("--devices", "1", "--purpose", "night"))
    async with program(stage.environment, *command) as one:
        await one.says("pid ")
        assert len(home.leases()) == 1
        async with program(stage.environment, *weft_command("mesh", "lease", "list")) as listing:
            assert await listing.ended() == 0
    assert listing.lines[0].split() == ["HOST", "DEVICE", "TOTAL", "BOOKED", "FOREIGN", "FREE", "USE", "POWER"]
    assert listing.lines[2].split()[-10:] == ["8", "GiB", "6", "GiB", "0", "bytes", "2", "GiB", "?", "?"]
    assert any("night" in line and "held" in line and "6 GiB" in line for line in listing.lines)


async def test_example_holds_memory_while_training(stage: Stage, home: LedgerHome) -> None:
    example = Path(__file__).parents[3] / "examples" / "lease_training.py"
    async with program(stage.environment, PYTHON, "-u", str(example)) as training:
        await training.says("training on devices [0]")
        assert home.leases() == [("training", "HELD", {0: 8 * GIB})]
        assert await training.ended() == 0
    assert "epoch 3 of 3 done" in training.text
    # It named itself, and nobody looks at this host any more: the next one to come sees that it is gone.
    async with program(stage.environment, *acquire_command("16GiB", PYTHON, "-c", _SHOW)) as late:
        assert await late.ended() == 0
