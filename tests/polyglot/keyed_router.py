"""A router that speaks TLS and asks for keys, as docs/api.md configures it."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
from apart_mesh import Apart
from mesh_process import POLL_SECONDS, WEFT, fake_runner, user_environment, write_config

from weft.api.common.v1 import chat_pb2
from weft.api.router.v1 import inference_service_pb2, inference_service_pb2_grpc
from weft_testing.certificates import Authority

READY_SECONDS = 20.0
MODEL = "m-talk"


@dataclass(frozen=True, slots=True)
class KeyedRouter:
    """A router that runs."""

    address: str
    ca_file: Path
    """The authority that its certificate is from."""
    key: str


@contextmanager
def running_keyed_router(folder: Path) -> Iterator[KeyedRouter]:
    """Registry, router and a runner of MODEL as processes; the router answers when the block begins."""
    authority = Authority()
    files = authority.issue("localhost", "127.0.0.1").write(folder, authority)
    tls = {"certificate_file": str(files.certificate_file), "key_file": str(files.key_file)}
    config = write_config(folder, fake_runner("talk", answer_tokens=3), auth={"required": True}, tls=tls)
    services = Apart(folder / "home", config)
    try:
        services.start("registry")
        address = services.start("router", "--listen", "tls:127.0.0.1:0")
        services.start("runner")
        services.start("gateway")
        assert files.ca_file is not None
        router = KeyedRouter(f"localhost:{address.rpartition(':')[2]}", files.ca_file, _new_key(folder / "home"))
        _wait_until_ready(router)
        yield router
    finally:
        codes = services.end_all()
    assert set(codes) == {0}


def _new_key(home: Path) -> str:
    command = [*WEFT, "keys", "create", "-o", "name", "--home", str(home)]
    return subprocess.run(command, env=user_environment(), capture_output=True, text=True, check=True).stdout.strip()


def _wait_until_ready(router: KeyedRouter) -> None:
    """Returns once a chat is answered: the router hears of the runner, and of the key, from the registry."""
    request = inference_service_pb2.ChatRequest(model=MODEL)
    request.payload.messages.add(role=chat_pb2.ROLE_USER).content.add(text="hi")
    metadata = (("authorization", f"Bearer {router.key}"),)
    deadline = time.monotonic() + READY_SECONDS
    with grpc.secure_channel(router.address, grpc.ssl_channel_credentials(router.ca_file.read_bytes())) as channel:
        stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
        while True:
            try:
                list(stub.Chat(request, timeout=READY_SECONDS, metadata=metadata))
            except grpc.RpcError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)
            else:
                return
