"""ExLlamaV3: contradictory settings, its compiler, its memory, and the turns of tenants at its cache."""

import asyncio
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.engine_settings import engine_settings
from kit.failures import fails
from kit.presence import present

from runner_svc.memory.estimate import ForecastModel, MemoryEstimator, ModelFiles
from runner_svc.policy.load_options import AS_CONFIGURED, LoadPlan
from runner_svc.policy.memory_estimate import EstimateSource
from weft.gpu import nvml
from weft.kernel.errors.error_tree import WeftError
from weft_app.config.loader import parse_config
from weft_extensions.engines.exllamav3 import runtime, server
from weft_extensions.engines.exllamav3.cache_turns import CacheTurns
from weft_extensions.engines.exllamav3.exllamav3_backend import ExllamaV3Forecast
from weft_extensions.engines.exllamav3.runtime import RUNTIME, ExllamaV3Model, cache_bits, cache_tokens_of

FULL_TOKEN_BYTES = 2 * 2 * 2 * 64 * 4
"""Keys and values in 16 bits of two heads of 64 numbers in four layers."""


def _folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    dimensions = {"num_hidden_layers": 4, "num_attention_heads": 2, "hidden_size": 128, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps({**dimensions, "max_position_embeddings": 4096}))
    head = json.dumps({"weight": {"dtype": "F16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(16))
    return folder


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"cache_tokens": 300}, "cache_tokens"),
        ({"cache_tokens": 2048, "context_tokens": 2048}, "cache_tokens"),
        ({"gpu_split": (0.0, 0.0)}, "gpu_split"),
    ],
)
def test_contradicting_settings_are_refused_by_name(tmp_path: Path, settings: dict[str, Any], refused: str) -> None:
    model, context = engine_settings(ExllamaV3Model, path=_folder(tmp_path / "m"), **settings)
    with fails(field=f"model.{refused}"):
        RUNTIME.build(model, context)


def test_model_is_built_from_a_settings_file(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")

    def document(bits: object) -> dict[str, Any]:
        model = {"name": "m", "path": str(folder), "cache_quant": bits}
        return {"runners": [{"name": "r", "runtime": "exllamav3", "models": [model]}]}

    (runner,) = parse_config(document(4)).runners or ()
    (model,) = runner.models
    assert isinstance(model, ExllamaV3Model)
    assert (model.cache_quant, model.slots) == ("4", 4)
    _, context = engine_settings(ExllamaV3Model, path=folder)
    engine = RUNTIME.build(model, context)
    assert (engine.slots, engine.model_path) == (4, folder / "model.safetensors")
    for wrong in (9, "4,9", "4,4,4", True):
        with pytest.raises(WeftError, match="cache_quant"):
            parse_config(document(wrong))


def test_sharded_model_has_no_digest_of_a_single_file(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": "model-00001-of-00001.safetensors"}})
    )
    model, context = engine_settings(ExllamaV3Model, path=folder, quantizations={"other": folder})
    engine = RUNTIME.build(model, context)
    assert engine.model_path is None
    assert dict(engine.quantizations) == {"other": folder}


def test_cache_has_whole_pages_for_the_context_of_every_slot() -> None:
    assert cache_tokens_of(None, 2048, 1) == 2304
    assert cache_tokens_of(None, 100, 4) == 1024
    assert cache_tokens_of(512, 100, 4) == 512
    assert [cache_bits(words) for words in (None, "16", "4", "4,6")] == [(16, 16), (16, 16), (4, 4), (4, 6)]


async def _context_bytes(folder: Path, plan: LoadPlan = AS_CONFIGURED, **settings: Any) -> int:
    model, _ = engine_settings(ExllamaV3Model, path=folder, **settings)
    forecast = ForecastModel(
        name="m", files=ModelFiles(path=folder), context_tokens=model.slot_context_tokens, slots=model.slots
    )
    estimate = present(await ExllamaV3Forecast(forecast, MemoryEstimator(), model).expect(plan))
    assert estimate.source is EstimateSource.HEADER
    return next(part.bytes for part in estimate.parts if part.name == "context")


async def test_forecast_has_one_cache_for_all_slots_with_its_bits(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    assert await _context_bytes(folder, cache_tokens=8192, slots=2) == 8192 * FULL_TOKEN_BYTES
    ordered = LoadPlan(parameters={"cache_tokens": 4096})
    assert await _context_bytes(folder, ordered, cache_tokens=8192, slots=2) == 4096 * FULL_TOKEN_BYTES
    small = await _context_bytes(folder, cache_tokens=8192, slots=2, cache_quant="4")
    assert small == pytest.approx(8192 * FULL_TOKEN_BYTES * 18 / 64)


async def test_the_forecast_has_the_batch_that_extra_arguments_name(tmp_path: Path) -> None:
    folder, sizes = _folder(tmp_path / "m"), []
    for arguments in ((), ("--chunk-tokens", "256")):
        model, context = engine_settings(ExllamaV3Model, path=folder, extra_arguments=arguments)
        estimate = present(await RUNTIME.build(model, context).forecast.expect(AS_CONFIGURED))
        sizes.append(estimate.bytes)
    assert sizes[1] < sizes[0]


def test_missing_gpu_or_compiler_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert RUNTIME.requirement is not None
    find = RUNTIME.requirement.find
    for name in runtime.COMPILER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(runtime, "USUAL_FOLDER", tmp_path / "cuda")
    cards: list[object] = []
    monkeypatch.setattr(nvml, "read_within", lambda _: SimpleNamespace(devices=cards))
    with pytest.raises(WeftError, match="no responding NVIDIA card"):
        find(None)
    cards.append("a card")
    with pytest.raises(WeftError, match="no CUDA compiler"):
        find(None)
    assert "other/python" in find(("other/python",))
    (tmp_path / "cuda").mkdir()
    assert find(None) == str(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda")
    assert find(None) == "/opt/cuda"


class _Cache:
    """A cache that notes whose pages it has, and who uses it."""

    def __init__(self) -> None:
        self.pages: set[object] = set()
        self.users: list[object] = []
        self.renewals = 0
        self.fails = False
        self.turns = CacheTurns(self._renew)
        self.release = asyncio.Event()

    async def _renew(self) -> None:
        assert not self.users, "a request was at work"
        await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("no memory")
        self.pages.clear()
        self.renewals += 1

    async def use(self, salt: object) -> None:
        async with self.turns.turn(salt):
            assert self.pages <= {salt}, "pages of another"
            self.pages.add(salt)
            self.users.append(salt)
            try:
                await self.release.wait()
            finally:
                self.users.remove(salt)

    def begin(self, *salts: object) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.use(salt)) for salt in salts]


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_requests_with_one_salt_run_together_without_overtaking_waiting_ones() -> None:
    cache = _Cache()
    tasks = cache.begin("a", "a", "b", "a")
    await _settle()
    assert cache.users == ["a", "a"], "the last one came after b"
    cache.release.set()
    await asyncio.gather(*tasks)
    assert cache.renewals == 2


async def test_cancelled_waiting_request_blocks_no_other() -> None:
    cache = _Cache()
    first, waiting, third = cache.begin("a", "b", "a")
    await _settle()
    waiting.cancel()
    await _settle()
    assert cache.users == ["a", "a"]
    cache.release.set()
    await asyncio.gather(first, third)
    assert cache.renewals == 0


@pytest.mark.parametrize("steps", range(6))
async def test_cancellation_at_any_step_of_the_start_leaves_no_foreign_pages(steps: int) -> None:
    cache = _Cache()
    cache.release.set()
    await cache.use("a")
    (task,) = cache.begin("b")
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with asyncio.timeout(1.0):
        await cache.use("b")
        await cache.use("a")
    assert cache.pages == {"a"}


async def test_failed_cache_renewal_fails_its_request_and_is_retried() -> None:
    cache = _Cache()
    cache.release.set()
    await cache.use("a")
    cache.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        await cache.use("b")
    cache.fails = False
    await cache.use("b")
    assert (cache.pages, cache.renewals) == ({"b"}, 1)


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_a_flag_that_must_be_positive_is_refused_with_its_name(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        server.parse_arguments(["--model", str(tmp_path), "--chunk-tokens", number])
    assert f"argument --chunk-tokens: invalid positive value: '{number}'" in capsys.readouterr().err
