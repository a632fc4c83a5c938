"""`weft mesh lease acquire` when the ledger says things that a real one seldom says."""

import json
import signal
import sys
import threading

import pytest
from fake_cards_stage import GIB, Stage, needs_the_fake
from ledger_home import WEFT, acquire_command, program, weft_command
from scripted_ledger import Script

from weft.api.registry.v1 import lease_pb2, lease_service_pb2
from weft.gpu.process import is_alive, process_id_of

pytestmark = [pytest.mark.slow("starts registries and commands on a device"), needs_the_fake]

_WORK = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(120)"
_STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_WORK}"
_IMPATIENT = (
    "from weft_app.cli import lease\nlease.TERM_SECONDS = 0.5\nfrom weft_app.cli.main import app\napp(prog_name='weft')"
)
"""`weft` that waits half a second for a command to end."""
_FAMILY = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', sys.argv[1]])\ntime.sleep(120)\n"


async def test_command_with_a_lost_lease_is_ended_with_its_children(stage: Stage, ledger: Script) -> None:
    async with program(stage.environment, *acquire_command("1GiB", sys.executable, "-c", _FAMILY, _WORK)) as weft:
        worker = process_id_of(int((await weft.says("pid ")).split()[1]))
        assert worker is not None
        ledger.is_lost = True
        assert await weft.ended() == 1
        assert not is_alive(worker)
    assert "is lost" in weft.text
    assert weft.lines[-1] == "weft: the command was ended because its lease was lost"
    assert ledger.released == []


async def test_command_that_ignores_termination_is_killed(stage: Stage, ledger: Script) -> None:
    command = acquire_command("1GiB", sys.executable, "-c", _STUBBORN)
    async with program(stage.environment, sys.executable, "-c", _IMPATIENT, *command[len(WEFT) :]) as weft:
        worker = process_id_of(int((await weft.says("pid ")).split()[1]))
        assert worker is not None
        ledger.is_lost = True
        assert await weft.ended() == 1
        assert not is_alive(worker)


async def test_command_does_not_start_before_the_ledger_knows_its_process(stage: Stage, ledger: Script) -> None:
    async with program(stage.environment, *acquire_command("1GiB", sys.executable, "-c", _WORK)) as weft:
        pid = int((await weft.says("pid ")).split()[1])
        assert pid in {process.pid for use in ledger.uses() for process in use.processes}
        first = next(at for at, use in enumerate(ledger.uses()) if use.processes)
        assert first >= 1, "before that the lease had no process"


async def test_weft_killed_before_the_ledger_knows_starts_no_command(stage: Stage, ledger: Script) -> None:
    mark = stage.cards.folder / "began"
    command = acquire_command("1GiB", sys.executable, "-c", f"open({str(mark)!r}, 'w')")
    ledger.is_away_after_uses = 1  # the first renewal is the grant's own; then the process is to be named
    async with program(stage.environment, *command) as weft:
        await weft.says("holds ")
        weft.signal(signal.SIGKILL)
        await weft.ended()  # what was to become the command has gone, too: it had this output
    assert not mark.exists()
    assert not [use for use in ledger.uses() if use.processes]
    ledger.is_away, ledger.is_away_after_uses = False, None
    async with program(stage.environment, *command) as weft:
        assert await weft.ended() == 0
    assert mark.exists(), "the negative control"


async def test_ctrl_c_while_waiting_leaves_the_queue_silently(stage: Stage, ledger: Script) -> None:
    ledger.waits, ledger.hold = ["held by \x1b[31mqwen"], threading.Event()
    async with program(stage.environment, *acquire_command("1GiB", sys.executable, "-c", _WORK)) as weft:
        assert "\x1b" not in await weft.says("waiting: held by")
        weft.signal(signal.SIGINT)
        assert await weft.ended() == 130
    assert ledger.left.wait(10.0)
    assert not ledger.uses()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "8 things"), "--memory: must be an amount"),
        (("--memory", "1GiB", "--devices", "a"), "--devices: must be numbers"),
        (("--memory", "1GiB", "--wait", "soon"), "--wait: must be a time"),
        (("--memory", "1GiB", "--priority", "urgent"), "--priority: must be one of"),
    ],
)
async def test_invalid_options_are_reported(stage: Stage, ledger: Script, options: tuple[str, ...], words: str) -> None:
    async with program(stage.environment, *weft_command("mesh", "lease", "acquire", *options, "--", "true")) as weft:
        assert await weft.ended() == 2
    assert words in weft.text
    assert ledger.acquired == []


async def test_options_after_the_command_belong_to_the_command(stage: Stage, ledger: Script) -> None:
    async with program(stage.environment, *acquire_command("1GiB", "echo", "--memory", "-x", "--")) as weft:
        assert await weft.ended() == 0
    assert weft.lines[-1] == "--memory -x --"
    assert len(ledger.released) == 1


async def test_list_is_available_as_json(stage: Stage, ledger: Script) -> None:
    async with program(stage.environment, *weft_command("mesh", "lease", "list")) as listing:
        assert await listing.ended() == 0
    assert listing.lines == ["no host with accelerators is known"]
    async with program(stage.environment, *weft_command("mesh", "lease", "list", "-o", "json")) as listing:
        assert await listing.ended() == 0
    assert json.loads(listing.text) == {"kind": "HostMemoryList", "items": []}
    assert ledger.renewed == [], "who only looks reports nothing"


async def test_list_shows_unknown_values_and_strips_terminal_escapes(stage: Stage, ledger: Script) -> None:
    device = lease_pb2.Device(index=3, id="GPU-3", name="Card\x1b[31m", total_bytes=8 * GIB)
    holder = lease_pb2.LeaseHolder(kind=lease_pb2.LeaseHolder.KIND_RUNNER, name="runner-a", incarnation="x")
    lease = lease_pb2.Lease(
        lease_id="lease-9",
        fencing_number=9,
        holder=holder,
        purpose="qwen",
        state=lease_pb2.Lease.STATE_ORPHANED,
        shares=[lease_pb2.DeviceBytes(device_index=3, bytes=GIB)],
    )
    memory = lease_service_pb2.DeviceMemory(device=device, booked_bytes=GIB, free_bytes=7 * GIB)
    ledger.known_hosts = [
        lease_service_pb2.HostMemory(
            host="box", source=lease_pb2.HostSighting.SOURCE_UNKNOWN, devices=[memory], leases=[lease]
        )
    ]
    async with program(stage.environment, *weft_command("mesh", "lease", "list")) as listing:
        assert await listing.ended() == 0
    assert "\x1b" not in listing.text
    assert listing.lines[1].split()[-9:] == ["8", "GiB", "1", "GiB", "?", "7", "GiB", "?", "?"]
    assert listing.lines[4].split()[:5] == ["lease-9", "box", "runner-a", "qwen", "orphaned"]
    async with program(stage.environment, *weft_command("mesh", "lease", "list", "-o", "json")) as listing:
        assert await listing.ended() == 0
    (host,) = json.loads(listing.text)["items"]
    assert host["source"] == "unknown"
    assert "foreignBytes" not in host["devices"][0]
    assert host["leases"][0]["fencingNumber"] == 9
    assert host["leases"][0]["bytesByDevice"] == {"3": GIB}
