"""Services on machines whose clocks differ: requests are served by the mesh's time, up to a bound that is said."""

from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from apart_mesh import Apart, running_apart
from chats import chat
from kit.warm_python import warm
from mesh_process import eventually, fake_runner, run_weft, write_config

CLOCK_OFF = warm("kit.clock_off")
QUICK = {"heartbeat_interval_seconds": 0.5, "report_interval_seconds": 0.1}
NOTED_SECONDS = 20.0


def _mesh(folder: Path, **off: str) -> AbstractContextManager[Apart]:
    """A mesh in which the clocks of some services are off."""
    config = write_config(folder, fake_runner("a"), registry=QUICK)
    within = {service: (*CLOCK_OFF, seconds) for service, seconds in off.items()}
    return running_apart(folder, config, within=within)


async def _served(mesh: Apart) -> None:
    async def answers() -> bool:
        status, answer = await chat(mesh.url, max_tokens=2)
        assert status == 200 or answer["error"]["code"] not in ("ticket_expired", "ticket_invalid"), answer
        return status == 200

    await eventually(answers, NOTED_SECONDS, "nobody answers")


async def _refused(mesh: Apart) -> str:
    """What callers are told, once it is that a clock is off."""

    async def says() -> str | None:
        status, answer = await chat(mesh.url, max_tokens=2)
        if status == 200 or answer["error"]["code"] != "clock_off":
            return None
        assert status == 503
        return str(answer["error"]["message"])

    found: str = await eventually(says, NOTED_SECONDS, "the clock is not said to be off")
    return found


async def _described(mesh: Apart, words: str) -> None:
    async def is_shown() -> bool:
        return words in (await run_weft("describe", "runner", "a", home=mesh.home))[1]

    await eventually(is_shown, NOTED_SECONDS, f"{words!r} is not shown")


@pytest.mark.parametrize(
    "seconds", [pytest.param("31", marks=pytest.mark.nightly("the same, another direction")), "-31"]
)
async def test_runner_with_a_clock_30_s_off_serves_and_the_offset_is_shown(tmp_path: Path, seconds: str) -> None:
    """Every request was refused with `ticket_expired`, or its ticket was good for twice as long."""
    with _mesh(tmp_path, runner=seconds) as mesh:
        await _served(mesh)
        way = "ahead of" if seconds == "31" else "behind"
        await _described(mesh, f"its clock is 31 s {way} the mesh's")
        code, out, _ = await run_weft("doctor", "--port", "0", "-o", "json", home=mesh.home)
        assert f"runner a: its clock is 31 s {way} the mesh's" in out
        assert code in (0, 1), out


@pytest.mark.nightly("a clock that is wrong")
@pytest.mark.parametrize("seconds", ["600", "-600"])
async def test_callers_describe_and_doctor_report_a_clock_beyond_the_bound(tmp_path: Path, seconds: str) -> None:
    way = "ahead of" if seconds == "600" else "behind"
    words = f"its clock is 600 s {way} the mesh's"
    with _mesh(tmp_path, runner=seconds) as mesh:
        assert words in await _refused(mesh)
        await _described(mesh, f"{words}, more than is allowed; set it right there (NTP)")
        code, out, _ = await run_weft("doctor", "--port", "0", "-o", "json", home=mesh.home)
        assert (code, f"runner a: {words}; it takes no requests" in out) == (1, True)


@pytest.mark.nightly("a clock that jumps")
async def test_runner_clock_changes_are_tolerated_or_reported(tmp_path: Path) -> None:
    """NTP steps it back by a minute, then somebody sets it wrong, and right again."""
    seconds = tmp_path / "seconds"
    seconds.write_text("0")
    with _mesh(tmp_path, runner=f"@{seconds}") as mesh:
        await _served(mesh)
        seconds.write_text("-60")
        assert (await chat(mesh.url, max_tokens=2))[0] == 200
        seconds.write_text("600")
        assert "its clock is 600 s ahead of the mesh's" in await _refused(mesh)
        seconds.write_text("0")
        await _served(mesh)
