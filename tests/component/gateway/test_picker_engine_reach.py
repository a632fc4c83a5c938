"""Engines on loopback that a proxy of another machine does not reach: their requests go to the runner, or say why."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from picker_stage import fleet_view, grant, picker_stage
from structlog.testing import capture_logs

from gateway.picker.endpoint_addresses import EndpointAddresses
from gateway.picker.engine_reach import EngineReach, proxy_of
from gateway.picker.session import metadata_text
from weft.api.envoy.v1 import external_processor_pb2 as pb
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.dispatch.fleet import FleetView
from weft.kernel.lane_names import DESTINATION, DESTINATION_NAMESPACE
from weft.kernel.reasons import Reason
from weft_testing.fake_clock import FakeClock

GATEWAY = "127.0.0.1:8080"
EVENT = "the proxy does not reach an engine"


def view(url: str = "http://10.0.0.1:8081", *, is_local: bool = True, **changes: Any) -> FleetView:
    """One runner of the machine `h`, whose model says `lane: engine`."""
    found = fleet_view((url,))
    state = InstanceState(model="tiny", engine_lane=True, engine_lane_is_local=is_local)
    runner = replace(found.runners["r1"], instances={"tiny": state}, **changes)
    return replace(found, runners={"r1": runner})


def destination(answer: pb.ProcessingResponse) -> str:
    return metadata_text(answer.dynamic_metadata.fields[DESTINATION_NAMESPACE].struct_value, DESTINATION)


async def test_the_requests_of_an_engine_on_another_machine_go_to_its_runner_and_the_log_says_so_once(
    tmp_path: Path,
) -> None:
    async with picker_stage(tmp_path, view=view(), host="edge") as stage:
        with capture_logs() as logs:
            for number in range(2):
                stage.scheduler.script.put_nowait(grant())
                answers = await stage.ask(x_request_id=f"req-{number}")
                assert destination(answers[0]) == "10.0.0.1:8081"
        (told,) = [each for each in logs if each["event"] == EVENT]
        assert (told["runner"], told["model"], told["instead"]) == ("r1", "tiny", "the runner's HTTP port")
        assert "loopback of h" in told["why"]


@pytest.mark.parametrize(("host", "is_local"), [("h", True), ("edge", False), ("", True)])
async def test_an_engine_that_the_proxy_reaches_is_asked_for_its_slot(
    tmp_path: Path, host: str, is_local: bool
) -> None:
    """The negative control: these grants go to the engine, whose runner is not there to hold the slot."""
    async with picker_stage(tmp_path, view=view(is_local=is_local), host=host) as stage:
        stage.scheduler.script.put_nowait(grant())
        stage.scheduler.script.put_nowait(grant(2))
        async with stage.asking() as call:
            del call
            while not stage.scheduler.failed:
                await stage.scheduler.waited_for.wait()
        assert stage.scheduler.failed[0][1] is not Reason.TOOL_UNAVAILABLE


async def test_without_an_http_port_of_its_runner_such_a_request_goes_to_the_gateway_or_is_refused_in_words(
    tmp_path: Path,
) -> None:
    async with picker_stage(tmp_path, view=view(""), host="edge", gateway=GATEWAY) as stage:
        assert destination((await stage.ask())[0]) == GATEWAY
    async with picker_stage(tmp_path, view=view(""), host="edge") as stage:
        stage.scheduler.script.put_nowait(grant())
        async with stage.asking() as call:
            del call
            while not stage.scheduler.failed:
                await stage.scheduler.waited_for.wait()
        assert stage.scheduler.failed == [(1, Reason.TOOL_UNAVAILABLE)]


@pytest.mark.parametrize(
    ("peer", "proxy"),
    [
        ("unix:", ""),
        ("unix:/run/weft/picker.sock", ""),
        ("ipv4:127.0.0.1:51234", ""),
        ("ipv6:%5B::1%5D:51234", ""),
        ("ipv4:10.0.0.9:51234", "10.0.0.9"),
        ("ipv6:%5B2001:db8::9%5D:51234", "2001:db8::9"),
    ],
)
def test_a_proxy_is_known_by_its_address(peer: str, proxy: str) -> None:
    assert proxy_of(peer) == proxy


@pytest.mark.parametrize(
    ("proxy", "changes", "reaches"),
    [
        ("10.0.0.1", {}, True),
        ("10.0.0.9", {}, False),
        ("10.0.0.7", {"lane_url": "", "address": "tls:10.0.0.7:7071"}, True),
        ("10.0.0.9", {"lane_url": "", "address": "tls:10.0.0.7:7071"}, False),
        ("10.0.0.9", {"lane_url": "", "address": "unix:/run/r1.sock"}, False),
    ],
)
async def test_a_proxy_elsewhere_reaches_the_engines_of_its_own_machine(
    proxy: str, changes: Mapping[str, Any], reaches: bool
) -> None:
    runner = replace(view().runners["r1"], **changes)
    assert await EngineReach("h", EndpointAddresses(FakeClock())).reaches(proxy, runner, "tiny") is reaches
