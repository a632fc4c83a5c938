"""vLLM's routes besides OpenAI's: figures, cache, sleep and aborts. `serve MODEL` starts the fake as a vLLM.

As in vLLM, all but the figures require VLLM_SERVER_DEV_MODE=1, and no key protects them. Sleep needs
--enable-sleep-mode, which vLLM only accepts on accelerators.
"""

import asyncio
import sys
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.sinks import json_response
from weft_testing.fake_backend.slots import SlotPool
from weft_testing.fake_backend.state import FakeState

DEV_MODE = "VLLM_SERVER_DEV_MODE"
CACHE_BLOCK_TOKENS = 128
MAX_LEVEL = 2
GUARDED_PREFIX = "/v1"
"""A vLLM only requires its key below this path."""


class VllmRoutes:
    """The sleep state of a vLLM, and its routes."""

    def __init__(
        self, settings: ServerSettings, pool: SlotPool, state: FakeState, environment: Mapping[str, str]
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._state = state
        self._has_dev_routes = environment.get(DEV_MODE) == "1"
        self.is_sleeping = False

    def add(self, app: web.Application) -> None:
        """Adds the routes."""
        app.router.add_get("/metrics", self._metrics)
        if self._has_dev_routes:
            app.router.add_post("/reset_prefix_cache", self._reset)
            app.router.add_post("/sleep", self._sleep)
            app.router.add_post("/wake_up", self._wake_up)
            app.router.add_get("/is_sleeping", self._asleep)
            app.router.add_post("/abort_requests", self._abort)
            app.router.add_post("/collective_rpc", self._rpc)

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        del http
        page = vllm_metrics_page(self._pool, self._state, self._settings)
        return web.Response(body=page.encode(), headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _reset(self, http: web.Request) -> web.StreamResponse:
        del http
        if self._pool.busy:
            return json_response(b'{"success":false}')
        await asyncio.gather(*(self._pool.erase(slot.id) for slot in self._pool.slots))
        return json_response(b'{"success":true}')

    async def _sleep(self, http: web.Request) -> web.StreamResponse:
        level = http.query.get("level", "1")
        if not level.isdecimal() or int(level) > MAX_LEVEL:
            return json_response(b'{"detail":"level must be 0 to 2"}', 422)
        if not self._settings.sleep_mode:
            return json_response(b'{"error":"sleep mode is not enabled"}', 500)
        self.is_sleeping = True
        return json_response(shapes.encode({"status": "sleeping", "level": int(level)}))

    async def _wake_up(self, http: web.Request) -> web.StreamResponse:
        tags = http.query.getall("tags", [])
        self.is_sleeping = tags == ["weights"]
        return json_response(shapes.encode({"status": "awake", "tags": tags or None}))

    async def _asleep(self, http: web.Request) -> web.StreamResponse:
        del http
        return json_response(shapes.encode({"is_sleeping": self.is_sleeping}))

    async def _abort(self, http: web.Request) -> web.StreamResponse:
        ids = (await http.json()).get("request_ids") or ["*"]
        self._state.aborted_request_ids.extend(ids)
        return json_response(shapes.encode({"status": "aborted", "aborted": len(ids)}))

    async def _rpc(self, http: web.Request) -> web.StreamResponse:
        self._state.remote_calls.append((await http.json())["method"])
        return json_response(b'{"results":[null]}')


def vllm_models_page(settings: ServerSettings) -> dict[str, Any]:
    """Returns vLLM's GET /v1/models."""
    model = {
        "id": settings.alias,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "vllm",
        "root": settings.model_path,
        "parent": None,
        "max_model_len": settings.slot_context_tokens,
    }
    return {"object": "list", "data": [model]}


def vllm_metrics_page(pool: SlotPool, state: FakeState, settings: ServerSettings) -> str:
    """Returns vLLM's GET /metrics, with the names and labels of 0.32."""
    labels = f'engine="0",model_name="{settings.alias}"'
    blocks = -(-settings.context_tokens // CACHE_BLOCK_TOKENS)
    used = sum(slot.cached_tokens for slot in pool.slots if slot.is_processing)
    values: dict[str, float] = {
        "num_requests_running": pool.busy,
        "num_requests_waiting": pool.waiting,
        "kv_cache_usage_perc": min(1.0, used / (blocks * CACHE_BLOCK_TOKENS)),
        "prefix_cache_queries_total": state.prompt_tokens,
        "prefix_cache_hits_total": state.cached_prompt_tokens,
        "num_preemptions_total": 0,
    }
    lines = [f"vllm:{name}{{{labels}}} {float(value)}" for name, value in values.items()]
    config = f'block_size="{CACHE_BLOCK_TOKENS}",engine="0",num_gpu_blocks="{blocks}"'
    return "\n".join([*lines, f"vllm:cache_config_info{{{config}}} 1.0"]) + "\n"


def print_load(settings: ServerSettings) -> None:
    """Prints a vLLM's output while loading."""
    for line in (
        "(APIServer pid=1) INFO 11-21 23:19:48 [api_utils.py:347]   version 0.32.0",
        "(Worker pid=3) INFO 11-21 23:27:11 [cpu_model_runner.py:68] Starting to load model",
        "Loading safetensors checkpoint shards:   0% Completed | 0/1 [00:00<?, ?it/s]",
        "Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:01<00:00,  1.19s/it]",
        "(Worker pid=3) INFO 11-21 23:27:12 [default_loader.py:501] Loading weights took 1.20 seconds",
        "(EngineCore pid=2) INFO 11-21 23:27:17 [kv_cache_utils.py:2327] GPU KV cache size: 46,592 tokens",
        "(EngineCore pid=2) INFO 11-21 23:27:18 [core.py:402] init engine (profile, create kv cache) took 1.67 s",
    ):
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - a server's log
    where = f"unix:{settings.uds}" if settings.uds else f"http://{settings.host}:{settings.port}"
    print(f"INFO [entry.py:140] Starting vLLM server on {where}", file=sys.stderr, flush=True)  # noqa: T201
