"""`weft runner conformance` compares the claims of a preset with what its program does, and lists broken ones."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from runner_harness import TICKET_KEY, running_runner
from server_dialects import DIALECTS, preset_settings

from runner_svc.instance.instance_settings import ServedModel
from runner_svc.policy.lifecycle import Phase
from runner_svc.runtimes.server.presets import PRESETS, PresetName
from runner_svc.runtimes.server.server_backend import ServerBackend, operations_of
from weft.api.registry.v1 import model_pb2
from weft.dispatch.fleet import RunnerView
from weft.kernel.channels.rpc import open_channel
from weft_testing.conformance import engine_claims
from weft_testing.conformance.findings import Finding, Verdict
from weft_testing.conformance.runner_suite import CHECKS, examine
from weft_testing.conformance.runner_under_test import RunnerUnderTest

pytestmark = pytest.mark.slow("starts engine processes")

CLAIMS = tuple(check for check in CHECKS if check.name == "engine-claims")
CHAT = frozenset({int(model_pb2.MODEL_OPERATION_CHAT)})


@asynccontextmanager
async def _runner(folder: Path, settings: Any) -> AsyncIterator[RunnerUnderTest]:
    model = ServedModel(
        name="fake",
        make_backend=lambda: ServerBackend(*settings),
        slots=settings[0].slots,
        operations=operations_of(settings[0]),
    )
    async with running_runner(folder, [model]) as runner:
        await runner.until(Phase.READY, "fake")
        view = RunnerView(
            name="r1",
            incarnation=runner.registry.opened[-1].runner.incarnation,
            address=f"unix:{folder}/runner.sock",
            host=socket.gethostname(),
            runtime="any",
            active=True,
            draining=False,
            ticket_key=TICKET_KEY,
            instances={},
        )
        async with open_channel(view.address) as channel:
            yield RunnerUnderTest(view, "fake", CHAT, channel)


async def _finding(folder: Path, settings: Any) -> Finding:
    async with _runner(folder, settings) as runner:
        (finding,) = [finding async for finding in examine(runner, CLAIMS)]
    return finding


@pytest.mark.parametrize("name", PRESETS)
async def test_preset_claims_are_met_by_a_program_of_its_dialect(name: PresetName, tmp_path: Path) -> None:
    finding = await _finding(tmp_path, preset_settings(name, {"answer_tokens": 4}))
    assert finding.verdict is Verdict.HONOURED, finding.detail
    kept = set(finding.detail.partition("; ")[0].removeprefix("kept: ").split(", "))
    preset = PRESETS[name]
    assert {"health_path", "usage_in_streams"} <= kept
    assert ("metrics" in kept) == bool(preset.metrics.all)
    assert ("cached_tokens" in kept) == preset.cached_tokens
    assert ("key_variable" in kept) == bool(preset.key_variable)
    assert ("lists_model" in kept) == preset.lists_model


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("tgi", {"metrics": ("tgi_queue_size",)}, "metrics: claimed tgi_batch_current_size, tgi_queue_size"),
        ("tgi", {"lacks": ("/metrics",)}, "/metrics returned status 404"),
        ("tgi", {"counts_streams": False}, "usage_in_streams: claimed yes"),
        ("sglang", {"caches_prompts": False}, "cached_tokens: claimed yes"),
        ("sglang", {"lacks": ("/tokenize",)}, "operations: claimed chat, completion, tokenize"),
    ],
)
async def test_unmet_claim_is_reported_with_its_source(
    name: PresetName, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    dialect = msgspec.structs.replace(DIALECTS[name], **changes)
    finding = await _finding(tmp_path, preset_settings(name, {"answer_tokens": 4}, dialect=dialect))
    assert finding.verdict is Verdict.BROKEN
    assert words in finding.detail
    assert "docs" in finding.detail or "(wheel)" in finding.detail


async def test_key_that_is_not_required_is_reported(tmp_path: Path) -> None:
    finding = await _finding(tmp_path, preset_settings("tgi", {"answer_tokens": 4}, key_variable="NOT_READ"))
    assert finding.verdict is Verdict.BROKEN
    assert "key_variable: claimed API_KEY" in finding.detail
    assert "a request without the key returned status" in finding.detail


@pytest.mark.parametrize("notices", [True, False])
async def test_work_continuing_after_a_disconnect_is_detected(
    notices: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_claims, "MIN_WORK", 0.02)
    dialect = msgspec.structs.replace(DIALECTS["tgi"], notices_leaving=notices)
    switches = {"answer_tokens": 0, "tokens_per_second": 2000}
    settings = preset_settings("tgi", switches, dialect=dialect, extra_arguments=("--ctx-size", "400000"))
    finding = await _finding(tmp_path, settings)
    if notices:
        assert finding.verdict is Verdict.HONOURED, finding.detail
        assert "cancellation" in finding.detail.partition("; ")[0]
    else:
        assert finding.verdict is Verdict.BROKEN
        assert "cancellation: claimed at the next token" in finding.detail


async def test_program_without_a_preset_has_no_claims(tmp_path: Path) -> None:
    model, context = preset_settings("tgi", {"answer_tokens": 4})
    unknown = replace(model, preset=None, key_variable="API_KEY")
    finding = await _finding(tmp_path, (unknown, context))
    assert (finding.verdict, finding.detail) == (Verdict.HONOURED, "nothing is claimed of its engine")
