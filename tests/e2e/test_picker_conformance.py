"""weft's own picker under the suite of endpoint pickers, as each gateway calls it, and behind a real Envoy."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from apart_mesh import running_apart
from mesh_process import fake_runner, run_weft, running_mesh, write_config
from picker_envoy import EnvoyMode, running_gateway

from weft_testing.conformance.findings import Finding, Verdict
from weft_testing.conformance.picker_gateways import GATEWAYS, GatewayName, GatewayProfile
from weft_testing.conformance.picker_request_checks import chat_request
from weft_testing.conformance.picker_suite import PICKER_CHECKS, PickerCheck, examine_picker
from weft_testing.conformance.picker_under_test import PickerAddress, PickerOptions, PickerUnderTest, attach_picker
from weft_testing.free_port import free_ports

pytestmark = pytest.mark.timeout(240)
SLOTS = 16
STREAMS = 12
MODEL = "pool"


@dataclass(frozen=True, slots=True)
class Mesh:
    """A running mesh with a picker."""

    picker_port: int
    health_port: int
    runner_ports: tuple[int, int]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("picker")
    first = free_ports(4)
    ports = (first, first + 1)
    runners = [
        fake_runner(name, slots=SLOTS, answer_tokens=40, tokens_per_second=2000) | {"http_port": port}
        for name, port in zip(("a", "b"), ports, strict=True)
    ]
    # Without an HTTP API of its own no gateway reaches it.
    runners.append(fake_runner("c", pool="unreached"))
    picker = {"listen": f"127.0.0.1:{first + 2}", "health_listen": f"127.0.0.1:{first + 3}"}
    config = write_config(folder, *runners, picker=picker, host="127.0.0.1")
    with running_mesh(folder / "home", "--config", str(config)):
        yield Mesh(first + 2, first + 3, ports)


SUBSET_CHECKS = tuple(each for each in PICKER_CHECKS if each.name.startswith("subset-"))


async def findings(
    mesh: Mesh, profile: GatewayProfile, checks: tuple[PickerCheck, ...] = PICKER_CHECKS
) -> dict[str, Finding]:
    address = PickerAddress.parse(f"127.0.0.1:{mesh.picker_port}", f"127.0.0.1:{mesh.health_port}")
    options = PickerOptions(model=MODEL, unready_model="unreached", max_filling=8 * SLOTS)
    async with attach_picker(address, profile, options) as picker:
        return {finding.check: finding async for finding in examine_picker(picker, checks)}


@pytest.mark.heavy
@pytest.mark.parametrize("profile", GATEWAYS.values(), ids=GATEWAYS.keys())
async def test_the_picker_honours_every_promise_to_each_gateway(mesh: Mesh, profile: GatewayProfile) -> None:
    found = await findings(mesh, profile)
    assert {name: each.detail for name, each in found.items() if each.verdict is Verdict.BROKEN} == {}
    unchecked = {name for name, each in found.items() if each.verdict is Verdict.NOT_CHECKED}
    responses = {name for name in found if name.startswith("response-")} | {"no-early-close", "served-endpoint"}
    lists = {"one-destination"} if profile.max_destinations is None else set[str]()
    assert unchecked == {"tls"} | lists | (set() if profile.sees_responses else responses)


async def test_subsets_name_engines_that_gateways_call_themselves(tmp_path: Path) -> None:
    first = free_ports(4)
    runners = [fake_runner(name, slots=SLOTS) | {"http_port": first + each} for each, name in enumerate("ab")]
    for each in runners:
        each["models"][0]["lane"] = "engine"
    picker = {"listen": f"127.0.0.1:{first + 2}", "health_listen": f"127.0.0.1:{first + 3}"}
    config = write_config(tmp_path, *runners, picker=picker, host="127.0.0.1")
    with running_mesh(tmp_path / "home", "--config", str(config)):
        mesh = Mesh(first + 2, first + 3, (first, first + 1))
        found = await findings(mesh, GATEWAYS[GatewayName.AGENTGATEWAY], SUBSET_CHECKS)
    assert {"subset-list", "subset-text"} <= set(found)
    assert {name: each.detail for name, each in found.items() if each.verdict is not Verdict.HONOURED} == {}


@contextmanager
def secure_picker(folder: Path) -> Iterator[Mesh]:
    """A mesh of processes apart whose picker serves TLS with its own certificate, and has the hooks."""
    first = free_ports(4)
    config = write_config(folder, fake_runner("a", pool=MODEL, slots=SLOTS))
    listen = ("--listen", f"127.0.0.1:{first + 2}", "--health", f"127.0.0.1:{first + 3}")
    pool = ("--pool-name", "weft", "--pool-namespace", "weft")
    with running_apart(folder, config, ("registry",)) as mesh:
        mesh.start("picker", *listen, *pool, "--secure-serving", "--conformance-hooks")
        mesh.start("runner", "--http-port", str(first))
        yield Mesh(first + 2, first + 3, (first, first + 1))


async def test_the_secure_picker_of_a_mesh_apart_honours_every_promise_with_its_hooks_on(tmp_path: Path) -> None:
    with secure_picker(tmp_path) as mesh:
        address = PickerAddress.parse(f"https://127.0.0.1:{mesh.picker_port}", f"127.0.0.1:{mesh.health_port}")
        options = PickerOptions(model=MODEL, hooks=True, max_filling=0)
        async with attach_picker(address, GATEWAYS[GatewayName.AGENTGATEWAY], options) as picker:
            await until_routed(picker)
            found = {finding.check: finding async for finding in examine_picker(picker, PICKER_CHECKS)}
    assert {name: each.detail for name, each in found.items() if each.verdict is Verdict.BROKEN} == {}
    assert {name for name, each in found.items() if each.verdict is Verdict.NOT_CHECKED} == {"no-endpoint", "shed"}
    assert found["tls"].detail.startswith("self-signed, until ")


async def until_routed(picker: PickerUnderTest) -> None:
    """Returns once the picker knows the runner."""
    async with asyncio.timeout(30.0):
        while (await picker.ask(chat_request(picker))).refusal is not None:  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.05)


async def test_a_port_on_all_addresses_needs_keys_where_the_certificate_is_self_signed(tmp_path: Path) -> None:
    config = write_config(tmp_path, fake_runner("a"), auth={"required": False})
    command = ("serve", "picker", "--config", str(config), "--registry", "127.0.0.1:1", "--grpc-port", "19002")
    code, _, errors = await run_weft(*command, "--secure-serving", home=tmp_path / "home")
    assert code == 2
    assert "--secure-serving: 0.0.0.0:19002 is not on this machine, which needs auth.required: true" in errors


@pytest.mark.parametrize("mode", list(EnvoyMode))
async def test_answers_of_runners_pass_a_real_envoy_whole(mesh: Mesh, tmp_path: Path, mode: EnvoyMode) -> None:
    endpoints = [f"127.0.0.1:{port}" for port in mesh.runner_ports]
    with running_gateway(tmp_path, mesh.picker_port, endpoints, mode) as url:
        async with aiohttp.ClientSession() as http:
            texts = await asyncio.gather(*(streamed(http, url) for _ in range(STREAMS)))
            assert {text.count('"content"') for text in texts} == {texts[0].count('"content"')}
            assert all(text.rstrip().endswith("data: [DONE]") for text in texts)
            async with http.post(f"{url}/v1/chat/completions", json={"model": "no-such"}) as refused:
                assert refused.status in {400, 404}
                assert "error" in await refused.json()


async def streamed(http: aiohttp.ClientSession, url: str) -> str:
    """The whole answer to a question, as it came."""
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        return text
