"""Settings, command line, environment and figures of vLLM in process."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.engine_settings import engine_settings

from runner_svc.backend.port import LoadOrder
from runner_svc.policy.memory_estimate import ModelShape
from runner_svc.runtimes.vllm.arguments import host_arguments, host_environment
from runner_svc.runtimes.vllm.figures import StepStatistics
from runner_svc.runtimes.vllm.host import parse_arguments
from runner_svc.runtimes.vllm.runtime import RUNTIME
from runner_svc.runtimes.vllm.settings import VllmLibraryModel
from runner_svc.runtimes.vllm_engine.arguments import engine_arguments
from weft.api.registry.v1.lease_pb2 import DeviceBytes
from weft.kernel.errors import FieldError
from weft.kernel.request import Operation, Skill
from weft_app.config.loader import parse_config

SOCKET = Path("/run/engine.sock")
ON_A_DEVICE = LoadOrder(shares=(DeviceBytes(device_index=3, bytes=2**30),), hides_devices=True)
SHAPE = ModelShape(weight_bytes=2**28, keys_per_token=5760, values_per_token=5760, layers=30, vocabulary=49_152)


def _model(**settings: Any) -> VllmLibraryModel:
    model, _ = engine_settings(VllmLibraryModel, **{"model": "org/model", **settings})
    return model


def test_the_program_gets_its_own_flags_and_vllm_the_engines_after_them() -> None:
    model = _model(name="smol", lora_path="org/adapter", sleep_level=2, extra_arguments=("--block-size", "32"))
    own, engine = parse_arguments(host_arguments(model, SOCKET, ON_A_DEVICE, SHAPE))
    assert (own.socket, own.adapter, own.sleep_level) == (str(SOCKET), ["=org/adapter"], 2)
    assert engine[:2] == ["--model", "org/model"]
    assert engine[-2:] == ["--block-size", "32"]
    assert "--language-model-only" in engine
    wanted = engine_arguments(model, ON_A_DEVICE, SHAPE)
    assert [*engine[5:-2]] == wanted
    plain, _ = parse_arguments(host_arguments(_model(sleep_level=2), SOCKET, LoadOrder()))
    assert (plain.adapter, plain.sleep_level) == ([], 1), "it does not sleep without devices"


def test_a_process_of_the_engine_is_spawned_unless_the_runner_says_otherwise() -> None:
    added = host_environment(_model(threads=3), ON_A_DEVICE, {})
    assert added["VLLM_WORKER_MULTIPROCESSING_METHOD"] == "spawn"
    assert (added["OMP_NUM_THREADS"], added["CUDA_VISIBLE_DEVICES"]) == ("3", "3")
    given = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}
    assert "VLLM_WORKER_MULTIPROCESSING_METHOD" not in host_environment(_model(), LoadOrder(), given)


@pytest.mark.parametrize(
    ("settings", "field", "why"),
    [
        ({"limit_mm_per_prompt": {"image": 1}}, "limit_mm_per_prompt", "vllm_serve"),
        ({"mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs", "vllm_serve"),
        ({"max_pixels": 9}, "max_pixels", "vllm_serve"),
        ({"extra_arguments": ("--model", "x")}, "extra_arguments[0]", "it is `model`"),
        ({"extra_arguments": ("--max-num-seqs=1",)}, "extra_arguments[0]", "use slots"),
        ({"extra_arguments": ("--disable-log-stats",)}, "extra_arguments[0]", "weft reads them"),
        ({"kind": "embedding", "lora_path": "org/adapter"}, "lora_path", "generation"),
        ({"speculative_model": "org/a"}, "speculative_method", "must be set"),
        ({"chat_template_path": Path("/nowhere")}, "chat_template_path", "there is no file"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    settings: dict[str, Any], field: str, why: str
) -> None:
    given = engine_settings(VllmLibraryModel, command=("python",), model="org/model", **settings)
    with pytest.raises(FieldError, match=why) as refused:
        RUNTIME.build(*given)
    assert refused.value.field == f"model.{field}"


def test_an_engine_is_given_text_alone_and_says_so() -> None:
    settings = {"command": ("python",), "model": "org/model", "limit_mm_per_prompt": {"image": 0}}
    engine = RUNTIME.build(*engine_settings(VllmLibraryModel, **settings))
    assert engine.abilities.skills == {Skill.TEXT}
    assert {Skill.IMAGE, Skill.AUDIO} <= engine.abilities.lacking
    assert engine.operations == {Operation.CHAT, Operation.COMPLETION, Operation.TOKENIZE}
    embedding = engine_settings(VllmLibraryModel, command=("python",), model="org/model", kind="embedding")
    assert RUNTIME.build(*embedding).operations == {Operation.EMBEDDING, Operation.TOKENIZE}


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("kind", "reranking", "kind"),
        ("tool_call_parser", "hermes", "vllm_serve"),
        ("reasoning_parser", "qwen3", "vllm_serve"),
        ("path", "/models/a", "`model`"),
    ],
)
def test_a_setting_of_another_runtime_is_refused_with_advice(name: str, value: str, advice: str) -> None:
    model = {"name": "qwen", "model": "/models/qwen", name: value}
    with pytest.raises(FieldError, match=advice):
        parse_config({"runners": [{"name": "gpu", "runtime": "vllm", "models": [model]}]})


def _step(running: int, waiting: int, share: float, queries: int = 0, hits: int = 0) -> SimpleNamespace:
    prefixes = SimpleNamespace(queries=queries, hits=hits)
    return SimpleNamespace(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=share,
        prefix_cache_stats=prefixes,
    )


def test_figures_are_those_of_the_last_step_and_counts_are_added_up() -> None:
    changes: list[None] = []
    statistics = StepStatistics(lambda: changes.append(None))
    statistics.record(_step(3, 2, 0.25, 100, 0), SimpleNamespace(num_preempted_reqs=1), engine_idx=0)
    statistics.record(_step(1, 0, 0.5, 50, 32), SimpleNamespace(num_preempted_reqs=2), None, engine_idx=1)
    statistics.record(None, None)
    found = statistics.figures(has_requests=True, kv_cache_tokens=4096, kv_cache_bytes=2**20)
    assert (found.running_count, found.waiting_count, found.kv_cache_share) == (4, 4, 0.5)
    assert (found.preemption_count, found.prefix_query_tokens, found.prefix_hit_tokens) == (3, 150, 32)
    assert (found.kv_cache_tokens, found.kv_cache_bytes) == (4096, 2**20)
    assert len(changes) == 3


def test_without_requests_nothing_runs_whatever_the_last_step_had() -> None:
    statistics = StepStatistics(lambda: None)
    statistics.record(_step(3, 2, 0.25, 100, 7), None)
    found = statistics.figures(has_requests=False, kv_cache_tokens=None, kv_cache_bytes=None)
    assert (found.running_count, found.waiting_count, found.kv_cache_share) == (0, 0, 0.0)
    assert found.prefix_hit_tokens == 7


def test_what_a_model_takes_is_known_from_the_template_of_its_folder_before_it_is_loaded(tmp_path: Path) -> None:
    def lacking(**settings: Any) -> frozenset[Skill]:
        given = engine_settings(VllmLibraryModel, command=("python",), model=str(tmp_path), **settings)
        return RUNTIME.build(*given).abilities.lacking

    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert Skill.TOOLS in lacking()
    own = tmp_path / "own.jinja"
    own.write_text("{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0].content }}")
    assert Skill.TOOLS not in lacking(chat_template_path=own)
