"""The HTTP server of the fake: llama-server's routes, status pages and errors, and /fake/* for tests."""

import asyncio
import json
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, cast

import msgspec
from aiohttp import web

from weft_testing.fake_backend import model_calls
from weft_testing.fake_backend import openai_shapes as shapes
from weft_testing.fake_backend.arguments import ServerSettings
from weft_testing.fake_backend.behaviour import Behaviour, Control
from weft_testing.fake_backend.generation import Generation
from weft_testing.fake_backend.media_routes import MediaRoutes
from weft_testing.fake_backend.model_calls import embeddings_body, too_long
from weft_testing.fake_backend.process_faults import ProcessFaults
from weft_testing.fake_backend.requests import (
    MAX_CHOICES,
    GenerationRequest,
    RequestError,
    bad_request,
    parse_chat,
    parse_completion,
    prompt_list,
    refuse_media,
)
from weft_testing.fake_backend.sinks import Sink, StreamSink, json_response
from weft_testing.fake_backend.slots import Slot, SlotPool
from weft_testing.fake_backend.state import FakeState, Ledger, Outcome, RequestLog
from weft_testing.fake_backend.vllm_routes import GUARDED_PREFIX, VllmRoutes, vllm_models_page

MAX_BODY_BYTES = 64 * 1024 * 1024
TEXT_ONLY_STATUS = 500
"""llama-server's status for images and audio without a projector."""
NOT_JSON = "parse error: the body is not JSON"
CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client disconnected, as in nginx; never sent."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Worker = Callable[[web.Request, Any, Behaviour, Outcome], Awaitable[web.StreamResponse]]

_STATUS_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}


class FakeServer:
    """A model server with its slots, behaviour and records."""

    def __init__(self, settings: ServerSettings, control: Control, faults: ProcessFaults) -> None:
        self._settings = settings
        self._control = control
        self._faults = faults
        self._pool = SlotPool(settings.slots)
        self._unnoticed: list[asyncio.Task[None]] = []
        """Work for callers who have left, if the server does not detect that."""
        self._ledger = Ledger(RequestLog(settings.request_log) if settings.request_log else None)
        self._started = time.monotonic()
        self._started_at = time.time()

    def application(self) -> web.Application:
        """Returns the aiohttp application with every route."""
        guards = [self._without_lacking_routes] if self._settings.dialect.lacks else []
        # A bound method is a middleware too; aiohttp's type names functions alone.
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=guards)  # type: ignore[arg-type]
        for path in self._settings.dialect.answers:
            app.router.add_route("*", path, self._guarded(self._note_call))
        app.router.add_get("/health", self._health)
        if self._settings.is_vllm:
            VllmRoutes(self._settings, self._pool, self._ledger.state, os.environ).add(app)
        app.router.add_get("/v1/models", self._guarded(_page(self._models)))
        app.router.add_get("/props", self._guarded(_page(lambda: props_page(self._settings))))
        app.router.add_get("/slots", self._guarded(_page(lambda: slots_page(self._pool))))
        app.router.add_post("/slots/{number}", self._guarded(self._slot_action))
        app.router.add_get("/metrics", self._guarded(self._metrics))
        app.router.add_post("/tokenize", self._guarded(self._tokenize))
        app.router.add_post("/v1/chat/completions", self._guarded(self._counted(self._chat)))
        app.router.add_post("/v1/completions", self._guarded(self._counted(self._completion)))
        app.router.add_post("/v1/embeddings", self._guarded(self._counted(self._embed)))
        app.router.add_post("/apply-template", self._guarded(self._apply_template))
        app.router.add_post("/v1/rerank", self._guarded(self._counted(self._rerank)))
        MediaRoutes(self._settings, self._control, self._ledger).add(app, self._guarded)
        # Available without the API key, because a runner starts the fake with a random one that tests do not know.
        app.router.add_post("/fake/behaviour", self._set_behaviour)
        app.router.add_get("/fake/state", _page(self._state))
        app.router.add_route("*", "/{path:.*}", self._guarded(self._not_found))
        return app

    def _is_loaded(self) -> bool:
        behaviour = self._control.behaviour
        never = behaviour.never_healthy or behaviour.exit_at_start is not None
        return not never and time.monotonic() - self._started >= behaviour.load_seconds

    def _check_access(self, http: web.Request) -> None:
        """Rejects a wrong key, and every request while the model loads."""
        key = self._settings.api_key
        if self._settings.is_vllm and not http.path.startswith(GUARDED_PREFIX):
            key = ""
        if key and http.headers.get("Authorization") != f"Bearer {key}" and http.headers.get("X-Api-Key") != key:
            raise RequestError(401, "authentication_error", "Invalid API Key")
        if not self._is_loaded():
            raise _loading()

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(http: web.Request) -> web.StreamResponse:
            try:
                self._check_access(http)
                return await handler(http)
            except RequestError as error:
                return _refusal(error)
            except ConnectionError:
                # The client left. Not raised, because aiohttp would log a traceback, which no real server does.
                return web.Response(status=CLIENT_CLOSED_REQUEST)

        return guarded

    def _counted(self, worker: Worker) -> Handler:
        """Counts the request, applies faults before the first token, then runs the handler."""

        async def counted(http: web.Request) -> web.StreamResponse:
            raw = await http.read()
            body = _decoded(raw)
            headers = {name.lower(): value for name, value in http.headers.items()}
            with self._ledger.request(headers, body, len(raw)) as outcome:
                behaviour = self._control.for_next_request()
                if behaviour.slow_headers_seconds:
                    await asyncio.sleep(behaviour.slow_headers_seconds)
                if behaviour.html_200:
                    return web.Response(body=shapes.HTML_PAGE, content_type="text/html")
                if behaviour.raw_answer is not None:
                    outcome.broken_by_fake = True
                    return await _raw(http, behaviour.raw_answer)
                if behaviour.status is not None:
                    return _scripted_status(behaviour, behaviour.status)
                try:
                    return await worker(http, body, behaviour, outcome)
                except RequestError as error:
                    return _refusal(error)

        return counted

    async def _chat(self, http: web.Request, body: Any, behaviour: Behaviour, outcome: Outcome) -> web.StreamResponse:
        text_only_status = TEXT_ONLY_STATUS if self._settings.text_only else behaviour.text_only_status
        if text_only_status is not None:
            refuse_media(body, text_only_status)
        self._require_model(body)
        return await self._generate(http, parse_chat(body, self._settings.alias), behaviour, outcome)

    async def _completion(
        self, http: web.Request, body: Any, behaviour: Behaviour, outcome: Outcome
    ) -> web.StreamResponse:
        return await self._generate(http, parse_completion(body, self._settings.alias), behaviour, outcome)

    async def _generate(
        self, http: web.Request, request: GenerationRequest, behaviour: Behaviour, outcome: Outcome
    ) -> web.StreamResponse:
        dialect = self._settings.dialect
        include_usage = request.include_usage and dialect.counts_streams
        request = replace(request, include_usage=include_usage, use_cache=request.use_cache and dialect.caches_prompts)
        count = len(request.prompts) * request.choices_per_prompt
        if request.choices_per_prompt > self._settings.slots:
            limits = f"1 <= value <= {self._settings.slots}, but got {request.choices_per_prompt}"
            raise bad_request(f"Field 'n': Value must be between {limits}")
        if count > MAX_CHOICES:
            raise bad_request(f"more than {MAX_CHOICES} choices")
        context = self._settings.slot_context_tokens
        holding = self._pool.hold(count, request.prompts[0], use_cache=request.use_cache, number=request.slot)
        async with holding as slots:
            longest = max(map(len, request.prompts))
            if longest >= context:
                raise too_long(longest, context)
            envelope = shapes.Envelope(
                request.model,
                is_chat=request.is_chat,
                thinking_field=dialect.thinking_field,
                figures=self._figures(request),
            )
            sink = StreamSink(http, request, envelope, count) if request.stream else Sink(request, envelope, count)
            generation = Generation(
                http,
                request,
                behaviour,
                sink,
                self._ledger.state,
                outcome,
                lambda: self._control.behaviour,
            )
            try:
                return await generation.run(slots, context)
            except (asyncio.CancelledError, ConnectionError):
                if not dialect.notices_leaving:
                    self._unnoticed.append(asyncio.create_task(_work_on()))
                raise

    def _figures(self, request: GenerationRequest) -> shapes.Figures:
        """Returns the kind of times in an answer; vLLM only reports them for single choices."""
        settings = self._settings
        if not settings.is_vllm:
            return shapes.Figures.TIMINGS
        has_metrics = settings.request_metrics and request.choices_per_prompt == 1
        return shapes.Figures.METRICS if has_metrics else shapes.Figures.NONE

    async def _embed(self, http: web.Request, body: Any, behaviour: Behaviour, outcome: Outcome) -> web.StreamResponse:
        del http, behaviour, outcome
        if not self._settings.embeddings:
            message = "This server does not support embeddings. Start it with `--embeddings`"
            raise RequestError(501, "not_supported_error", message)
        answer, tokens = embeddings_body(body, self._settings.alias, self._settings.slot_context_tokens)
        # Like llama-server: the text stays in its slot, so a completion that begins with it finds it cached.
        async with self._pool.hold(1, prompt_list(body.get("input"), "input")[-1], use_cache=False):
            self._ledger.state.prompt_tokens += tokens
        return json_response(answer)

    async def _health(self, http: web.Request) -> web.StreamResponse:
        del http
        if self._is_loaded():
            return json_response(b'{"status":"ok"}')
        return _refusal(_loading())

    def _models(self) -> dict[str, Any]:
        settings = self._settings
        return vllm_models_page(settings) if settings.is_vllm else models_page(settings, self._started_at)

    async def _slot_action(self, http: web.Request) -> web.StreamResponse:
        if not self._settings.slot_save_path:
            message = "This server does not support slots action. Start it with `--slot-save-path`"
            raise RequestError(501, "not_supported_error", message)
        number = http.match_info["number"]
        if not number.isdecimal() or int(number) >= len(self._pool.slots):
            raise bad_request("Invalid slot ID")
        action = http.query.get("action")
        if action in ("save", "restore"):
            return await self._save_or_restore(http, int(number), action)
        if action != "erase":
            raise bad_request("Invalid action")
        erased = await self._pool.erase(int(number))
        return json_response(shapes.encode({"id_slot": int(number), "n_erased": erased}))

    async def _save_or_restore(self, http: web.Request, number: int, action: str) -> web.StreamResponse:
        slot = self._pool.slots[number]
        file = Path(self._settings.slot_save_path, str((await http.json())["filename"]))
        outcome = saved(slot, file) if action == "save" else restored(slot, file)
        if action == "restore" and self._control.behaviour.forgets_restored:
            slot.prompt = []
        return json_response(shapes.encode({"id_slot": number, **outcome}))

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        del http
        if names := self._settings.dialect.metrics:
            values = {name: self._gauge(name) for name in names}
            text = "".join(f'# TYPE {name} gauge\n{name}{{model="m"}} {value}\n' for name, value in values.items())
            return web.Response(text=text)
        page = metrics_page(self._pool, self._ledger.state)
        return web.Response(body=page.encode(), headers={"Content-Type": "text/plain; version=0.0.4"})

    def _gauge(self, name: str) -> float:
        """Returns the value of a dialect's gauge, selected by words in its name: cache use, running, or waiting."""
        busy = float(self._pool.busy)
        if "usage" in name:
            return busy / self._settings.slots
        return busy if "running" in name or "batch_current" in name else 0.0

    @web.middleware
    async def _without_lacking_routes(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        if http.path in self._settings.dialect.lacks:
            return _refusal(RequestError(404, "not_found_error", "File Not Found"))
        return await handler(http)

    def _require_model(self, body: Any) -> None:
        """Rejects an unlisted model if the server has several."""
        dialect = self._settings.dialect
        name = body.get("model", "") if isinstance(body, dict) else ""
        if dialect.refuses_other_names and name not in (self._settings.alias, *dialect.other_models):
            raise RequestError(404, "not_found_error", f"model '{name}' not found")

    async def _note_call(self, http: web.Request) -> web.StreamResponse:
        self._ledger.state.route_calls.append(f"{http.method} {http.path_qs} {(await http.read()).decode()}")
        return json_response(b"{}")

    async def _not_found(self, http: web.Request) -> web.StreamResponse:
        del http
        raise RequestError(404, "not_found_error", "File Not Found")

    async def _tokenize(self, http: web.Request) -> web.StreamResponse:
        return json_response(model_calls.tokens_body(_decoded(await http.read()), self._settings))

    async def _apply_template(self, http: web.Request) -> web.StreamResponse:
        return json_response(model_calls.template_body(_decoded(await http.read()), self._settings.alias))

    async def _rerank(self, http: web.Request, body: Any, behaviour: Behaviour, outcome: Outcome) -> web.StreamResponse:
        del http, behaviour, outcome
        answer, tokens = model_calls.rerank_body(body, self._settings)
        async with self._pool.hold(1, [], use_cache=False):
            self._ledger.state.prompt_tokens += tokens
        return json_response(answer)

    async def _set_behaviour(self, http: web.Request) -> web.StreamResponse:
        try:
            changes = msgspec.json.decode(await http.read(), type=dict[str, Any])
            behaviour = self._control.update(changes)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return _refusal(bad_request(str(error)))
        self._faults.apply(behaviour)
        return json_response(shapes.encode(behaviour))

    def _state(self) -> FakeState:
        state = self._ledger.state
        state.grandchild_pid = self._faults.grandchild_pid
        state.busy_slots = self._pool.busy
        return state


def _page(build: Callable[[], Any]) -> Handler:
    """Returns a handler that answers with what `build` returns, as JSON."""

    async def page(http: web.Request) -> web.StreamResponse:
        del http
        return json_response(shapes.encode(build()))

    return page


async def _work_on() -> None:
    """Burns most of a processor until the process ends."""
    while True:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
        await asyncio.sleep(0.005)


def _loading() -> RequestError:
    return RequestError(503, "unavailable_error", "Loading model")


def _refusal(error: RequestError) -> web.Response:
    return json_response(shapes.error_body(error), error.status, {"Connection": "close"})


def _decoded(raw: bytes) -> Any:
    """Returns the body as JSON data; NOT_JSON if it is invalid, which every parser rejects."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return NOT_JSON


async def _raw(http: web.Request, text: str) -> Never:
    """Writes `text` as bytes and closes the connection; returns only by cancellation when the connection is closed."""
    transport = cast("asyncio.Transport", http.transport)
    if text:
        transport.write(text.encode("latin-1", "replace"))
        transport.close()
    else:
        # A reset: without this option the kernel would close the connection regularly.
        found = transport.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
    await asyncio.Event().wait()
    raise AssertionError("nothing sets the event")


def _scripted_status(behaviour: Behaviour, status: int) -> web.Response:
    headers = {} if behaviour.retry_after_seconds is None else {"Retry-After": str(behaviour.retry_after_seconds)}
    if behaviour.status_body is not None:
        return json_response(behaviour.status_body.encode(), status, headers)
    error = RequestError(status, _STATUS_KINDS.get(status, "server_error"), f"scripted status {status}")
    return json_response(shapes.error_body(error), status, headers)


TEXT_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
TEMPLATE = TEXT_TEMPLATE + "{% if tools %}{{ tools }}{% endif %}{% if enable_thinking %}<think>{% endif %}"


def props_page(settings: ServerSettings) -> dict[str, Any]:
    """Returns GET /props."""
    has_tools = not settings.text_only
    return {
        "default_generation_settings": {"n_ctx": settings.slot_context_tokens},
        "total_slots": settings.slots,
        "modalities": {"vision": not settings.text_only, "audio": not settings.text_only},
        "chat_template": TEXT_TEMPLATE if settings.text_only else TEMPLATE,
        "chat_template_caps": {"supports_tools": has_tools, "supports_tool_calls": has_tools},
        "build_info": "b0-weft-fake",
    }


def models_page(settings: ServerSettings, started_at: float) -> dict[str, Any]:
    """Returns GET /v1/models."""
    facts = {"object": "model", "created": int(started_at), "owned_by": settings.dialect.owned_by}
    names = (settings.alias, *settings.dialect.other_models)
    return {"object": "list", "data": [{"id": name, **facts} for name in names]}


def saved(slot: Slot, file: Path) -> dict[str, int]:
    """Saves the prompt of a slot."""
    return {"n_saved": len(slot.prompt), "n_written": file.write_bytes(json.dumps(list(slot.prompt)).encode())}


def restored(slot: Slot, file: Path) -> dict[str, int]:
    """Restores the prompt of a slot."""
    if not file.exists():
        raise bad_request("Unable to restore slot: No available space in KV cache or invalid slot save file")
    slot.prompt = json.loads(file.read_bytes())
    return {"n_restored": len(slot.prompt)}


def slots_page(pool: SlotPool) -> list[dict[str, Any]]:
    """Returns GET /slots."""
    return [
        {
            "id": slot.id,
            "is_processing": slot.is_processing,
            **({"id_task": slot.task_id, "n_prompt_tokens": slot.cached_tokens} if slot.task_id >= 0 else {}),
        }
        for slot in pool.slots
    ]


def metrics_page(pool: SlotPool, state: FakeState) -> str:
    """Returns GET /metrics in Prometheus text format."""
    counters = {
        "prompt_tokens_total": state.prompt_tokens - state.cached_prompt_tokens,
        "prompt_tokens_cached_total": state.cached_prompt_tokens,
        "tokens_predicted_total": state.tokens_sent,
    }
    gauges = {"requests_processing": pool.busy, "requests_deferred": pool.waiting}
    kinds = {**dict.fromkeys(counters, "counter"), **dict.fromkeys(gauges, "gauge")}
    return "".join(
        f"# TYPE llamacpp:{name} {kinds[name]}\nllamacpp:{name} {value}\n"
        for name, value in (counters | gauges).items()
    )
