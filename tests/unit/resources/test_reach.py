"""Texts that make another process open, read or run something need the permission for exactly that."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from weft import api
from weft.api.common.v1 import document_pb2
from weft.api.operations.v1.operation_pb2 import LoadModel, OperationAction, PullModel
from weft.documents.kinds import DECLARED_KINDS, KINDS
from weft.documents.reach import needed_access, reach_of
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import AnyDocument
from weft.documents.rights import require_declarable, require_operable
from weft.documents.yaml_documents import parse_document
from weft.kernel.access.principal import LOCAL, MESH_ACCESS, Principal, parse_scopes
from weft.kernel.access.rpc_auth import access_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.load_parameters import check_parameters, load_parameter, parameter_reach
from weft.kernel.values.reach import Reach


def fields_below(descriptor: Any, seen: set[str]) -> Iterator[FieldDescriptor]:
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        yield field
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            kind = kind.fields_by_name["value"].message_type
        # Documents in an Any are among the declarations.
        if kind is not None and kind.full_name != "google.protobuf.Any":
            yield from fields_below(kind, seen)


def is_text(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return field.cpp_type == FieldDescriptor.CPPTYPE_STRING or (kind is not None and kind.GetOptions().map_entry)


def written_texts() -> list[FieldDescriptor]:
    """The text fields of all messages that callers write: declarations and actions."""
    seen: set[str] = set()
    roots = [*(kind.declared.DESCRIPTOR for kind in KINDS.values()), OperationAction.DESCRIPTOR]
    return [field for root in roots for field in fields_below(root, seen) if is_text(field)]


def requested_texts() -> list[FieldDescriptor]:
    """The text fields of all requests that others than services of the mesh may send over gRPC."""
    seen: set[str] = set()
    methods = [method for service in services() for method in service.methods]
    open_to_callers = [
        each for each in methods if access_of(f"/{each.containing_service.full_name}/{each.name}") != MESH_ACCESS
    ]
    return [field for each in open_to_callers for field in fields_below(each.input_type, seen) if is_text(field)]


def services() -> Iterator[Any]:
    for file in Path(api.__path__[0]).rglob("*_service_pb2.py"):
        module = import_module(".".join([api.__name__, *file.relative_to(api.__path__[0]).with_suffix("").parts]))
        yield from module.DESCRIPTOR.services_by_name.values()


def test_every_text_that_callers_write_states_its_reach() -> None:
    texts = {field.full_name: reach_of(field) for field in (*written_texts(), *requested_texts())}
    assert len(texts) > 200
    unmarked = [name for name, reach in texts.items() if reach is Reach.UNSPECIFIED]
    assert not unmarked, f"state (weft.api.common.v1.reach) of {', '.join(unmarked)}"


PERMITTED = {"weft.api.runner.v1.DescribeRequest.source"}
"""Texts with a permit of the registry, which checks the author."""


def test_requests_without_the_check_have_no_text_that_needs_it() -> None:
    """`require_declarable` and `require_operable` check documents and actions; all other requests are inert."""
    checked = {field.full_name for field in written_texts()}
    others = {field.full_name: reach_of(field) for field in requested_texts() if field.full_name not in checked}
    assert {name for name, reach in others.items() if reach not in (Reach.NONE, Reach.NAME)} == PERMITTED


def test_marks_in_code_have_the_numbers_of_the_contract() -> None:
    assert {f"REACH_{each.name}": each.value for each in Reach} == dict(document_pb2.Reach.items())


def test_names_of_other_resources_are_references_of_their_kind() -> None:
    """A name without a reference is checked by nobody."""
    # An alias of a trial is declared by whoever switches it.
    own = {"name", "pool_name", "pattern", "alias"}
    for kind in DECLARED_KINDS.values():
        known = own | {each.name for each in kind.references}
        declared: Any = kind.declared.DESCRIPTOR
        for field in declared.fields:
            assert reach_of(field) is not Reach.NAME or field.name in known, field.full_name


WAKE = {"kind": "model", "name": "team-a-x", "operations": ["chat"]}
PROVIDER = {"url": "https://api.example.com/v1"}


def model(**fields: object) -> AnyDocument:
    return parse_document(WAKE | fields, ResourceKind.MODEL)


def woken(**recipe: object) -> AnyDocument:
    return model(wake={"byMesh": recipe})


def agent(**fields: object) -> AnyDocument:
    document = {"kind": "agent", "name": "team-a-spy", "model": "team-a-x"} | fields
    return parse_document(document, ResourceKind.AGENT)


def alias(**fields: object) -> AnyDocument:
    document = {"kind": "alias", "name": "team-a-y", "target": "team-a-x"} | fields
    return parse_document(document, ResourceKind.ALIAS)


def workflow() -> AnyDocument:
    graph = {"1": {"class_type": "SaveImage", "inputs": {}}}
    document = {"kind": "workflow", "name": "team-a-w", "model": "team-a-x", "graph": graph, "outputs": ["1"]}
    return parse_document(document, ResourceKind.WORKFLOW)


def load(source: str, **parameters: str) -> OperationAction:
    action = OperationAction(load_model=LoadModel(source=source))
    for name, value in parameters.items():
        action.load_model.options.parameters[name].word = value
    return action


URL = "http://127.0.0.1:9/internal"
MAC = "aa:bb:cc:dd:ee:ff"
DOCUMENTS = {
    "plain model": model(),
    "wake by runner": model(wake={"byRunner": True}),
    "address of a wake": woken(type="http", url=URL),
    "variable of a wake": woken(type="http", url=URL, headers={"x-a": "a", "x-b": "Bearer ${WEFT_WAKE_TOKEN}"}),
    "packet of a wake": woken(type="wake_on_lan", macAddress=MAC),
    "program of a wake": woken(type="command", argv=["/bin/true"]),
    "address of a provider": model(provider=PROVIDER),
    "secret of a provider": model(provider=PROVIDER | {"apiKeyRef": "secret/x"}),
    "plain agent": agent(),
    "tool of an agent": agent(tools=["read_note"]),
    "graph of a workflow": workflow(),
    "preset of an alias": alias(forcedParams={"temperature": 0.2}, removedParams=["seed"]),
    "header of an alias": alias(providerHeaders={"x-a": "plain"}),
    "secret in a header of an alias": alias(providerHeaders={"x-a": "secret/x"}),
}
NEEDED_ACTIONS = {
    "known model": OperationAction(load_model=LoadModel(model="team-a-x")),
    "hub source": load("hf:acme/tiny"),
    "path": load("/etc/passwd.gguf"),
    "url": load("https://host/x.gguf"),
    "server": load("http://127.0.0.1:9"),
    "variable": load("http://127.0.0.1:9", api_key_env="AWS_SECRET_ACCESS_KEY"),
    "pulled path": OperationAction(pull_model=PullModel(source="~/x.gguf")),
    "pulled hub source": OperationAction(pull_model=PullModel(source="hf:acme/tiny")),
}


def no_names(_kind: ResourceKind, _name: str) -> tuple[str, ...]:
    """Names for which present resources answer."""
    return ()


def caller(*scopes: str) -> Principal:
    return Principal(name="key:x", access=parse_scopes(scopes, "scopes"))


OPERATOR = tuple(f"{each}:*" for each in ("inference", "remote", "models", "runners", "operations", "settings"))
CALLERS = {
    "named": caller("models/team-a-*:edit", "inference/team-a-*:create", "operations/team-a-*:create"),
    "loader": caller("operations:create", "models:view"),
    "operator": caller(*OPERATOR),
    "secrets": caller(*OPERATOR, "secrets:create"),
    "admin": caller("*:*"),
    "local": LOCAL,
}
ALL = frozenset(CALLERS)
MAY_DECLARE = {
    "plain model": ALL - {"loader"},
    "wake by runner": ALL - {"loader"},
    "address of a wake": {"operator", "secrets", "admin", "local"},
    "variable of a wake": {"secrets", "admin", "local"},
    "packet of a wake": {"operator", "secrets", "admin", "local"},
    "program of a wake": {"admin", "local"},
    "address of a provider": {"operator", "secrets", "admin", "local"},
    "secret of a provider": {"secrets", "admin", "local"},
    "plain agent": ALL - {"loader"},
    "tool of an agent": {"operator", "secrets", "admin", "local"},
    "graph of a workflow": {"operator", "secrets", "admin", "local"},
    "preset of an alias": ALL - {"loader"},
    "header of an alias": {"operator", "secrets", "admin", "local"},
    "secret in a header of an alias": {"secrets", "admin", "local"},
}
MAY_OPERATE = {
    "known model": ALL,
    "hub source": ALL - {"named"},
    "path": {"operator", "secrets", "admin", "local"},
    "url": {"operator", "secrets", "admin", "local"},
    "server": {"operator", "secrets", "admin", "local"},
    "variable": {"secrets", "admin", "local"},
    "pulled path": {"operator", "secrets", "admin", "local"},
    "pulled hub source": ALL - {"named"},
}


@pytest.mark.parametrize("what", DOCUMENTS)
@pytest.mark.parametrize("who", CALLERS)
def test_document_needs_the_permission_for_what_it_names(what: str, who: str) -> None:
    # Also if it is one of several documents.
    documents = [DOCUMENTS["plain model"], DOCUMENTS[what]]
    if who in MAY_DECLARE[what]:
        require_declarable(CALLERS[who], documents, no_names)
        return
    with pytest.raises(WeftError, match="the key lacks the scope") as refused:
        require_declarable(CALLERS[who], documents, no_names)
    assert refused.value.reason is Reason.PERMISSION_DENIED


@pytest.mark.parametrize("what", NEEDED_ACTIONS)
@pytest.mark.parametrize("who", CALLERS)
def test_action_needs_the_permission_for_what_it_names(what: str, who: str) -> None:
    if who in MAY_OPERATE[what]:
        require_operable(CALLERS[who], NEEDED_ACTIONS[what])
        return
    with pytest.raises(WeftError, match="the key lacks the scope") as refused:
        require_operable(CALLERS[who], NEEDED_ACTIONS[what])
    assert refused.value.reason is Reason.PERMISSION_DENIED


def test_trial_needs_the_permission_for_the_names_that_it_compares() -> None:
    """Its candidate answers a tenant's requests, with the tools of an agent."""
    trial = {"kind": "trial", "name": "t", "tenant": "acme", "candidate": "agent/board", "against": "own"}
    documents = [parse_document(trial | {"sharePercent": 5}, ResourceKind.TRIAL)]
    for scopes in (("settings:edit",), ("settings:edit", "inference/own:create")):
        with pytest.raises(WeftError, match="the key lacks the scope inference/board:create"):
            require_declarable(caller(*scopes), documents, no_names)
    with pytest.raises(WeftError, match="the key lacks the scope settings:edit"):
        require_declarable(caller("models:edit"), documents, no_names)
    require_declarable(caller("settings:edit", "inference/own:create", "inference/board:create"), documents, no_names)
    require_declarable(CALLERS["operator"], documents, no_names)


def test_refusal_names_the_scope_and_the_field_without_the_text() -> None:
    with pytest.raises(WeftError) as refused:
        require_declarable(CALLERS["operator"], [DOCUMENTS["variable of a wake"]], no_names)
    assert refused.value.message == (
        "the key lacks the scope secrets:create: model/team-a-x: wake.by_mesh.http.headers[x-b] names a variable"
    )


@pytest.mark.parametrize("who", ["admin", "local"])
@pytest.mark.parametrize(
    "document",
    [
        woken(type="http", url="http://169.254.169.254/latest/api/token"),
        woken(type="http", url="http://[fe80::1]:80/"),
        woken(type="wake_on_lan", macAddress=MAC, broadcastAddress="169.254.255.255"),
        model(provider={"url": "https://169.254.169.254/v1"}),
    ],
)
def test_nobody_may_name_a_link_local_address_in_a_document(document: AnyDocument, who: str) -> None:
    with pytest.raises(WeftError, match="names a link-local address, which no caller may name") as refused:
        require_declarable(CALLERS[who], [document], no_names)
    assert refused.value.reason is Reason.PERMISSION_DENIED


@pytest.mark.parametrize("who", ["admin", "local"])
@pytest.mark.parametrize("source", ["http://169.254.169.254", "https://169.254.169.254/x.gguf"])
def test_nobody_may_name_a_link_local_address_as_a_source(source: str, who: str) -> None:
    for action in (load(source), OperationAction(pull_model=PullModel(source=source))):
        with pytest.raises(WeftError, match="names a link-local address, which no caller may name"):
            require_operable(CALLERS[who], action)


def test_every_reach_that_needs_a_permission_is_in_the_table() -> None:
    """A text of a new reach must be tried as well."""
    tried = {text.reach for each in DOCUMENTS.values() for text, _ in needed_access(each.declared)}
    tried |= {text.reach for each in NEEDED_ACTIONS.values() for text, _ in needed_access(each)}
    stated = {reach_of(field) for field in written_texts()} | {Reach.VARIABLE}
    assert stated - tried == {Reach.NONE, Reach.NAME, Reach.PARAMETERS}


def test_parameters_of_a_load_are_words_of_a_list_unless_they_are_marked() -> None:
    assert parameter_reach("api_key_env") is Reach.VARIABLE
    assert parameter_reach("cache_type_k") is Reach.NONE
    for allowed in ({"integer": True}, {"flag": True}, {"words": ["f16"]}, {}):
        with pytest.raises(WeftError):
            check_parameters({"a": "/etc/passwd"}, [load_parameter("a", "A parameter.", **allowed)])
