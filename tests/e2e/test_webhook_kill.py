"""A router that is killed once a task has ended, and before its event is sent: its successor sends the event."""

import signal
from pathlib import Path
from typing import Any

import openai
from aiohttp import web
from kit.resources import declared
from mesh_process import eventually, fake_runner
from task_mesh import Tasks, running_task_mesh, task_service

from weft.api.registry.v1 import (
    declaration_service_pb2,
    declaration_service_pb2_grpc,
    secret_service_pb2,
    secret_service_pb2_grpc,
)
from weft.api.registry.v1.tenant_pb2 import TenantManifest, Webhook
from weft.api.router.v1.webhook_pb2 import WebhookEvent
from weft.kernel.channels.rpc import open_channel
from weft_testing.free_port import free_port

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
WAIT_SECONDS = 30.0


async def declare_webhook(registry: str, url: str) -> None:
    async with open_channel(registry) as channel:
        secrets: Any = secret_service_pb2_grpc.SecretServiceStub(channel)
        await secrets.CreateSecret(secret_service_pb2.CreateSecretRequest(name="hooks", value=SECRET))
        declarations: Any = declaration_service_pb2_grpc.DeclarationServiceStub(channel)
        webhook = Webhook(url=url, secret_ref="secret/hooks")
        tenant = declared(tenant=TenantManifest(name="default", webhook=webhook))
        await declarations.Apply(declaration_service_pb2.ApplyRequest(declarations=[tenant]))


async def test_event_of_a_task_that_ended_before_a_kill_is_sent_after_it(tmp_path: Path) -> None:
    received = list[tuple[dict[str, str], bytes]]()

    async def receive(got: web.BaseRequest) -> web.StreamResponse:
        received.append((dict(got.headers), await got.read()))
        return web.Response(status=204)

    port = free_port()
    with running_task_mesh(tmp_path, fake_runner("a")) as mesh:
        mesh.start_runner("a")
        await declare_webhook(f"unix:{mesh.home}/run/registry.sock", f"http://127.0.0.1:{port}/hook")
        mesh.start_deadly_router("ended:1")
        async with task_service(mesh.address) as tasks:
            # Nobody listens at the URL yet.
            task = (await tasks.submit(5)).task.id
            mesh.wait_dead()
            server = web.ServerRunner(web.Server(receive, access_log=None))
            await server.setup()
            await web.TCPSite(server, "127.0.0.1", port).start()
            mesh.start("router")
            await eventually(lambda: is_delivered(tasks, task), WAIT_SECONDS, "the event was not sent")
            mesh.end("router", signal.SIGTERM)
            await server.cleanup()
    ((headers, body),) = received
    event: Any = openai.OpenAI(api_key="none", webhook_secret=SECRET).webhooks.unwrap(body, headers)
    assert (event.type, event.data.id) == ("task.completed", task)
    assert event.id == headers["webhook-id"] == f"evt_{task.removeprefix('task-')}"


async def is_delivered(tasks: Tasks, task: str) -> bool:
    return (await tasks.get(task)).webhook.state == WebhookEvent.STATE_DELIVERED
