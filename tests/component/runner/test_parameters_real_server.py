"""The real llama.cpp server supports the parameters on weft's list."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit.engine_settings import engine_settings

from runner_svc.backend.port import CallInfo
from runner_svc.runtimes.llama_server.backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER_PARAMETERS
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel, llama_command
from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.kernel.json_objects import to_json_object
from weft.kernel.telemetry import new_traceparent
from weft_app.compose.demo import demo_model_path

pytestmark = [pytest.mark.slow("a real engine"), pytest.mark.real]

VALUES: dict[str, Any] = {
    "adaptive_decay": 0.5,
    "adaptive_target": 0.3,
    "chat_template_kwargs": {"enable_thinking": False, "target_lang_code": "de"},
    "dry_allowed_length": 3,
    "dry_base": 1.5,
    "dry_multiplier": 0.8,
    "dry_penalty_last_n": 65_536,
    "dry_sequence_breakers": ["\n"],
    "dynatemp_exponent": 1.2,
    "dynatemp_range": 0.3,
    "grammar": 'root ::= "o" "k"',
    "ignore_eos": False,
    "min_keep": 2,
    "mirostat": 0,
    "mirostat_eta": 0.2,
    "mirostat_tau": 4,
    "n_indent": 0,
    "reasoning_budget_tokens": 5,
    "repeat_last_n": 65_536,
    "samplers": ["top_k", "temperature"],
    "t_max_predict_ms": 60_000,
    "thinking_budget_tokens": 5,
    "top_n_sigma": 2,
    "typical_p": 0.9,
    "xtc_probability": 0.1,
    "xtc_threshold": 0.2,
}
UNREPORTED = {
    *("chat_template_kwargs", "dry_sequence_breakers", "grammar", "json_schema", "n_indent"),
    *("reasoning_budget_tokens", "t_max_predict_ms", "thinking_budget_tokens"),
}
"""The server takes them and does not show them among its settings."""


async def _known_names(backend: LlamaServerBackend) -> set[str]:
    told = await backend._running().answer_of("/props", 5.0)
    assert told is not None
    props = msgspec.json.decode(told[1])
    return set(props["default_generation_settings"]["params"])


async def test_every_listed_parameter_works_on_the_real_server() -> None:
    config = engine_settings(
        LlamaServerModel,
        command=llama_command(None),
        path=Path(demo_model_path()),
        name="m",
        slots=1,
        context_tokens=256,
    )
    backend = LlamaServerBackend(*config)
    await backend.start()
    try:
        names = await _known_names(backend)
        message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="hi")])
        payload = chat_pb2.ChatPayload(
            messages=[message],
            sampling=sampling_pb2.SamplingParams(max_tokens=8),
            extra_parameters=to_json_object(VALUES, "extra"),
        )
        call = CallInfo(request_id="r1", traceparent=new_traceparent())
        events = [event async for frame in backend.generate(payload, call) for event in frame]
    finally:
        await backend.stop()
    allowed = set(LLAMA_SERVER_PARAMETERS.allowed)
    assert allowed - names == UNREPORTED
    assert allowed - set(VALUES) == {"json_schema"}  # not together with a grammar
    assert "".join(event.delta.text for event in events) == "ok"
    # The demo model does not translate.
    warned = [event.warning.field for event in events if event.HasField("warning")]
    assert warned == ["chat_template_kwargs.target_lang_code"]
