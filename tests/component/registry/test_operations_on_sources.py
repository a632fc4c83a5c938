"""Operations on sources: loads of models that no weft.yaml names, pulls, and removals."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kit.failures import fails
from kit.refusals import refused
from operation_stage import Action, FakeDirectory, Stage, loaded, running_stage, said

from registry_svc.operations.actions import check_action
from registry_svc.operations.targets import AddedModelView, load_target
from weft.api.operations.v1 import operation_pb2
from weft.api.operations.v1.operation_pb2 import Operation
from weft.api.runner.v1 import load_pb2
from weft.api.runner.v1.model_store_pb2 import PULL_STAGE_LOADING, PullProgress, StoredModel
from weft.api.runner.v1.runner_service_pb2 import InstanceDescription
from weft.documents.reach import needed_access
from weft.kernel.access.principal import ANY_SOURCE, USE_SECRETS, Access
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason

SOURCE = "hf:acme/tiny-GGUF:Q4_0"


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with running_stage() as stage:
        yield stage


def load_source(source: str = SOURCE, *, name: str = "", runner: str = "", replicas: int = 0) -> Action:
    return Action(load_model=operation_pb2.LoadModel(model=name, source=source, runner=runner, replicas=replicas))


def pull(source: str = SOURCE, runner: str = "") -> Action:
    return Action(pull_model=operation_pb2.PullModel(source=source, runner=runner))


def remove(model: str) -> Action:
    return Action(remove_model=operation_pb2.RemoveModel(model=model))


async def test_load_by_source_adds_and_loads_the_model(stage: Stage) -> None:
    stage.calls.add_progress = [PullProgress(stage=PULL_STAGE_LOADING, done_bytes=1024, total_bytes=4096)]
    operation = await stage.create(load_source())
    following = asyncio.create_task(stage.views(operation))
    await stage.until_heard(f"add {SOURCE} as tiny-q4_0 on r1", "load tiny-q4_0 on r1")
    stage.directory.models["tiny-q4_0"] = "r1"
    stage.calls.answer("tiny-q4_0", said("loading"), loaded(100, 30))
    views = await following
    pulling = next(view for view in views if view.stage == "pulling")
    assert (pulling.progress, pulling.detail) == (0.25, "pulling 1 KiB of 4 KiB")
    end = views[-1]
    result = end.result
    assert (end.state, end.runner, list(result.models)) == (Operation.STATE_SUCCEEDED, "r1", ["tiny-q4_0"])
    assert (result.added.name, list(result.added.reasons)) == ("tiny-q4_0", ["so"])


async def test_failed_load_leaves_no_model_behind(stage: Stage) -> None:
    operation = await stage.create(load_source())
    stage.calls.answer("tiny-q4_0", WeftError(Reason.BACKEND_ERROR, "no such layer"))
    end = await stage.end(operation)
    assert (end.state, Reason(end.reason), end.detail) == (
        Operation.STATE_FAILED,
        Reason.BACKEND_ERROR,
        "no such layer",
    )
    assert stage.calls.heard[-1] == "remove tiny-q4_0 on r1"


async def test_load_whose_name_another_runner_took_meanwhile_fails(stage: Stage) -> None:
    operation = await stage.create(load_source())
    await stage.until_heard(f"add {SOURCE} as tiny-q4_0 on r1", "load tiny-q4_0 on r1")
    stage.directory.models["tiny-q4_0"] = "r2"
    stage.calls.answer("tiny-q4_0", loaded(100, 30))
    end = await stage.end_as_time_passes(operation, 1.0)
    assert (end.state, Reason(end.reason)) == (Operation.STATE_FAILED, Reason.MODEL_NOT_FOUND)
    assert stage.calls.heard[-1] == "remove tiny-q4_0 on r1"


async def test_cancelled_load_leaves_no_model_behind(stage: Stage) -> None:
    operation = await stage.create(load_source())
    await stage.until_heard(f"add {SOURCE} as tiny-q4_0 on r1", "load tiny-q4_0 on r1")
    await stage.operations.cancel(operation, "alice")
    assert (await stage.end(operation)).state == Operation.STATE_CANCELLED
    assert stage.calls.heard[-2:] == ["load tiny-q4_0 stopped", "remove tiny-q4_0 on r1"]


async def test_model_already_served_from_the_source_is_reloaded_by_name(stage: Stage) -> None:
    stage.directory.models["mine"] = "r1"
    stage.directory.added = [AddedModelView(model="mine", source=SOURCE, runner="r1")]
    stage.calls.answer("mine", WeftError(Reason.BACKEND_ERROR, "broken"))
    await stage.end(await stage.create(load_source()))
    # It was served before this load, so that its failure does not remove it.
    assert stage.calls.heard == [f"add {SOURCE} as mine on r1", "load mine on r1"]


async def test_name_of_another_resource_is_rejected(stage: Stage) -> None:
    stage.directory.models["tiny-q4_0"] = "r2"
    await stage.create(load_source())
    await stage.until_heard(f"add {SOURCE} as tiny-q4_0-2 on r1", "load tiny-q4_0-2 on r1")
    with fails(Reason.ALREADY_EXISTS, match="is taken"):
        await stage.create(load_source(name="m1"))


def engine(**words: str) -> InstanceDescription:
    """An engine with parameters that are words, of which each has one."""
    return InstanceDescription(
        load_parameters=[load_pb2.LoadParameter(name=name, words=[word]) for name, word in words.items()]
    )


@pytest.mark.parametrize(
    ("given", "name", "message"),
    [
        ({"cache_type": "q8_0"}, "cache_type", "cannot be set for this model; these can: cache_type_k"),
        ({"cache_type_k": "q9"}, "cache_type_k", "must be one of: q8_0"),
    ],
)
async def test_a_load_by_source_with_a_parameter_that_no_engine_takes_is_refused_at_once(
    stage: Stage, given: dict[str, str], name: str, message: str
) -> None:
    """It was accepted for a folder of the hub or a model of Ollama, and its operation failed."""
    stage.calls.engines = [engine(cache_type_k="q8_0"), engine(dtype="half")]
    action = load_source("hf:acme/tiny")
    for parameter, word in given.items():
        action.load_model.options.parameters[parameter].word = word
    with fails(match=message, field=f"action.load_model.options.parameters.{name}"):
        await stage.create(action)
    assert stage.calls.heard == []


async def test_a_load_by_source_with_a_parameter_that_one_engine_may_take_is_accepted(stage: Stage) -> None:
    stage.calls.engines = [engine(cache_type_k="q8_0"), engine(dtype="half")]
    action = load_source("hf:acme/tiny")
    action.load_model.options.parameters["dtype"].word = "half"
    await stage.create(action)
    await stage.until_heard("add hf:acme/tiny as tiny on r1", "load tiny on r1")


async def test_a_load_whose_runner_does_not_know_the_engine_is_accepted(stage: Stage) -> None:
    stage.calls.failures["engines of r1"] = [WeftError(Reason.UNSUPPORTED_OPERATION, "no engine is installed")]
    action = load_source()
    action.load_model.options.parameters["nothing"].word = "known"
    await stage.create(action)
    await stage.until_heard(f"add {SOURCE} as tiny-q4_0 on r1", "load tiny-q4_0 on r1")


async def test_runner_must_be_specified_if_there_are_several(stage: Stage) -> None:
    stage.directory.adding = ["r1", "r2"]
    with pytest.raises(WeftError, match="must say which runner: r1, r2"):
        await stage.create(load_source())
    await stage.create(load_source(runner="r2"))
    await stage.until_heard(f"add {SOURCE} as tiny-q4_0 on r2", "load tiny-q4_0 on r2")


@pytest.mark.parametrize(
    ("adding", "runner", "reason"),
    [
        ([], "", Reason.NO_RUNNER_AVAILABLE),
        (["r1"], "r2", Reason.INVALID_ARGUMENT),
        (["r1"], "nobody", Reason.NOT_FOUND),
    ],
)
async def test_unsupported_runner_is_rejected(stage: Stage, adding: list[str], runner: str, reason: Reason) -> None:
    stage.directory.adding = adding
    for action in (load_source(runner=runner), pull(runner=runner)):
        with refused(reason):
            await stage.create(action)


async def test_pull_reports_progress_and_what_is_stored(stage: Stage) -> None:
    operation = await stage.create(pull())
    following = asyncio.create_task(stage.views(operation))
    stage.calls.pulls.put_nowait(
        PullProgress(
            stage=PULL_STAGE_LOADING, done_bytes=512, total_bytes=1024, bytes_per_second=256, file_sha256="ab" * 32
        )
    )
    stage.calls.pulls.put_nowait(StoredModel(source=SOURCE, size_bytes=1024))
    views = await following
    half = next(view for view in views if view.progress == 0.5)
    assert (half.stage, half.eta.seconds) == ("pulling", 2)
    assert (half.done_bytes, half.total_bytes, half.digest) == (512, 1024, f"sha256:{'ab' * 32}")
    end = views[-1]
    assert (end.state, end.runner) == (Operation.STATE_SUCCEEDED, "r1")
    assert end.result.pulled.size_bytes == 1024


async def test_pull_ends_with_the_error_of_its_runner(stage: Stage) -> None:
    stage.calls.pulls.put_nowait(WeftError(Reason.PERMISSION_DENIED, "hf:acme/tiny is gated"))
    end = await stage.end(await stage.create(pull()))
    assert (end.state, Reason(end.reason), end.detail) == (
        Operation.STATE_FAILED,
        Reason.PERMISSION_DENIED,
        "hf:acme/tiny is gated",
    )


async def test_cancelled_pull_is_stopped_on_its_runner(stage: Stage) -> None:
    operation = await stage.create(pull())
    await stage.until_heard(f"pull {SOURCE} on r1")
    await stage.operations.cancel(operation, "alice")
    assert (await stage.end(operation)).state == Operation.STATE_CANCELLED
    assert stage.calls.heard[-1] == f"pull {SOURCE} stopped"


async def test_added_model_can_be_removed_and_a_configured_one_cannot(stage: Stage) -> None:
    stage.directory.models["mine"] = "r1"
    stage.directory.added = [AddedModelView(model="mine", source=SOURCE, runner="r1")]
    end = await stage.end(await stage.create(remove("mine")))
    result = end.result
    assert (list(result.models), result.memory_freed_bytes) == (["mine"], 9)
    for name, reason in (("m1", Reason.INVALID_ARGUMENT), ("nothing", Reason.MODEL_NOT_FOUND)):
        with refused(reason):
            await stage.create(remove(name))


def needed(action: Action) -> tuple[Access, ...]:
    return tuple(access for _, access in needed_access(action))


@pytest.mark.parametrize("source", ["/models/x.gguf", "~/x.gguf", "https://host/x.gguf"])
def test_path_or_url_needs_the_model_edit_scope(source: str) -> None:
    assert needed(load_source(source)) == (ANY_SOURCE,)
    assert needed(pull(source)) == (ANY_SOURCE,)


@pytest.mark.parametrize("source", ["http://box:11434", "https://host/v1"])
def test_server_needs_the_model_edit_scope_and_its_key_the_secret_scope(source: str) -> None:
    assert needed(load_source(source)) == (ANY_SOURCE,)
    with_key = load_source(source)
    with_key.load_model.options.parameters["api_key_env"].word = "BOX_KEY"
    assert needed(with_key) == (USE_SECRETS, ANY_SOURCE)


def attach(**parameters: object) -> Action:
    action = load_source("http://box:11434")
    for name, value in parameters.items():
        kind = "flag" if isinstance(value, bool) else "word" if isinstance(value, str) else "integer"
        setattr(action.load_model.options.parameters[name], kind, value)
    return action


def pinned_attach() -> Action:
    action = attach()
    action.load_model.options.pin = True
    return action


@pytest.mark.parametrize(
    ("action", "field"),
    [
        (load_source("s3:bucket/x"), "load_model.source"),
        (load_source("https://host/file.gguf?signature=secret"), "load_model.source"),
        (load_source("http://user:secret@box:11434"), "load_model.source"),
        (load_source("http://box:11434?key=secret"), "load_model.source"),
        (load_source(replicas=2), "load_model.replicas"),
        (Action(load_model=operation_pb2.LoadModel(model="m1", runner="r1")), "load_model.runner"),
        (Action(load_model=operation_pb2.LoadModel()), "load_model.model"),
        (attach(slots=4), "load_model.options.parameters.slots"),
        (attach(api_key_env=1), "load_model.options.parameters.api_key_env"),
        (attach(remote="yes"), "load_model.options.parameters.remote"),
        (pinned_attach(), "load_model.options.pin"),
        (pull(""), "pull_model.source"),
        (pull("https://host/file.zip"), "pull_model.source"),
        (pull("https://host/file.gguf?signature=secret"), "pull_model.source"),
        (remove(""), "remove_model.model"),
    ],
)
def test_invalid_action_is_rejected_by_field_without_quoting_a_secret(action: Action, field: str) -> None:
    with pytest.raises(WeftError) as refused:
        check_action(action)
    assert refused.value.metadata["field"] == f"action.{field}"
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("adding", "attaching", "runner"),
    [(["r1"], ["r1", "r2"], "r1"), ([], ["r2"], "r2"), (["r1", "r2"], ["r1", "r2"], None), ([], [], None)],
)
def test_server_is_attached_to_the_runner_that_supports_it_or_the_only_one(
    adding: list[str], attaching: list[str], runner: str | None
) -> None:
    directory = FakeDirectory(adding=adding, attaching=attaching)
    if runner is None:
        with pytest.raises(WeftError):
            load_target(attach().load_model, directory)
        return
    target = load_target(attach().load_model, directory)
    assert (target.model, target.runner, target.is_served) == ("box", runner, False)


@pytest.mark.parametrize("source", [SOURCE, "acme/tiny", "ollama:llama3.2"])
def test_hub_or_program_model_needs_only_the_load_scope(source: str) -> None:
    assert needed(load_source(source)) == ()
    assert needed(Action(load_model=operation_pb2.LoadModel(model="m1"))) == ()
