"""A laptop and a mesh over time: restarts, revoked tokens, and links that come and go."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from join_process import capturing_proxy, laptop_server, make_token, relay_facts, running_join
from kit.fake_backend import run_fake_backend
from mesh_process import MeshProcess, eventually, run_weft, running_mesh, write_config

from runner_svc.policy.backoff import RedialLimits
from weft.api.registry.v1 import runner_pb2
from weft_testing.free_port import free_port

FLAPS = 3
"""Losses, with two dials each: by the third a wait that did not begin anew would be longer than a first one."""
MANY_FLAPS = 8
"""By then a wait that began anew only after a steady session would be up to half a minute."""
DIALS_PER_ABSENCE = 2
_WAIT = re.compile(r"trying again in ([0-9.]+) s")


@pytest.fixture(scope="module")
def plain_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    folder = tmp_path_factory.mktemp("again")
    config = write_config(folder, relay={"listen": "127.0.0.1:0"})
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


async def _chat(mesh: MeshProcess, **changes: Any) -> int:
    body = {"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **changes}
    async with aiohttp.ClientSession() as http, http.post(f"{mesh.url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def _ready(mesh: MeshProcess) -> None:
    async def answers() -> bool:
        return await _chat(mesh) == 200

    await eventually(answers, 15.0, "llama does not answer")


async def test_laptop_reconnects_after_the_mesh_was_killed(tmp_path: Path) -> None:
    config = write_config(tmp_path, relay={"listen": f"127.0.0.1:{free_port()}"})
    home = tmp_path / "home"
    async with run_fake_backend() as backend:
        with running_mesh(home, "--config", str(config)) as mesh:
            token, url = (await make_token(home))["token"], relay_facts(home)["url"]
            with running_join(tmp_path / "laptop", url, token, *laptop_server(backend.base_url)) as laptop:
                await laptop.until("joined as laptop")
                await _ready(mesh)
                (before,) = await mesh.runners()
                mesh.stop(signal.SIGKILL)
                await laptop.until("no link")
                with running_mesh(home, "--config", str(config)) as again:
                    await _ready(again)
                    (after,) = await again.runners()
                    assert (after.name, after.incarnation) == (before.name, before.incarnation)
                    assert after.status == runner_pb2.Runner.STATUS_ACTIVE
                    code, out, _ = await run_weft("get", "models", "-o", "name", home=home)
                    assert (code, out.count("llama")) == (0, 1)
                    assert await laptop.stop() == 0


async def test_revoking_a_token_during_an_outage_ends_the_command_after_the_link_is_lost(
    plain_mesh: MeshProcess, tmp_path: Path
) -> None:
    made = await make_token(plain_mesh.home)
    async with run_fake_backend() as backend, capturing_proxy(relay_facts(plain_mesh.home)["url"]) as proxy:
        with running_join(
            tmp_path / "laptop", proxy.address, made["token"], *laptop_server(backend.base_url)
        ) as laptop:
            await laptop.until("joined as laptop")
            await _ready(plain_mesh)
            assert (await run_weft("runner", "token", "revoke", made["id"], home=plain_mesh.home))[0] == 0
            assert await _chat(plain_mesh) == 200
            proxy.cut()
            assert await laptop.exit_code() == 1
            assert "the join token is not valid; create another: weft runner token create" in laptop.output
            assert "Traceback" not in laptop.output


@pytest.mark.nightly("cuts a link by turns")
@pytest.mark.parametrize(
    "flaps",
    [FLAPS, pytest.param(MANY_FLAPS, marks=pytest.mark.nightly("repeats kills, cuts or swaps of a whole mesh"))],
)
async def test_backoff_resets_after_each_registered_session_of_a_flapping_link(
    plain_mesh: MeshProcess, tmp_path: Path, flaps: int
) -> None:
    """A registered session is a success: the first wait after it is a first one, however many losses there were."""
    token = (await make_token(plain_mesh.home))["token"]
    url = relay_facts(plain_mesh.home)["url"]
    # An answer takes a second, so that a session over which one came has stood long enough to count.
    async with run_fake_backend(tokens_per_second=5.0) as backend, capturing_proxy(url) as proxy:
        with running_join(tmp_path / "laptop", proxy.address, token, *laptop_server(backend.base_url)) as laptop:
            for turn in range(1, flaps + 1):
                await laptop.until("joined as laptop", times=turn)
                await _ready(plain_mesh)
                lost = laptop.output.count("no link")
                proxy.go_down()
                await laptop.until("no link", times=lost + DIALS_PER_ABSENCE)
                proxy.is_down = False
            await laptop.until("joined as laptop", times=flaps + 1)
            said = laptop.output
    first_losses = [absence.partition("no link")[2] for absence in said.split("joined as laptop")[1 : flaps + 1]]
    waits = [float(_WAIT.search(loss)[1]) for loss in first_losses]  # type: ignore[index]  # each says how long
    assert len(waits) == flaps
    assert max(waits) <= RedialLimits().first_seconds
