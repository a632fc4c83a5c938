"""From one machine to its network: `weft up --host 0.0.0.0` on one, `weft runner join` with its line on another."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from join_process import make_token, running_join
from kit.fake_backend import run_fake_backend
from mesh_process import (
    START_SECONDS,
    WEFT,
    MeshProcess,
    eventually,
    fake_runner,
    run_weft,
    running_mesh,
    user_environment,
    write_config,
)
from nat_world import MESH_ADDRESS, NatWorld, Place, nat_world

from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.client import connect_async
from weft_app.compose.invitation import parse_invitation
from weft_app.compose.join_address import Trust
from weft_testing.free_port import free_port

FETCH = """
import hashlib, http.client, json, ssl, sys
host, port, pin = sys.argv[1], int(sys.argv[2]), sys.argv[3]
open_context = ssl.create_default_context()
open_context.check_hostname, open_context.verify_mode = False, ssl.CERT_NONE
first = http.client.HTTPSConnection(host, port, timeout=10, context=open_context)
first.request("GET", "/ca.pem")
pem = first.getresponse().read().decode()
first.close()
if "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest() != pin:
    sys.exit("another fingerprint")
trusted = ssl.create_default_context(cadata=pem)
second = http.client.HTTPSConnection(host, port, timeout=10, context=trusted)
second.request("GET", "/v1/models", headers={"authorization": "Bearer " + sys.argv[4]})
answer = second.getresponse()
print(answer.status, [model["id"] for model in json.loads(answer.read()).get("data", ())])
second.close()
"""
"""What docs/security.md tells clients to do: fetch the authority, compare its fingerprint, trust it."""


GET = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"x-api-key": sys.argv[2]})
with urllib.request.urlopen(request, timeout=10) as answer:
    print(answer.status)
"""


@pytest.fixture(scope="module")
def world() -> Iterator[NatWorld]:
    with nat_world() as world:
        yield world


@contextmanager
def _mesh_for_others(folder: Path, world: NatWorld, *arguments: str) -> Iterator[MeshProcess]:
    # Short, as its processes need sockets: their paths have at most 100 bytes.
    (folder / "m").mkdir()
    config = write_config(folder / "m", fake_runner("a"))
    options = ("--config", str(config), "--host", "0.0.0.0", "--join-port", "0", *arguments)
    with running_mesh(folder / "m" / "home", *options, within=world.mesh.enter) as mesh:
        yield mesh


def _banner(mesh: MeshProcess) -> str:
    return (mesh.home.parent / "home.out").read_text()


def _call_from(place: Place, port: int, pin: str, key: str) -> subprocess.CompletedProcess[str]:
    return _run_in(place, FETCH, MESH_ADDRESS, str(port), pin, key)


def _run_in(place: Place, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*place.enter, sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


async def _first_access(mesh: MeshProcess) -> tuple[str, list[str]]:
    """The first key, and the words of the line with which a laptop joins."""
    for name in ("first-admin-key", "first-invitation"):
        await eventually((mesh.home / name).exists, 10, f"there is no {name}")
        assert (mesh.home / name).stat().st_mode & 0o777 == 0o600
    key, line = ((mesh.home / name).read_text().strip() for name in ("first-admin-key", "first-invitation"))
    return key, line.split(" ")


async def test_laptop_joins_a_gpu_box_with_one_command_on_each(tmp_path: Path, world: NatWorld) -> None:
    with _mesh_for_others(tmp_path, world) as mesh:
        key, line = await _first_access(mesh)
        assert line[:3] == ["weft", "runner", "join"]
        (tmp_path / "laptop").mkdir()
        runner = fake_runner("laptop", pool="laptops", answer_tokens=3)
        runner["models"][0] |= {"name": "llama", "publish": True}
        config = write_config(tmp_path / "laptop", runner)
        home, laptop_of = tmp_path / "laptop" / "home", world.laptop.enter
        with running_join(home, line[3], "", "--config", str(config), within=laptop_of) as laptop:
            await laptop.until("joined as laptop: llama")
            # Commands of the same home go on working, without a key and without knowing of the certificate.
            async with connect_async(home=mesh.home) as client:
                events = [event async for event in client.chat("llama", "hi")]
            assert "".join(event.delta.text for event in events) == "tok0 tok1 tok2"
            facts = mesh.facts
            port, pin = int(facts["url"].rpartition(":")[2]), _fingerprint(mesh)
            assert facts["networkUrls"][0] == f"https://{MESH_ADDRESS}:{port}"
            answered = _call_from(world.laptop, port, pin, key)
            assert answered.stdout.startswith("200 ["), answered
            assert "laptops" in answered.stdout
            assert _call_from(world.laptop, port, pin, "weft_none").stdout.startswith("401 ")
            refused = _call_from(world.laptop, port, f"sha256:{'0' * 64}", key)
            assert (refused.returncode, refused.stderr.strip()) == (1, "another fingerprint")
            assert await laptop.stop() == 0
        await _refuses_another_fingerprint(tmp_path, line[3], config, world)


async def _refuses_another_fingerprint(folder: Path, invitation: str, config: Path, world: NatWorld) -> None:
    found = parse_invitation(invitation)
    forged = replace(found, addresses=found.addresses[:1], trust=Trust(fingerprint=f"sha256:{'0' * 64}")).text
    within = world.laptop.enter
    with running_join(folder / "laptop" / "home", forged, "", "--config", str(config), within=within) as laptop:
        assert await laptop.exit_code() == 1
        assert "another certificate" in laptop.output


def _fingerprint(mesh: MeshProcess) -> str:
    """As the banner shows it."""
    shown = _banner(mesh).split("clients trust", 1)[1].split("sha256:", 1)[1]
    return f"sha256:{shown[:64]}"


@pytest.mark.nightly("repeats starts of a mesh")
async def test_first_key_is_created_once_and_kept_out_of_the_output(tmp_path: Path, world: NatWorld) -> None:
    with _mesh_for_others(tmp_path, world, "--insecure") as mesh:
        key, line = await _first_access(mesh)
        banner = _banner(mesh)
        assert key not in banner
        assert line[3] not in banner
        assert "plain HTTP" in banner
        assert mesh.url.startswith("http://127.0.0.1:")
        assert not (mesh.home / "state" / "edge").exists()
        answered = _run_in(world.laptop, GET, f"{mesh.facts['networkUrls'][0]}/v1/models", key)
        assert answered.stdout.strip() == "200", answered.stderr
        for name in ("first-admin-key", "first-invitation"):
            (mesh.home / name).unlink()
        assert mesh.stop() == 0
    (tmp_path / "again").mkdir()
    config, home = tmp_path / "m" / "weft.yaml", mesh.home
    options = ("--config", str(config), "--host", "0.0.0.0", "--join-port", "0")
    with running_mesh(home, *options, within=world.mesh.enter) as mesh:
        await eventually(lambda: "stop with Ctrl-C" in _banner(mesh), 10, "no banner")
        assert not (home / "first-admin-key").exists()
        assert "callers need one: weft keys create" in _banner(mesh)
        code, out, error = await run_weft("keys", "list", "-o", "json", home=home)
        assert code == 0, error
        keys: list[dict[str, Any]] = json.loads(out)["items"]
        assert [each["description"] for each in keys] == ["created at the first start of weft up"]


async def test_batch_uses_the_mesh_certificate_and_rejects_a_foreign_host_name(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    with running_mesh(tmp_path / "home", "--config", str(config), "--tls", "auto") as mesh:
        assert mesh.url.startswith("https://127.0.0.1:")
        assert not (mesh.home / "first-admin-key").exists()
        lines = tmp_path / "lines.jsonl"
        body = {"model": "m-a", "messages": [{"role": "user", "content": "hi"}]}
        lines.write_text(
            json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}) + "\n"
        )
        out = await mesh.weft("batch", "submit", str(lines))
        assert "batch" in out
        async with aiohttp.ClientSession() as http:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await http.get(f"{mesh.url}/v1/models")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "99999"), "--port"),
        (("--grpc-port", "99999"), "--grpc-port"),
        (("--join-port", "-1"), "--join-port"),
        (("--host", "nowhere.invalid"), "--host: 'nowhere.invalid' is not an address of this machine"),
        (("--insecure", "--tls", "auto"), "--insecure: cannot be combined with --tls auto"),
    ],
)
async def test_rejected_option_is_named_as_typed(tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    config = write_config(tmp_path, fake_runner("a"))
    code, _, error = await run_weft("up", "--config", str(config), *arguments, home=tmp_path / "home")
    assert code == 2
    assert words in error
    assert "weft.yaml" not in error


async def test_service_on_a_port_is_found_by_its_home(tmp_path: Path) -> None:
    """`weft serve registry --listen ... --home H`, then `weft mesh health --home H`: there was no mesh."""
    home = tmp_path / "home"
    arguments = ("serve", "registry", "--home", str(home), "--listen", f"127.0.0.1:{free_port()}")
    process = await asyncio.create_subprocess_exec(
        *WEFT, *arguments, env=user_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        await eventually((home / "run" / "registry.address").exists, START_SECONDS, "it does not say where it serves")
        code, _, error = await run_weft("mesh", "health", "--home", str(home), home=tmp_path / "elsewhere")
        assert code == 0, error
    finally:
        process.terminate()
        await process.wait()
    assert not (home / "run" / "registry.address").exists()


async def test_laptop_without_a_config_publishes_its_running_engine(tmp_path: Path) -> None:
    config = write_config(tmp_path, relay={"listen": "0.0.0.0:0"})
    (tmp_path / "laptop").mkdir()
    with running_mesh(tmp_path / "home", "--config", str(config)) as mesh:
        made = await make_token(mesh.home)
        invitation = made["joinCommand"].rpartition(" ")[2]
        async with run_fake_backend(answer_tokens=3) as backend:
            home = tmp_path / "laptop" / "home"
            options = ("--name", "laptop", "--url", backend.base_url)
            with running_join(home, invitation, "", *options) as laptop:
                await laptop.until("joined as laptop: all models that its server lists")
                async with connect_async(home=mesh.home) as client:
                    (name,) = await eventually(lambda: _published(mesh), START_SECONDS, "nothing is published")
                    events = [event async for event in client.chat(name, "hi")]
                assert "".join(event.delta.text for event in events) == "tok0 tok1 tok2"
                assert await laptop.stop() == 0
            address = backend.base_url.removeprefix("http://")
            (tmp_path / "laptop" / "weft.yaml").write_text(f"discovery: {{addresses: ['{address}']}}\n")
            with running_join(home, invitation, "") as laptop:
                # Nothing is published that nobody has asked for.
                assert await laptop.exit_code() == 2
                assert f"add --discover=yes or --url {backend.base_url}" in laptop.output
            with running_join(home, invitation, "", "--discover=yes") as laptop:
                await laptop.until("joined as")
                assert backend.base_url in laptop.output
    (tmp_path / "laptop" / "weft.yaml").write_text("discovery: {addresses: ['127.0.0.1:1']}\n")
    with running_join(home, invitation, "", "--discover=yes") as laptop:
        assert await laptop.exit_code() == 2
        assert "nothing to publish" in laptop.output


async def _published(mesh: MeshProcess) -> list[str]:
    """The models of the laptop that are ready."""
    return [
        instance.model
        for runner in await mesh.runners()
        if runner.name == "laptop"
        for instance in runner.capability.instances
        if instance.phase == InstanceState.PHASE_READY
    ]
