"""weft's trimmed messages of Envoy's API against the descriptors that the Envoy binary carries."""

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto
from kit.envoy_descriptors import EnvoySchema, envoy_schema

from weft.api.envoy.v1 import access_log_pb2, base_pb2, external_processor_pb2, token_usage_pb2
from weft.kernel import lane_names

FILES = (access_log_pb2, base_pb2, external_processor_pb2, token_usage_pb2)
ROOTS: tuple[tuple[Descriptor, str], ...] = (
    (external_processor_pb2.ProcessingRequest.DESCRIPTOR, ".envoy.service.ext_proc.v3.ProcessingRequest"),
    (external_processor_pb2.ProcessingResponse.DESCRIPTOR, ".envoy.service.ext_proc.v3.ProcessingResponse"),
    (access_log_pb2.StreamAccessLogsMessage.DESCRIPTOR, ".envoy.service.accesslog.v3.StreamAccessLogsMessage"),
    (access_log_pb2.StreamAccessLogsResponse.DESCRIPTOR, ".envoy.service.accesslog.v3.StreamAccessLogsResponse"),
    (token_usage_pb2.TokenUsage.DESCRIPTOR, ".envoy.data.ai.v3.TokenUsage"),
)


def test_every_field_of_the_trimmed_messages_has_envoys_number_name_and_type() -> None:
    assert list(differences(envoy_schema(), ROOTS, set())) == []


def test_every_message_of_the_package_is_compared() -> None:
    seen: set[str] = set()
    list(differences(envoy_schema(), ROOTS, seen))
    assert {name for name in all_messages() if name not in seen} == set()


def test_both_methods_have_envoys_names() -> None:
    assert envoy_schema().methods == {lane_names.PROCESS_METHOD, lane_names.STREAM_ACCESS_LOGS_METHOD}


def test_a_changed_number_and_a_changed_type_are_found() -> None:
    envoy = envoy_schema()
    name = ".envoy.service.ext_proc.v3.HttpBody"
    changed = DescriptorProto()
    changed.CopyFrom(envoy.messages[name])
    changed.field[0].type = FieldDescriptorProto.TYPE_UINT64
    changed.field[1].number = 9
    other = EnvoySchema({**envoy.messages, name: changed}, envoy.enums, envoy.methods)
    assert list(differences(other, ROOTS, set())) == [
        "weft.api.envoy.v1.HttpBody.body: type 12, Envoy has 4",
        "weft.api.envoy.v1.HttpBody.end_of_stream: Envoy has no field 2",
    ]


def differences(envoy: EnvoySchema, pairs: tuple[tuple[Descriptor, str], ...], seen: set[str]) -> Iterator[str]:
    """Yields where a message, or one that it holds, differs from Envoy's; adds the names of messages to `seen`."""
    for ours, theirs in pairs:
        if ours.full_name in seen:
            continue
        seen.add(ours.full_name)
        fields = {field.number: field for field in envoy.messages[theirs].field}
        for field in ours.fields:
            if (envoys := fields.get(field.number)) is None:
                yield f"{field.full_name}: Envoy has no field {field.number}"
                continue
            yield from _field_differences(envoy, field, envoys, seen)


def _field_differences(
    envoy: EnvoySchema, ours: FieldDescriptor, theirs: FieldDescriptorProto, seen: set[str]
) -> Iterator[str]:
    if ours.name != theirs.name:
        yield f"{ours.full_name}: Envoy's name is {theirs.name}"
    if ours.type != theirs.type and not _same_varint(ours, theirs):
        yield f"{ours.full_name}: type {ours.type}, Envoy has {theirs.type}"
    if ours.is_repeated != (theirs.label == FieldDescriptorProto.LABEL_REPEATED):
        yield f"{ours.full_name}: one of the two is repeated"
    if ours.message_type and theirs.type_name in envoy.messages:
        yield from differences(envoy, ((ours.message_type, theirs.type_name),), seen)
    elif ours.message_type and f".{ours.message_type.full_name}" != theirs.type_name:
        yield f"{ours.full_name}: a {ours.message_type.full_name}, Envoy has {theirs.type_name}"
    if ours.enum_type and theirs.type_name in envoy.enums:
        yield from _enum_differences(ours.enum_type, envoy.enums[theirs.type_name])


def _same_varint(ours: FieldDescriptor, theirs: FieldDescriptorProto) -> bool:
    """An enum may be read as a number: the bytes are those of an int32."""
    return (ours.type, theirs.type) == (FieldDescriptor.TYPE_INT32, FieldDescriptorProto.TYPE_ENUM)


def _enum_differences(ours: EnumDescriptor, theirs: dict[int, str]) -> Iterator[str]:
    for value in ours.values:
        if value.number not in theirs:
            yield f"{ours.full_name}: Envoy has no value {value.number}"
        elif value.number and not value.name.endswith(f"_{theirs[value.number]}"):
            yield f"{ours.full_name}.{value.name}: Envoy's name is {theirs[value.number]}"


def all_messages() -> Iterator[str]:
    """Yields the full name of each message of the package."""
    for file in FILES:
        for message in file.DESCRIPTOR.message_types_by_name.values():
            yield from _with_nested(message)


def _with_nested(message: Descriptor) -> Iterator[str]:
    yield message.full_name
    for nested in message.nested_types:
        yield from _with_nested(nested)
