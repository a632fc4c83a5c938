"""`weft load`, `unload`, `flush`, `operation` and `audit`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from operations_script import GIB, ScriptedRegistry, an_operation, audit_entries, scripted_registry

from weft.api.operations.v1 import operation_pb2
from weft.api.runner.v1 import runner_service_pb2
from weft.documents.codec import document_of
from weft.kernel.errors.error_tree import WeftError, invalid_field
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.short_names import SHORT_NAMES
from weft_app.cli.mesh_api import MeshApi
from weft_app.cli.options import EXIT_NOT_FOUND


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[ScriptedRegistry]:
    with scripted_registry(tmp_path / "home") as script:
        yield script


def loaded() -> operation_pb2.Operation:
    result = operation_pb2.OperationResult(memory_bytes=5 * GIB, memory_measured=True, models=["qwen"])
    result.load_time.FromNanoseconds(4_200_000_000)
    return an_operation("SUCCEEDED", result=result)


def test_load_waits_for_its_end_and_reports_the_result(registry: ScriptedRegistry) -> None:
    registry.told = [an_operation("RUNNING", stage="loading"), loaded()]
    found = registry.run("load", "qwen")
    assert (found.exit_code, found.stdout) == (0, "model/qwen loaded (in 4.2 s, holds 5 GiB)\n")
    assert found.stderr == "", "nobody watches a terminal here, and nobody asked for --watch"


def test_load_accepts_a_short_name_unknown_to_the_mesh(registry: ScriptedRegistry) -> None:
    """`weft pull` and `weft run` took it, and `weft load` said that there is no such model."""
    registry.told, registry.unknown = [loaded()], frozenset({"llama3.2:1b"})
    done = registry.run("load", "llama3.2:1b", "--pin")
    assert done.exit_code == 0, done.stderr
    (load,) = (request.action.load_model for request in registry.created)
    assert (load.model, load.source, load.options.pin) == ("llama3.2:1b", SHORT_NAMES["llama3.2:1b"], True)
    assert f"llama3.2:1b is {SHORT_NAMES['llama3.2:1b']}" in done.stderr


def test_mesh_model_takes_precedence_over_a_short_name(registry: ScriptedRegistry) -> None:
    registry.told = [loaded()]
    assert registry.run("load", "llama3.2:1b").exit_code == 0
    (load,) = (request.action.load_model for request in registry.created)
    assert (load.model, load.source) == ("llama3.2:1b", "")


@pytest.mark.parametrize(
    ("options", "model"), [(("--runner", "box"), "llama3.2:1b"), (("--name", "tiny", "--runner", "box"), "tiny")]
)
def test_short_name_accepts_source_options(registry: ScriptedRegistry, options: tuple[str, ...], model: str) -> None:
    registry.told = [loaded()]
    assert registry.run("load", "llama3.2:1b", *options).exit_code == 0
    (load,) = (request.action.load_model for request in registry.created)
    assert (load.model, load.source, load.runner) == (model, SHORT_NAMES["llama3.2:1b"], "box")


def test_unknown_name_that_is_no_short_name_is_rejected(registry: ScriptedRegistry) -> None:
    registry.unknown = frozenset({"mine"})
    done = registry.run("load", "mine")
    assert done.exit_code == EXIT_NOT_FOUND
    assert "there is no model or pool mine" in done.stderr
    assert registry.created == []


def test_load_with_a_token_does_not_resolve_short_names(registry: ScriptedRegistry) -> None:
    registry.unknown = frozenset({"llama3.2:1b"})
    assert registry.run("load", "llama3.2:1b", "--token", "-", stdin="token").exit_code == EXIT_NOT_FOUND
    assert registry.created == []


def test_every_load_option_is_sent(registry: ScriptedRegistry) -> None:
    registry.told = [loaded()]
    found = registry.run(
        *("load", "qwen", "--ctx", "8192", "-q", "q8_0", "--budget", "6GiB", "--evict", "llama", "--replicas", "2"),
        *("--pin", "--keep-alive", "5m", "--set", "gpu_layers=10", "--set", "cache_type_k=q8_0"),
        *("--set", "spec_draft_p_min=0.5", "--set", "cache_prompt=true", "--set", "flash_attention=on"),
        *("--request-id", "mine-1"),
    )
    assert found.exit_code == 0, found.output
    (request,) = registry.created
    load = request.action.load_model
    assert (request.request_id, load.model, load.evict_model, load.replicas) == ("mine-1", "qwen", "llama", 2)
    assert (load.options.quantization, load.options.pin) == ("q8_0", True)
    assert (load.options.memory_budget_bytes, load.options.keep_alive.seconds) == (6 * GIB, 300)
    parameters = load.options.parameters
    assert (parameters["context_tokens"].integer, parameters["gpu_layers"].integer) == (8192, 10)
    assert (parameters["cache_type_k"].word, parameters["flash_attention"].word) == ("q8_0", "on")
    assert (parameters["spec_draft_p_min"].number, parameters["cache_prompt"].flag) == (0.5, True)
    assert request.requested_by == "local"


def test_watched_load_prints_each_stage_once(registry: ScriptedRegistry) -> None:
    waiting = an_operation("RUNNING", stage="waiting for memory", detail="held by llama [busy]")
    again = an_operation("RUNNING", stage="waiting for memory", detail="waiting for memory: needs 2 GiB on titan")
    loading = an_operation("RUNNING", stage="loading", progress=0.25)
    loading.eta.FromNanoseconds(3_000_000_000)
    registry.told = [waiting, waiting, again, loading, loaded()]
    found = registry.run("load", "qwen", "--watch")
    assert found.stderr.splitlines() == [
        "weft: pending",
        "weft: waiting for memory: held by llama (busy)",
        "weft: waiting for memory: needs 2 GiB on titan",
        "weft: loading: 25%: about 3 s left",
        "weft: succeeded",
    ]


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (an_operation("FAILED", detail="needs 9 GiB, held by llama (busy)"), "weft: needs 9 GiB, held by llama (busy)"),
        (an_operation("CANCELLED"), "weft: operations/op-1 was cancelled"),
        (an_operation("RUNNING"), "operations/op-1 continues"),
    ],
    ids=["failed", "cancelled", "interrupted"],
)
def test_load_without_success_reports_its_reason_and_exits_nonzero(
    registry: ScriptedRegistry, end: operation_pb2.Operation, words: str
) -> None:
    registry.told = [end]
    found = registry.run("load", "qwen")
    assert found.exit_code == 1
    assert words in found.stderr.splitlines()[-1]


def test_token_is_read_from_a_file_or_standard_input(registry: ScriptedRegistry, tmp_path: Path) -> None:
    registry.told = [loaded()]
    token = tmp_path / "op.json"
    token.write_text('{"payload":"x"}\n')
    assert registry.run("load", "qwen", "--token", str(token)).exit_code == 0
    assert registry.run("load", "qwen", "--token", "-", stdin="eyJ0\n").exit_code == 0
    assert [request.authorization for request in registry.created] == ['{"payload":"x"}', "eyJ0"]


def test_unload_reports_what_was_released(registry: ScriptedRegistry) -> None:
    action = operation_pb2.OperationAction(unload_model=operation_pb2.UnloadModel(model="qwen"))
    result = operation_pb2.OperationResult(memory_freed_bytes=5 * GIB, cache_flushed=True, models=["qwen", "qwen-2"])
    registry.told = [an_operation("SUCCEEDED", action, result=result)]
    found = registry.run("unload", "qwen")
    assert found.stdout == "model/qwen, qwen-2 unloaded (5 GiB freed)\n"
    assert registry.created[0].action == action


@pytest.mark.parametrize(
    ("options", "scope", "words"),
    [
        (("--all",), runner_service_pb2.FlushCacheRequest.SCOPE_ALL, {}),
        (("--model", "qwen"), runner_service_pb2.FlushCacheRequest.SCOPE_MODEL, {"model": "qwen"}),
        (("--tenant", "acme"), runner_service_pb2.FlushCacheRequest.SCOPE_TENANT, {"tenant": "acme"}),
        (
            ("--tag", "s1", "--tenant", "acme", "--model", "qwen", "--runner", "r1"),
            runner_service_pb2.FlushCacheRequest.SCOPE_TAG,
            {"tag": "s1", "tenant": "acme", "model": "qwen", "runner": "r1"},
        ),
    ],
)
def test_flush_scope_follows_from_the_options(
    registry: ScriptedRegistry, options: tuple[str, ...], scope: int, words: dict[str, str]
) -> None:
    action = operation_pb2.OperationAction(flush_cache=operation_pb2.FlushCache())
    result = operation_pb2.OperationResult(entry_count=3, token_count=120)
    registry.told = [an_operation("SUCCEEDED", action, result=result)]
    found = registry.run("models", "flush", *options)
    assert found.stdout == "cache flushed: 3 prefixes, 120 tokens\n"
    flush = registry.created[0].action.flush_cache
    assert flush.scope == scope
    names = ("model", "tenant", "tag", "runner")
    assert {name: getattr(flush, name) for name in names if getattr(flush, name)} == words


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("models", "flush"), "--all"),
        (("models", "flush", "--all", "--tenant", "x"), "--all"),
        (("load", "qwen", "--budget", "lots"), "--budget"),
        (("load", "qwen", "--keep-alive", "soon"), "--keep-alive"),
        (("load", "qwen", "--set", "x"), "--set"),
        (("load", "qwen", "--set", "x=1", "--set", "x=2"), "--set"),
        (("load", "qwen", "--set", "context_tokens=1", "--ctx", "16"), "--set context_tokens"),
        (("load", "no//name"), "MODEL"),
        (("load", "qwen", "--token", "/nowhere/x"), "--token"),
        (("load", "qwen", "--request-id", "a b"), "--request-id"),
        (("load", "qwen", "--request-id", "a:b"), "--request-id"),
        (("mesh", "audit", "verify", "--head", "x"), "--head"),
    ],
)
def test_invalid_option_is_reported_and_nothing_is_sent(
    registry: ScriptedRegistry, arguments: tuple[str, ...], option: str
) -> None:
    found = registry.run(*arguments)
    assert found.exit_code == 2
    assert option in found.stderr
    assert registry.created == []


def _put(operation: operation_pb2.Operation) -> dict[str, Any]:
    return {"kind": "operation", "change": "put", "name": operation.name, "object": document_of(operation)}


def _watched(monkeypatch: pytest.MonkeyPatch, *changes: operation_pb2.Operation | str) -> None:
    """What the mesh sends of operations: those that there are until "synced", then changes; then Ctrl-C."""

    def events(*_: object, **__: object) -> Iterator[dict[str, Any]]:
        for change in changes:
            yield {"kind": "operation", "change": change} if isinstance(change, str) else _put(change)
        raise KeyboardInterrupt

    monkeypatch.setattr(MeshApi, "stream", events)


def test_operations_watch_prints_new_and_changed_ones_across_an_outage(
    registry: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, done, other = an_operation("RUNNING", stage="loading"), an_operation("SUCCEEDED"), an_operation("PENDING")
    other.name = "operations/op-2"
    _watched(monkeypatch, running, "synced", running, other, "reset", done, other, "synced")
    found = registry.run("mesh", "operation", "list", "-w")
    assert [line.split()[:4] for line in found.stdout.splitlines()[1:]] == [
        ["op-1", "load", "qwen", "running"],
        ["op-2", "load", "qwen", "pending"],
        ["op-1", "load", "qwen", "succeeded"],
    ]


def test_watch_of_unfinished_operations_prints_only_their_ends(
    registry: ScriptedRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, done = an_operation("FAILED"), an_operation("SUCCEEDED")
    old.name = "operations/op-0"
    _watched(monkeypatch, old, an_operation("RUNNING"), "synced", done, done)
    lines = registry.run("mesh", "operation", "list", "--unfinished", "-w", "-o", "json").stdout.splitlines()
    assert [json.loads(line)["state"] for line in lines] == ["running", "succeeded"]


def test_operation_is_shown_and_an_unknown_one_returns_not_found(registry: ScriptedRegistry) -> None:
    registry.told = [an_operation("PENDING")]
    assert (
        json.loads(registry.run("mesh", "operation", "get", "op-1", "-o", "json").stdout)["name"] == "operations/op-1"
    )
    assert registry.run("mesh", "operation", "get", "op-2").exit_code == 3


def test_operations_are_listed_as_table_and_documents(registry: ScriptedRegistry) -> None:
    registry.told = [an_operation("RUNNING", stage="loading", progress=0.5, requested_by="cli:alice")]
    table = registry.run("mesh", "operation", "list")
    document = json.loads(registry.run("mesh", "operation", "list", "-o", "json").stdout)
    assert table.stdout.splitlines()[1].split()[:6] == ["op-1", "load", "qwen", "running", "loading", "50%"]
    assert (document["kind"], document["items"][0]["requestedBy"]) == ("OperationList", "cli:alice")


@pytest.mark.parametrize(
    "words",
    [
        "mesh operation cancel operations/op-1",
        "cancel op-1",
        "cancel operation op-1",
        "cancel operation/op-1",
        "cancel operations op-1",
    ],
)
def test_cancelling_an_operation_waits_until_it_ended(registry: ScriptedRegistry, words: str) -> None:
    registry.told = [an_operation("RUNNING"), an_operation("CANCELLED")]
    found = registry.run(*words.split())
    assert (found.exit_code, found.stdout) == (0, "operations/op-1 cancelled\n")
    assert [each.name for each in registry.cancelled] == ["operations/op-1"]


def test_intact_audit_log_is_verified(registry: ScriptedRegistry, tmp_path: Path) -> None:
    registry.audit = audit_entries()
    head = registry.run("mesh", "audit", "head").stdout
    (tmp_path / "head").write_text(head)
    assert head == f"3:{registry.audit[-1].hash}\n"
    assert registry.run("mesh", "audit", "verify").stdout == "3 entries, intact\n"
    found = registry.run("mesh", "audit", "verify", "--head-file", str(tmp_path / "head"))
    assert found.stdout == "3 entries, intact, and reaching entry 3\n"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda log: setattr(log[1], "actor", "cli:mallory"), "entry 2 was changed after it was written"),
        (lambda log: log.pop(1), "entry 2 is missing"),
        (lambda log: log.reverse(), "entry 1 is missing"),
        (lambda log: log.pop(), "entry 3 is the last one, but the stored head is later"),
    ],
)
def test_tampered_audit_log_is_detected(
    registry: ScriptedRegistry, spoil: Callable[[list[object]], object], said: str
) -> None:
    registry.audit = audit_entries()
    head = f"3:{registry.audit[-1].hash}"
    spoil(registry.audit)  # type: ignore[arg-type]  # a list of entries
    found = registry.run("mesh", "audit", "verify", "--head", head)
    assert found.exit_code == 1
    assert said in found.stderr


def test_audit_is_listed_in_pages(registry: ScriptedRegistry) -> None:
    registry.audit = audit_entries()
    found = registry.run("mesh", "audit", "list", "--limit", "2")
    assert [line.split()[0] for line in found.stdout.splitlines()] == ["SEQ", "1", "2"]
    assert found.stderr == "weft: there are more: --after 2\n"
    document = json.loads(registry.run("mesh", "audit", "list", "--after", "2", "-o", "json").stdout)
    assert [entry["sequence"] for entry in document["items"]] == [3]
    assert document["headSequence"] == 3


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--quantization", ""), "--quantization: "),
        (("--quantization", "x" * 65), "--quantization: "),
        (("--set", f"{'x' * 65}=1"), f"--set {'x' * 64}: "),
        (("--set", f"a={'x' * 300}"), "--set a: must be a number, true, false, or a word"),
        (("--set", "a=nan"), "--set a: must be a number, true, false, or a word"),
        (("--set", "a=99999999999999999999999"), "--set a: is too large a number"),
        (("--ctx", "64", "--set", "context_tokens=65"), "--set context_tokens: "),
        (("--keep-alive", "soon"), "--keep-alive: must be seconds such as 300"),
        (("--budget", "1kB"), "--budget: must be at least 1 MiB"),
    ],
)
def test_out_of_range_load_option_is_reported_without_a_traceback(
    registry: ScriptedRegistry, arguments: tuple[str, ...], named: str
) -> None:
    for command in (("load", "qwen"), ("keys", "sign", "load", "qwen", "--shared-key", "k", "--signer", "a")):
        found = registry.run(*command, *arguments)
        assert (found.exit_code, found.stderr[: len(f"weft: {named}")]) == (2, f"weft: {named}"), found.output
    assert registry.created == []


@pytest.mark.parametrize(
    ("refusal", "code", "words"),
    [
        (WeftError(Reason.OPERATION_REFUSED, "refused"), 1, "refused"),
        (invalid_field("action.load_model.evict_model", "must not be loaded"), 2, "--evict: must not be loaded"),
    ],
)
def test_registry_rejection_is_printed_and_names_the_option(
    registry: ScriptedRegistry, refusal: WeftError, code: int, words: str
) -> None:
    registry.refusal = refusal
    found = registry.run("load", "qwen", "--evict", "qwen")
    assert (found.exit_code, found.stderr) == (code, f"weft: {words}\n")
