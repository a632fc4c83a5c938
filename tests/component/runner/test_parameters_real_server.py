"""The real llama.cpp server supports the parameters on weft's list, and tools beside a format or with any schema."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kit.engine_settings import engine_settings
from kit.engines import chat, events_of, started
from kit.presence import present

from runner_svc.backend.port import CallInfo
from runner_svc.runtimes.llama_server.llama_server_backend import LlamaServerBackend
from runner_svc.runtimes.llama_server.runtime import PARAMETERS as LLAMA_SERVER_PARAMETERS
from runner_svc.runtimes.llama_server.runtime import LlamaServerModel, llama_command
from weft.api.common.v1 import chat_pb2, sampling_pb2
from weft.kernel.telemetry.structured_logs import new_traceparent
from weft.kernel.text.json_objects import to_json_object
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
    told = present(await backend._running().answer_of("/props", 5.0))
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


TOOLS_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for tool_call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ tool_call.function.name }}", "arguments": {{ tool_call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The demo model's own template has no tools, and then the server ignores them."""
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
"""zod's pattern of an e-mail address."""


@asynccontextmanager
async def _with_tools(folder: Path) -> AsyncIterator[LlamaServerBackend]:
    template = folder / "tools.jinja"
    template.write_text(TOOLS_TEMPLATE)
    config = engine_settings(
        LlamaServerModel,
        command=llama_command(None),
        path=demo_model_path(),
        context_tokens=1024,
        chat_template_path=template,
    )
    async with started(LlamaServerBackend(*config)) as (backend, _):
        yield backend


def _calling(schema: dict[str, Any], **fields: Any) -> chat_pb2.ChatPayload:
    payload = chat("Look for cats.", **fields)
    parameters = to_json_object({"type": "object", "properties": {"a": schema}}, "schema")
    payload.tools.add(function=chat_pb2.FunctionTool(name="look", parameters=parameters))
    return payload


async def test_unsupported_schema_of_a_tool_does_not_fail_the_request_on_the_real_server(tmp_path: Path) -> None:
    sampling = sampling_pb2.SamplingParams(max_tokens=4)
    tools = ["tools[0].function.parameters"]
    async with _with_tools(tmp_path) as backend:
        # llama.cpp accepts look-ahead in a tool, and rejects the other schemas, which are then simplified.
        for schema, fields in (
            ({"type": "string", "pattern": EMAIL}, []),
            ({"$ref": "https://example.com/s.json"}, tools),
            ({"$ref": "#/$defs/Lost"}, tools),
            ({"enum": None}, tools),
        ):
            events = await events_of(backend, _calling(schema, sampling=sampling))
            assert [event.warning.field for event in events if event.HasField("warning")] == fields, schema
            assert events[-1].HasField("finished"), schema


async def test_answer_of_the_real_server_keeps_to_its_schema_beside_tools_with_a_warning(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"z": {"type": "integer", "maximum": 99}}, "required": ["z"]}
    form = chat_pb2.JsonSchemaFormat(name="x", schema=to_json_object(schema, "schema"))
    payload = _calling(
        {"type": "string"},
        sampling=sampling_pb2.SamplingParams(max_tokens=60, temperature=0),
        response_format=chat_pb2.ResponseFormat(json_schema=form),
    )
    async with _with_tools(tmp_path) as backend:
        events = await events_of(backend, payload)
    assert isinstance(msgspec.json.decode("".join(event.delta.text for event in events))["z"], int)
    assert [event.warning.field for event in events if event.HasField("warning")] == ["tools"]
