"""Whatever field of a message a service refuses: a command names the option or argument that was typed."""

import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_status import rpc_status
from typer.testing import CliRunner

from weft.kernel.errors import FieldError
from weft.kernel.rpc import error_to_status
from weft_app.cli.main import COMMANDS, app

COMMAND_LINES = """
load zz-m --ctx 8192 --evict zz-e --request-id zz-id
load hf:zz/zz-b --name zz-n --runner zz-r
load zz-m --replicas 7
load zz-m --set batch_tokens=7
unload zz-m
flush --tag zz-tag --tenant zz-t
flush --model zz-m --runner zz-r
pull hf:zz/zz-b --runner zz-r
attach http://zz.lan:11434 --name zz-n --runner zz-r
detach zz-n
keys create --tenant zz-t --description zz-d
keys revoke zz-id
runner token create --description zz-d --address zz.lan:7
runner token revoke zz-id
lease release zz-l
usage --tenant zz-t --model zz-m
get requests zz-q
get tasks --caller zz-c
get models zz-m
describe runner zz-r
describe request zz-q
describe task zz-t
explain zz-q
delete agent zz-m
delete task zz-t
delete secret zz-s
cancel request zz-q
cancel task zz-t
cancel operation zz-o
wait task zz-t
events model zz-m --limit 7
profile save zz-p --description zz-d
profile switch zz-p
operation list --limit 7
operation watch zz-o
audit list --after 7
create secret zz-s --from-env HOME
create model zz-m --url https://zz.example/v1 --api-key-ref secret/zz-k
rotate secret zz-s --from-env HOME
edit agent zz-m
logs zz-m
logs task/zz-t
log-level runner/zz-r debug --for 10m
""".strip().splitlines()
OTHERS = frozenset(
    {
        *("up", "stop", "restart", "reload", "status", "health", "version", "demo", "ui", "doctor"),  # of this machine
        *("discover", "models", "estimate", "simulate", "runtime", "service", "serve", "edge", "launch"),
        *("sign", "approve"),  # of files
        *("apply", "diff"),  # of documents: test_cli_declare.py
        *("ps", "top", "figures"),  # they send nothing that was typed
        *("config", "conformance", "batch"),  # they look names up themselves, or call HTTP
        *("chat", "run", "image", "transcribe", "speak"),  # of requests to models: test_cli_media.py, test_cli_chat.py
    }
)
_NAMED = re.compile(r"(?:^|: )(?P<name>--[a-z-]+(?: \w+)?|[A-Z][A-Z-]*): is refused")
"""An option, that of an engine's parameter with its name, or an argument."""


class RefusingServices(grpc.GenericRpcHandler):
    """Every service of weft: each refuses one of the fields of a request that were typed, all else is answered."""

    def __init__(self) -> None:
        self.place = 0
        """Which of the typed fields is refused."""
        self.typed: list[str] = []
        """The fields that were typed, in the request that was refused."""
        for file in (Path(__file__).parents[3] / "weft" / "api").rglob("*_pb2.py"):
            import_module("weft.api." + ".".join(file.relative_to(file.parents[2]).with_suffix("").parts))

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[Any, Any] | None":
        service, _, name = str(handler_call_details.method).removeprefix("/").partition("/")
        try:
            method = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(name)
        except KeyError:
            return None
        asked, answer = (message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type))

        def run(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            if typed := list(_typed_fields(asked.FromString(next(requests)))):
                self.typed = typed
                status = rpc_status.to_status(error_to_status(FieldError(typed[self.place], "is refused")))
                context.set_trailing_metadata(status.trailing_metadata)
                context.abort(status.code, status.details)
            yield answer().SerializeToString()

        return grpc.stream_stream_rpc_method_handler(run)


def _typed_fields(message: Message, path: str = "") -> Iterator[str]:
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        for place, item in enumerate(value if field.is_repeated else [value]):
            name = f"{path}{field.name}[{place}]" if field.is_repeated else f"{path}{field.name}"
            if field.message_type is not None:
                yield from _typed_fields(item, f"{name}.")
            elif re.search(r"\bzz\b|^7$|^8192$", str(item)):
                yield name


@pytest.fixture(scope="module")
def services() -> Iterator[tuple[RefusingServices, str]]:
    refusing = RefusingServices()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[refusing])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield refusing, f"127.0.0.1:{port}"
        server.stop(0).wait()


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_refused_field_has_the_name_of_its_option_or_argument(
    line: str, services: tuple[RefusingServices, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing, address = services
    for name, value in (("WEFT_HOME", str(tmp_path)), ("WEFT_REGISTRY", address), ("WEFT_ROUTER", address)):
        monkeypatch.setenv(name, value)
    refusing.place, refusing.typed = 0, []
    while refusing.place == 0 or refusing.place < len(refusing.typed):
        said = CliRunner().invoke(app, shlex.split(line)).output
        assert refusing.typed, "no field was typed"
        found = _NAMED.search(said)
        assert found is not None, f"{refusing.typed[refusing.place]}: {said}"
        assert found["name"].partition(" ")[0] in line or not found["name"].startswith("--")
        refusing.place += 1


def test_every_command_is_tried_or_has_a_reason_not_to_be() -> None:
    assert {line.split()[0] for line in COMMAND_LINES} == COMMANDS.keys() - OTHERS
    assert COMMANDS.keys() >= OTHERS
