"""Memory forecasts for loads of one configured model, and learning from their measurements."""

from pathlib import Path

import pytest
from kit.presence import present
from kit.waiting import until

from runner_svc.memory.estimate import FileForecast, ForecastModel, MemoryEstimator, ModelFiles, manifest_bytes_of
from runner_svc.memory.learned_memory import LearnedMemory, learned_file
from runner_svc.memory.port import MemoryForecast
from runner_svc.policy.load_options import LoadPlan
from runner_svc.policy.memory_estimate import MEBIBYTE, settings_for
from weft.kernel.models.load_parameters import LoadValue
from weft_app.compose.demo import demo_model_path

AS_CONFIGURED = LoadPlan()
LONGER = LoadPlan(parameters={"context_tokens": 8192})


def _forecast(
    learned: LearnedMemory | None = None,
    memory_mb: int | None = None,
    parameters: dict[str, LoadValue] | None = None,
    **files: Path,
) -> FileForecast:
    path = files.pop("path", demo_model_path())
    model = ForecastModel(
        name="smollm2-135m",
        files=ModelFiles(path=path),
        quantizations=files,
        context_tokens=2048,
        slots=1,
        parameters=parameters or {},
        manifest_bytes=manifest_bytes_of(memory_mb),
    )
    return FileForecast(model, MemoryEstimator(learned))


async def _expected(forecast: MemoryForecast, plan: LoadPlan) -> tuple[str, int]:
    found = present(await forecast.expect(plan))
    return found.source, found.bytes // MEBIBYTE


async def test_longer_context_needs_more_memory() -> None:
    forecast = _forecast()
    usual, longer = await _expected(forecast, AS_CONFIGURED), await _expected(forecast, LONGER)
    assert (usual[0], longer[0]) == ("header", "header")
    assert longer[1] - usual[1] == 180 - 45 + 12, "the cache of 6,144 tokens more, and their mask"


async def test_declared_memory_applies_to_the_configured_load() -> None:
    forecast = _forecast(memory_mb=700)
    assert await _expected(forecast, AS_CONFIGURED) == ("manifest", 700)
    assert (await _expected(forecast, LONGER))[0] == "header"


async def test_declared_memory_takes_precedence_over_the_file_size(tmp_path: Path) -> None:
    file = tmp_path / "m.bin"
    file.write_bytes(bytes(MEBIBYTE))
    assert await _expected(_forecast(memory_mb=700, path=file), LONGER) == ("manifest", 700)


async def test_variant_is_estimated_from_its_own_file(tmp_path: Path) -> None:
    variant = tmp_path / "m.bin"
    variant.write_bytes(bytes(100 * MEBIBYTE))
    forecast = _forecast(q8_0=variant)
    assert await _expected(forecast, LoadPlan(quantization="q8_0")) == ("file_size", 130)
    assert await forecast.context_within(LoadPlan(quantization="q8_0"), 10**12) is None


async def test_loads_correct_the_estimate_across_restarts(tmp_path: Path) -> None:
    forecast = _forecast(LearnedMemory(learned_file(tmp_path, "local")), memory_mb=700)
    forecast.note_taken(LONGER, 1000 * MEBIBYTE)
    await until(learned_file(tmp_path, "local").exists)
    next_life = _forecast(LearnedMemory(learned_file(tmp_path, "local")), memory_mb=700)
    assert await _expected(next_life, LONGER) == ("learned", 1050)
    assert await _expected(next_life, AS_CONFIGURED) == ("manifest", 700)


@pytest.mark.parametrize(("budget_mib", "fits"), [(150, 0), (300, 4096), (100_000, 8192)])
async def test_fitting_context_is_at_most_the_trained_context(budget_mib: int, fits: int) -> None:
    found = await _forecast().context_within(AS_CONFIGURED, budget_mib * MEBIBYTE)
    assert found == (fits or None)


async def test_missing_file_is_estimated_by_name(tmp_path: Path) -> None:
    assert (await _expected(_forecast(path=tmp_path / "gone.gguf"), AS_CONFIGURED))[0] == "name"


async def test_model_with_only_a_size_or_name_uses_no_device_memory_with_zero_gpu_layers(tmp_path: Path) -> None:
    blob = tmp_path / "blob-7b.gguf"
    blob.write_bytes(b"GGUF, and no more of it")
    for path, source in ((blob, "file_size"), (tmp_path / "gone-7b.gguf", "name")):
        assert (await _expected(_forecast(path=path), AS_CONFIGURED))[0] == source
        assert (await _expected(_forecast(path=path, parameters={"gpu_layers": 0}), AS_CONFIGURED))[1] == 0


async def test_configured_flag_counts_and_a_load_can_override_it() -> None:
    forecast = _forecast(parameters={"gpu_layers": 0})
    usual = await _expected(_forecast(), AS_CONFIGURED)
    off_the_devices = await _expected(forecast, AS_CONFIGURED)
    assert (usual[1] > 0, off_the_devices[1]) == (True, 0), "the engine is shown no device, so it computes on none"
    assert await _expected(forecast, LoadPlan(parameters={"gpu_layers": -1})) == usual


def _with_draft(learned: LearnedMemory | None = None) -> FileForecast:
    path = demo_model_path()
    files = ModelFiles(path=path, draft=path)
    model = ForecastModel(name="m", files=files, context_tokens=2048, slots=1)
    return FileForecast(model, MemoryEstimator(learned))


async def test_fitting_context_leaves_room_for_a_draft_model_cache() -> None:
    budget = 600 * MEBIBYTE
    alone = await _forecast().context_within(AS_CONFIGURED, budget)
    drafting = await _with_draft().context_within(AS_CONFIGURED, budget)
    assert alone == 8192
    assert drafting is not None
    assert drafting < alone
    expected = present(await _with_draft().expect(LoadPlan(parameters={"context_tokens": drafting})))
    assert expected.bytes <= budget


async def test_measurements_with_a_draft_model_do_not_apply_without_it(tmp_path: Path) -> None:
    learned = LearnedMemory(learned_file(tmp_path, "local"))
    path = demo_model_path()
    settings = settings_for(2048, 1, {})
    MemoryEstimator(learned).learn(ModelFiles(path=path, draft=path), settings, 500 * MEBIBYTE)
    assert await _expected(_with_draft(learned), AS_CONFIGURED) == ("learned", 525)
    assert (await _expected(_forecast(learned), AS_CONFIGURED))[0] == "header"
