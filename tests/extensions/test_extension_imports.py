"""The core's public modules: what extensions may import of services and application. All of `weft` is public."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ("gateway", "registry_svc", "router_svc", "runner_svc", "weft_app")
PUBLIC = {
    "gateway.answers.answer_builder",
    "gateway.answers.binary",
    "gateway.answers.call_arguments",
    "gateway.answers.generation",
    "gateway.answers.sse",
    "gateway.answers.sse_writer",
    "gateway.answers.unary",
    "gateway.auth.authentication",
    "gateway.deps",
    "gateway.errors",
    "gateway.gateway_config",
    "gateway.http.disconnect",
    "gateway.http.server",
    "gateway.http.tls",
    "gateway.http_api",
    "gateway.intake.body",
    "gateway.intake.headers",
    "gateway.intake.json_guard",
    "gateway.intake.multipart",
    "gateway.intake.query",
    "gateway.intake.request_model",
    "gateway.media",
    "gateway.media.content",
    "gateway.media.documents",
    "gateway.media.fetcher",
    "gateway.media.request_media",
    "gateway.openai.chat_builder",
    "gateway.openai.chat_schema",
    "gateway.openai.completions",
    "gateway.openai.embeddings",
    "gateway.openai.extension_fields",
    "gateway.openai.models",
    "gateway.openai.sampling",
    "gateway.openapi",
    "gateway.operation_client",
    "gateway.ports",
    "gateway.registry_client",
    "gateway.request_facts",
    "gateway.routing",
    "gateway.tasks.result_content",
    "gateway.tasks.task_apis",
    "gateway.server_tools.pages",
    "gateway.server_tools.permission",
    "gateway.server_tools.tool",
    "gateway.tasks.task_handlers",
    "gateway.workbench.serving",
    "router_svc.policy.decisions",
    "router_svc.policy.endpoints.candidates",
    "router_svc.policy.endpoints.choice",
    "router_svc.policy.endpoints.cluster_view",
    "router_svc.policy.endpoints.engine_load",
    "router_svc.policy.endpoints.routes",
    "router_svc.policy.estimates",
    "router_svc.policy.limits",
    "router_svc.policy.pool_settings",
    "router_svc.policy.port",
    "router_svc.policy.queue.request_class",
    "router_svc.policy.quotes",
    "router_svc.policy.router_request",
    "router_svc.policy.scheduler",
    "runner_svc.backend.devices",
    "runner_svc.backend.port",
    "runner_svc.dial_out",
    "runner_svc.engine_http.answer",
    "runner_svc.environments.environment",
    "runner_svc.instance.instance_settings",
    "runner_svc.memory.estimate",
    "runner_svc.model_files.pipeline_folder",
    "runner_svc.openai_upstream.address",
    "runner_svc.openai_upstream.answers",
    "runner_svc.openai_upstream.client",
    "runner_svc.openai_upstream.dialects",
    "runner_svc.openai_upstream.errors",
    "runner_svc.openai_upstream.media",
    "runner_svc.openai_upstream.openai_request",
    "runner_svc.openai_upstream.tokens",
    "runner_svc.policy.engine_choice",
    "runner_svc.policy.engine_variables",
    "runner_svc.policy.load_options",
    "runner_svc.policy.memory_estimate",
    "runner_svc.policy.model_sizing",
    "runner_svc.policy.parameters",
    "runner_svc.policy.timeouts",
    "runner_svc.policy.tuning",
    "runner_svc.policy.voices",
    "runner_svc.runner_config",
    "runner_svc.runner_service",
    "runner_svc.runner_settings",
    "runner_svc.runtimes.engine_figures",
    "runner_svc.runtimes.flags",
    "runner_svc.runtimes.llama_props",
    "runner_svc.runtimes.model_engine",
    "runner_svc.runtimes.placeholders",
    "runner_svc.runtimes.runtime",
    "runner_svc.runtimes.runtime_settings",
    "runner_svc.runtimes.saved_prompts",
    "runner_svc.runtimes.server_calls",
    "runner_svc.runtimes.started_server",
    "runner_svc.runtimes.table",
    "runner_svc.runtimes.unmanaged_server",
    "runner_svc.supervise.peer_process",
    "runner_svc.supervise.socket_folder",
    "runner_svc.templates.rendered_request",
    "runner_svc.templates.sandbox",
    "runner_svc.tools.port",
    "runner_svc.tools.tool_box",
    "weft_app.cli.columns",
    "weft_app.cli.completion",
    "weft_app.cli.declare",
    "weft_app.cli.mesh_api",
    "weft_app.cli.operations",
    "weft_app.cli.options",
    "weft_app.cli.output",
    "weft_app.cli.ps",
    "weft_app.cli.terminal",
    "weft_app.compose.gateway_tools",
    "weft_app.compose.grpc_host",
    "weft_app.compose.join_listeners",
    "weft_app.compose.machine_credential",
    "weft_app.compose.relay",
    "weft_app.compose.served_models",
    "weft_app.config.loader",
    "weft_app.config.refusals",
    "weft_app.config.runners",
}
"""Moving or changing one of these may break an extension of another package."""


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            modules = {each for each in inner if ROOT.joinpath(*each.split(".")).with_suffix(".py").is_file()}
            yield from modules or {node.module}
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names)


def of_core() -> set[str]:
    files = (ROOT / "weft_extensions").rglob("*.py")
    return {name for file in files for name in imported(file) if name.split(".")[0] in CORE}


def test_extensions_import_only_public_modules_of_the_core() -> None:
    assert of_core() - PUBLIC == set()


def test_every_public_module_is_used_by_an_extension() -> None:
    assert PUBLIC - of_core() == set()
