"""What a mesh can have a machine do that joined it: serve what it publishes, and nothing else."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from chats import answers
from join_process import laptop_server, make_token, relay_facts, running_join
from kit.fake_backend import run_fake_backend
from mesh_process import MeshProcess, eventually, fake_runner, running_mesh, write_config

from weft.api.runner.v1 import runner_service_pb2 as pb
from weft.api.runner.v1 import runner_service_pb2_grpc
from weft.kernel.channels.rpc import error_from_call, open_channel
from weft.kernel.errors.reasons import Reason
from weft.kernel.values.address import metadata_of


async def _is_refused(mesh: MeshProcess, body: dict[str, Any]) -> None:
    """Checks that a model cannot be added, immediately or by its operation."""
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{mesh.url}/v1/admin/models", json=body) as answer:
            if answer.status != 202:
                assert 400 <= answer.status < 500, await answer.text()
                return
            place = answer.headers["location"]

        async def has_failed() -> bool:
            async with http.get(f"{mesh.url}{place}") as found:
                state = (await found.json())["state"]
            assert state != "succeeded", body
            return bool(state == "failed")

        await eventually(has_failed, 15.0, f"the operation of {body} does not end")


@pytest.mark.parametrize("accepts", [False, True])
async def test_mesh_opens_no_server_variable_or_file_of_a_joined_machine(tmp_path: Path, accepts: bool) -> None:
    config = write_config(tmp_path, relay={"listen": "127.0.0.1:0"})
    (tmp_path / "second").mkdir()
    section = fake_runner("second")
    section["models"] = [{"name": "shown", "path": __file__, "publish": True}, {"name": "diary", "path": __file__}]
    second = write_config(tmp_path / "second", section)
    options = ("--accept-models",) if accepts else ()
    async with run_fake_backend(answer_tokens=2) as backend, run_fake_backend() as private:
        with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
            url, token = relay_facts(mesh.home)["url"], (await make_token(mesh.home))["token"]
            other = (await make_token(mesh.home))["token"]
            with (
                running_join(tmp_path / "laptop", url, token, *laptop_server(backend.base_url), *options) as laptop,
                running_join(tmp_path / "second" / "home", url, other, "--config", str(second), *options) as joined,
            ):
                await laptop.until("joined as laptop")
                await joined.until("joined as second")
                await eventually(partial(answers, mesh.url, "llama"), 15.0, "llama does not answer")
                reach = {"source": private.base_url, "name": "reach", "parameters": {"api_key_env": "LAPTOP_KEY"}}
                for body in (
                    {**reach, "runner": "laptop"},
                    {**reach, "runner": "second"},
                    {"source": __file__, "name": "file", "runner": "second"},
                ):
                    await _is_refused(mesh, body)
                runner = next(each for each in await mesh.runners() if each.name == "second")
                assert not runner.capability.attaches_servers
                async with open_channel(runner.address) as channel:
                    control: Any = runner_service_pb2_grpc.RunnerServiceStub(channel)
                    add = control.AddModel(pb.AddModelRequest(source=__file__), metadata=metadata_of(runner.address))
                    error = await _error(add.read())
                    # With consent the rpc arrives, and requires the registry's permit.
                    assert error is (Reason.PERMIT_INVALID if accepts else Reason.PERMISSION_DENIED)
            async with aiohttp.ClientSession() as http, http.get(f"{mesh.url}/v1/models") as listed:
                names = {model["id"] for model in (await listed.json())["data"]}
            assert not names & {"reach", "file", "diary"}
        assert not (await private.state()).requests_started


async def test_machine_comes_back_without_its_token_until_it_is_revoked(tmp_path: Path) -> None:
    config = write_config(tmp_path, relay={"listen": "127.0.0.1:0"})
    async with run_fake_backend(answer_tokens=2) as backend:
        server = laptop_server(backend.base_url)
        with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
            url, token = relay_facts(mesh.home)["url"], (await make_token(mesh.home))["token"]
            for _ in range(2):
                with running_join(tmp_path / "laptop", url, token, *server) as laptop:
                    await laptop.until("joined as laptop")
            assert (tmp_path / "laptop" / "state" / "machine").stat().st_mode & 0o777 == 0o600
            with running_join(tmp_path / "thief", url, token, *server) as thief:
                assert await thief.exit_code() == 1
                assert "another machine used it" in thief.output
            with running_join(tmp_path / "laptop", url, token, *server) as laptop:
                await laptop.until("joined as laptop")
                (machine,) = json.loads(await mesh.weft("runner", "token", "list", "-o", "json"))["items"]
                assert (machine["type"], machine["names"]) == ("machine", ["laptop", "llama"])
                await mesh.weft("runner", "token", "revoke", machine["id"])
                assert not await mesh.runners()
                assert await asyncio.to_thread(laptop.process.wait, 40.0) == 1
                assert "the machine was revoked" in laptop.output


async def _error(call: Any) -> Reason:
    try:
        await call
    except Exception as error:  # noqa: BLE001 - told below
        return error_from_call(error, Reason.INTERNAL).reason  # type: ignore[arg-type]
    raise AssertionError("the call was answered")
