"""Services that reject a caller's fields, one after the other."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message
from grpc_status import rpc_status

from weft.api.registry.v1.resource_pb2 import ResourceDocument
from weft.documents.resources import declared_document
from weft.kernel.channels.rpc import error_to_status
from weft.kernel.errors.error_tree import FieldError


class RefusingServices(grpc.GenericRpcHandler):
    """All of weft's services: rejects one typed field of a request, and answers everything else."""

    def __init__(self) -> None:
        self.place = 0
        """Index of the typed field to reject."""
        self.typed: list[str] = []
        """The typed fields in the rejected request."""
        for file in (Path(__file__).parents[2] / "weft" / "api").rglob("*_pb2.py"):
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
        for index, item in enumerate(value if field.is_repeated else [value]):
            name = f"{path}{field.name}[{index}]" if field.is_repeated else f"{path}{field.name}"
            if isinstance(item, ResourceDocument):
                yield from _typed_fields(declared_document(item).declared, f"{name}.{item.kind}.")
            elif field.message_type is not None and not field.message_type.full_name.startswith("google."):
                yield from _typed_fields(item, f"{name}.")
            elif re.search(r"\bzz\b|^7$|^8192$", str(item)):
                yield name


@contextmanager
def refusing_services() -> Iterator[tuple[RefusingServices, str]]:
    """Serves all of weft's services at one address."""
    refusing = RefusingServices()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[refusing])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield refusing, f"127.0.0.1:{port}"
        server.stop(0).wait()
