"""The suite of endpoint pickers finds each single broken promise, and none in a picker that keeps all."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from picker_saboteurs import SABOTEURS, AppendsDestination, Saboteur

from weft.kernel.errors import WeftError
from weft_testing.certificates import Authority
from weft_testing.conformance.findings import Finding, Verdict
from weft_testing.conformance.picker_gateways import GATEWAYS, LLM_D, GatewayProfile
from weft_testing.conformance.picker_suite import PICKER_CHECKS, PickerCheck, examine_picker
from weft_testing.conformance.picker_under_test import PickerAddress, PickerOptions, PickerUnderTest, attach_picker
from weft_testing.reference_picker import ReferenceSettings, RunningPicker, running_picker

BY_NAME = {check.name: check for check in PICKER_CHECKS}
ENDPOINTS = ("127.0.0.1:8001", "127.0.0.1:8002", "127.0.0.3:8001")
OPTIONS: dict[str, Any] = {"model": "m", "unready_model": "cold"}
SETTINGS: dict[str, Any] = {"endpoints": ENDPOINTS, "unready_models": ("cold",)}


@asynccontextmanager
async def subject(
    running: RunningPicker, profile: GatewayProfile = LLM_D, scheme: str = "http", **options: Any
) -> AsyncIterator[PickerUnderTest]:
    address = PickerAddress.parse(f"{scheme}://127.0.0.1:{running.port}", f"127.0.0.1:{running.health_port}")
    async with attach_picker(address, profile, PickerOptions(**(OPTIONS | options))) as picker:
        yield picker


async def findings_of(picker: PickerUnderTest, checks: tuple[PickerCheck, ...] = PICKER_CHECKS) -> dict[str, Finding]:
    return {finding.check: finding async for finding in examine_picker(picker, checks)}


@pytest.mark.parametrize("profile", GATEWAYS.values(), ids=GATEWAYS.keys())
@pytest.mark.parametrize("hooks", [False, True], ids=["plain", "hooks"])
async def test_a_picker_that_keeps_the_protocol_honours_every_promise(profile: GatewayProfile, hooks: bool) -> None:
    settings = ReferenceSettings(**SETTINGS, hooks=hooks)
    async with running_picker(settings) as running, subject(running, profile, hooks=hooks) as picker:
        found = await findings_of(picker)
    assert {name: each.detail for name, each in found.items() if each.verdict is Verdict.BROKEN} == {}
    unchecked = {name for name, each in found.items() if each.verdict is Verdict.NOT_CHECKED}
    responses = {name for name in BY_NAME if name.startswith("response-")} | {"no-early-close", "served-endpoint"}
    assert unchecked == {"tls"} | ({"one-destination"} if profile.max_destinations is None else set()) | (
        set() if profile.sees_responses else responses
    )


@pytest.mark.parametrize("saboteur", SABOTEURS, ids=[saboteur.name for saboteur in SABOTEURS])
async def test_each_broken_promise_is_found_by_its_check(saboteur: Saboteur, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_testing.conformance.picker_under_test.ANSWER_SECONDS", 0.3)
    settings = ReferenceSettings(**(SETTINGS | saboteur.settings))
    async with (
        running_picker(settings, saboteur.make, healthy=saboteur.healthy) as running,
        subject(running, saboteur.gateway, **saboteur.options) as picker,
    ):
        finding = (await findings_of(picker, (BY_NAME[saboteur.check],)))[saboteur.check]
    assert finding.verdict is Verdict.BROKEN, finding.detail
    assert re.match(saboteur.words, finding.detail), finding.detail


async def test_a_header_that_leaves_the_choice_to_the_gateway_is_reported_and_no_failure() -> None:
    async with running_picker(ReferenceSettings(**SETTINGS), AppendsDestination) as running, subject(running) as picker:
        finding = (await findings_of(picker, (BY_NAME["caller-destination"],)))["caller-destination"]
    assert finding.verdict is Verdict.NOT_CHECKED
    assert finding.detail.startswith("its header has no append_action")


def test_every_check_has_a_saboteur() -> None:
    assert {saboteur.check for saboteur in SABOTEURS} | {"tls"} == set(BY_NAME)


def _pair(folder: Path, ends: timedelta) -> tuple[Path, Path]:
    """Files of a certificate and its key."""
    pair = Authority().issue("picker.example", ends=ends)
    files = (folder / "own.pem", folder / "own.key")
    for path, content in zip(files, (pair.certificate, pair.key), strict=True):
        path.write_bytes(content)
    return files


async def test_a_certificate_is_taken_without_verifying_it(tmp_path: Path) -> None:
    pair = _pair(tmp_path, timedelta(days=1))
    async with (
        running_picker(ReferenceSettings(**SETTINGS), tls=pair) as running,
        subject(running, scheme="https") as picker,
    ):
        finding = (await findings_of(picker, (BY_NAME["tls"],)))["tls"]
    assert finding.verdict is Verdict.HONOURED
    assert finding.detail.startswith("issued by another, until ")


@pytest.mark.parametrize(
    ("ends", "protocols", "words"),
    [
        (timedelta(days=-1), ["h2"], "the certificate at .* is not valid now, but until "),
        (timedelta(days=1), ["http/1.1"], "agrees on no h2, which clients of gRPC demand"),
    ],
    ids=["expired", "no h2"],
)
async def test_tls_that_no_gateway_can_use_is_an_error(
    tmp_path: Path, ends: timedelta, protocols: list[str], words: str
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_pair(tmp_path, ends))
    context.set_alpn_protocols(protocols)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        address = PickerAddress.parse(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(WeftError, match=words):
            async with attach_picker(address, LLM_D, PickerOptions(model="m")):
                pass


async def test_an_address_without_a_picker_is_an_error_with_a_reason() -> None:
    with pytest.raises(WeftError, match="is no host:port"):
        PickerAddress.parse("picker")
    with pytest.raises(WeftError, match=r"no TLS at 127\.0\.0\.1:1"):
        async with attach_picker(PickerAddress.parse("https://127.0.0.1:1"), LLM_D, PickerOptions(model="m")):
            pass
