"""The routes that describe the server: /props, /slots, /v1/models, /metrics."""

import time
from typing import Any

from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.model_calls import EMBEDDING_SIZE
from weft_testing.fake_backend.openai_shapes import BUILD_INFO, VOCABULARY_TOKENS
from weft_testing.fake_backend.slots import Slot, SlotPool
from weft_testing.fake_backend.state import FakeState

MODEL_BYTES = 96_600_000
MODEL_PARAMETERS = 134_515_008
TRAINED_CONTEXT_TOKENS = 8192
MODEL_FILE_TYPE = "Q4_1"


def props(settings: ServerSettings) -> dict[str, Any]:
    """GET /props."""
    return {
        "default_generation_settings": {"params": {"n_predict": -1}, "n_ctx": settings.slot_context_tokens},
        "total_slots": settings.slots,
        "model_alias": settings.alias,
        "model_ftype": MODEL_FILE_TYPE,
        "model_path": settings.model_path,
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
        "chat_template_caps": {
            "supports_tools": True,
            "supports_tool_calls": True,
            "supports_system_role": True,
            "supports_parallel_tool_calls": True,
        },
        "bos_token": "<s>",
        "eos_token": "</s>",
        "build_info": BUILD_INFO,
        "is_sleeping": False,
    }


def models(settings: ServerSettings, started_at: float) -> dict[str, Any]:
    """GET /v1/models."""
    meta = {
        "vocab_type": 2,
        "n_vocab": VOCABULARY_TOKENS,
        "n_ctx": settings.slot_context_tokens,
        "n_ctx_train": max(TRAINED_CONTEXT_TOKENS, settings.slot_context_tokens),
        "n_embd": EMBEDDING_SIZE,
        "n_params": MODEL_PARAMETERS,
        "size": MODEL_BYTES,
        "ftype": MODEL_FILE_TYPE,
    }
    model = {
        "id": settings.alias,
        "aliases": [settings.alias],
        "tags": [],
        "object": "model",
        "created": int(started_at),
        "owned_by": "llamacpp",
        "meta": meta,
    }
    listed = {"name": settings.alias, "model": settings.alias, "type": "model", "capabilities": ["completion"]}
    return {"models": [listed], "object": "list", "data": [model]}


def slots(pool: SlotPool, settings: ServerSettings) -> list[dict[str, Any]]:
    """GET /slots."""
    return [_slot(slot, settings) for slot in pool.slots]


def _slot(slot: Slot, settings: ServerSettings) -> dict[str, Any]:
    page: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": settings.slot_context_tokens,
        "speculative": False,
        "is_processing": slot.is_processing,
    }
    if slot.task_id >= 0:
        page |= {
            "id_task": slot.task_id,
            "n_prompt_tokens": len(slot.prompt) + slot.tokens_decoded,
            "n_prompt_tokens_processed": slot.prompt_tokens_processed,
            "n_prompt_tokens_cache": slot.prompt_tokens_cached,
            "params": {"n_predict": -1},
            "next_token": [
                {
                    "has_next_token": slot.is_processing,
                    "has_new_line": False,
                    "n_remain": slot.tokens_remaining,
                    "n_decoded": slot.tokens_decoded,
                }
            ],
        }
    return page


def metrics(pool: SlotPool, state: FakeState, started: float) -> str:
    """GET /metrics in the Prometheus text format; `started` is the process's start on time.monotonic()."""
    seconds = max(time.monotonic() - started, 1e-3)
    evaluated = state.prompt_tokens - state.cached_prompt_tokens
    counters = {
        "prompt_tokens_total": evaluated,
        "prompt_tokens_cached_total": state.cached_prompt_tokens,
        "prompt_seconds_total": 0.0,
        "tokens_predicted_total": state.tokens_sent,
        "tokens_predicted_seconds_total": seconds if state.tokens_sent else 0.0,
        "n_decode_total": state.tokens_sent,
        "n_tokens_max": max((len(slot.prompt) + slot.tokens_decoded for slot in pool.slots), default=0),
    }
    gauges = {
        "prompt_tokens_seconds": evaluated / seconds,
        "predicted_tokens_seconds": state.tokens_sent / seconds,
        "requests_processing": pool.busy,
        "requests_deferred": pool.waiting,
        "n_busy_slots_per_decode": float(pool.busy),
    }
    lines = [line for name, value in counters.items() for line in _metric(name, "counter", value)]
    lines += [line for name, value in gauges.items() for line in _metric(name, "gauge", value)]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, value: float) -> tuple[str, str, str]:
    full = f"llamacpp:{name}"
    return f"# HELP {full} See llama-server.", f"# TYPE {full} {kind}", f"{full} {value}"
