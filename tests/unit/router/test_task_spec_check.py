"""What may be a task."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from router_svc.durable.limits import TaskLimits
from router_svc.durable.tasks.spec_validation import checked_task, limit_to_caller
from router_svc.durable.tasks.task_records import NewTask
from weft.api.common.v1 import chat_pb2, completion_pb2, embedding_pb2, priority_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.operation_table import operation_of
from weft.durable.tasks import payload_of
from weft.kernel.access.principal import LOCAL, OTHER_USER, Principal
from weft.kernel.errors.error_tree import FieldError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation, Priority

LIMITS = TaskLimits(max_origin_bytes=100, max_spec_bytes=1_000, max_attempts=7, pending_limit_seconds=30.0)
PROMPT = completion_pb2.PromptInput(text="hello")


def chat() -> chat_pb2.ChatPayload:
    content = [chat_pb2.ContentPart(text="hello")]
    return chat_pb2.ChatPayload(messages=[chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, content=content)])


def spec() -> task_pb2.TaskSpec:
    return task_pb2.TaskSpec(model="qwen", chat=chat(), origin=b"{}", origin_kind="chat")


def checked(given: task_pb2.TaskSpec, field: str = "spec") -> NewTask:
    return checked_task(given, LIMITS, field, tenant="ann", caller="local", created_at=0.0)


def operation(row: NewTask) -> Operation:
    payload = payload_of(task_pb2.TaskSpec.FromString(row.spec))
    assert payload is not None
    return operation_of(payload).operation


def test_task_without_options_is_durable_with_router_limits() -> None:
    found = checked(spec())
    assert (found.task.model, operation(found), found.band) == ("qwen", Operation.CHAT, Priority.DURABLE)
    assert (found.task.origin_kind, found.task.max_attempts, found.pending_limit_seconds) == ("chat", 7, 30.0)
    assert task_pb2.TaskSpec.FromString(found.spec) == spec()


def test_task_has_its_requested_limits_and_priority() -> None:
    given = spec()
    given.max_attempts = 100
    given.pending_limit.seconds = 7 * 86_400
    given.options.priority = priority_pb2.PRIORITY_LOW
    found = checked(given)
    assert (found.task.max_attempts, found.pending_limit_seconds, found.band) == (100, 604_800.0, Priority.LOW)


@pytest.mark.parametrize(
    ("asked", "kept", "band"),
    [
        (priority_pb2.PRIORITY_HIGH, priority_pb2.PRIORITY_NORMAL, Priority.NORMAL),
        (priority_pb2.PRIORITY_LOW, priority_pb2.PRIORITY_LOW, Priority.LOW),
        (priority_pb2.PRIORITY_UNSPECIFIED, priority_pb2.PRIORITY_UNSPECIFIED, Priority.DURABLE),
    ],
)
def test_task_has_at_most_the_priority_that_its_callers_key_allows(
    asked: "priority_pb2.Priority.ValueType", kept: "priority_pb2.Priority.ValueType", band: Priority
) -> None:
    given = spec()
    given.options.priority = asked
    limit_to_caller(given, replace(LOCAL, max_priority=Priority.NORMAL))
    found = checked(given)
    assert (found.band, task_pb2.TaskSpec.FromString(found.spec).options.priority) == (band, kept)


@pytest.mark.parametrize(("caller", "is_kept"), [(LOCAL, True), (OTHER_USER, False)])
def test_task_keeps_a_keep_alive_only_of_callers_that_may_unload_the_model(caller: Principal, is_kept: bool) -> None:
    given = spec()
    given.options.keep_alive.seconds = 0
    limit_to_caller(given, caller)
    assert given.options.HasField("keep_alive") is is_kept


def test_equal_specs_have_equal_digests_and_others_differ() -> None:
    first, second = spec(), spec()
    assert checked(first).digest == checked(second).digest
    second.options.session = "one"
    assert checked(first).digest != checked(second).digest
    assert len(checked(first).digest) == 32


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (Operation.CHAT, task_pb2.TaskSpec(model="agent/coder", chat=chat())),
        (Operation.CHAT, task_pb2.TaskSpec(model="route/best", chat=chat())),
        (
            Operation.COMPLETION,
            task_pb2.TaskSpec(model="qwen", completion=completion_pb2.CompletionPayload(prompts=[PROMPT])),
        ),
        (
            Operation.EMBEDDING,
            task_pb2.TaskSpec(model="qwen", embedding=embedding_pb2.EmbeddingPayload(inputs=[PROMPT])),
        ),
    ],
)
def test_every_generation_and_embedding_may_be_a_task(expected: Operation, given: task_pb2.TaskSpec) -> None:
    assert operation(checked(given)) is expected


def _agent(given: task_pb2.TaskSpec) -> None:
    given.model = "agent/coder"
    given.embedding.inputs.append(PROMPT)


def _days(given: task_pb2.TaskSpec) -> None:
    given.pending_limit.seconds = 7 * 86_400 + 1


def _ages(given: task_pb2.TaskSpec) -> None:
    given.pending_limit.seconds = 2**62


def _moment(given: task_pb2.TaskSpec) -> None:
    given.pending_limit.nanos = 999_999_999


def _set(name: str, value: object) -> Callable[[task_pb2.TaskSpec], None]:
    def change(given: task_pb2.TaskSpec) -> None:
        *path, last = name.split(".")
        message = given
        for step in path:
            message = getattr(message, step)
        setattr(message, last, value)

    return change


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model", _set("model", "")),
        ("model", _set("model", "a b")),
        ("model", _set("model", "a\0b")),
        ("model", _agent),
        ("payload", lambda given: given.ClearField("chat")),
        ("payload.messages", lambda given: given.chat.ClearField("messages")),
        ("payload.messages[0].role", lambda given: given.chat.messages[0].ClearField("role")),
        ("payload.prompts", lambda given: given.completion.SetInParent()),
        ("payload.inputs", lambda given: given.embedding.SetInParent()),
        ("options.priority", _set("options.priority", priority_pb2.PRIORITY_SYSTEM)),
        ("options.priority", _set("options.priority", Priority.DURABLE.wire)),
        ("options.client_id", _set("options.client_id", "a b")),
        ("options.session", _set("options.session", "x" * 257)),
        ("options.cache_tag", _set("options.cache_tag", "a b")),
        ("origin_kind", _set("origin_kind", "x" * 65)),
        ("origin_kind", _set("origin_kind", "a\0b")),
        ("traceparent", _set("traceparent", "x" * 129)),
        ("pending_limit", lambda given: given.pending_limit.SetInParent()),
        ("pending_limit", _moment),
        ("pending_limit", _days),
        ("pending_limit", _ages),
        ("max_attempts", _set("max_attempts", -1)),
        ("max_attempts", _set("max_attempts", 101)),
    ],
)
def test_out_of_range_field_error_names_it(field: str, change: Callable[[task_pb2.TaskSpec], None]) -> None:
    given = spec()
    change(given)
    with pytest.raises(FieldError) as found:
        checked(given, "lines[3].spec")
    assert (found.value.reason, found.value.field) == (Reason.INVALID_ARGUMENT, f"lines[3].spec.{field}")
    assert found.value.message.startswith(f"lines[3].spec.{field}: ")
    assert found.value.message.count(field) == 1


def test_oversized_field_is_refused_and_one_at_the_limit_is_accepted() -> None:
    given = spec()
    given.origin = bytes(100)
    checked(given)
    given.origin = bytes(101)
    with pytest.raises(FieldError) as found:
        checked(given)
    assert (found.value.reason, found.value.field) == (Reason.REQUEST_TOO_LARGE, "spec.origin")
    given = spec()
    given.chat.messages[0].content[0].text = "x" * 1_000
    with pytest.raises(FieldError) as found:
        checked(given)
    assert (found.value.reason, found.value.field) == (Reason.REQUEST_TOO_LARGE, "spec")
