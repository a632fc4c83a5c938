"""`weft conformance picker` as its user runs it."""

import asyncio
import json
from typing import Any

import pytest
from kit.warm_python import warm
from picker_saboteurs import ClosesAfterTheRequest

from weft_testing.conformance.picker_suite import PICKER_CHECKS
from weft_testing.reference_picker import ReferencePicker, ReferenceSettings, RunningPicker, running_picker

SETTINGS = ReferenceSettings(endpoints=("127.0.0.1:8001", "127.0.0.1:8002"))


async def conformance(running: RunningPicker, *arguments: str) -> tuple[int | None, str, str]:
    """Exit code, stdout and stderr."""
    places = (f"127.0.0.1:{running.port}", "--health", f"127.0.0.1:{running.health_port}", "--model", "m")
    process = await asyncio.create_subprocess_exec(
        *warm("weft_app.cli.main"),
        "conformance",
        "picker",
        *places,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_findings_of_all_checks_are_printed_as_json() -> None:
    async with running_picker(SETTINGS) as running:
        code, out, err = await conformance(running, "--gateway", "agentgateway", "-o", "json")
    document: dict[str, Any] = json.loads(out)
    assert document["kind"] == "FindingList"
    assert [item["check"] for item in document["items"]] == [check.name for check in PICKER_CHECKS]
    unchecked = {item["check"] for item in document["items"] if item["verdict"] == "not checked"}
    assert unchecked == {"no-endpoint", "tls"}
    assert (code, err) == (0, f"weft: {len(PICKER_CHECKS) - 2} honoured, 0 broken, 2 not checked\n")


@pytest.mark.parametrize(("make", "code"), [(ReferencePicker, 0), (ClosesAfterTheRequest, 1)])
async def test_a_broken_promise_is_exit_code_1(make: type[ReferencePicker], code: int) -> None:
    async with running_picker(SETTINGS, make) as running:
        found, out, _ = await conformance(running, "--only", "no-early-close", "--only", "destination")
    assert found == code
    assert [line.split()[0] for line in out.splitlines()] == ["CHECK", "destination", "no-early-close"]
