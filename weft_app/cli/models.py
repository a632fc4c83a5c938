"""`weft pull` and `weft models`: pulled models, stored under the home. No mesh needs to run."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from runner_svc.added_models_file import remembered_models
from runner_svc.model_store.found import found_models, program_folders
from runner_svc.model_store.pull import Puller, PullSettings
from runner_svc.model_store.store import FORMS, ModelStore
from runner_svc.policy.repository_files import ModelForm
from runner_svc.runtimes.runtime_settings import SourcedModelSettings
from weft.api.runner.v1 import model_store_pb2 as pb
from weft.documents.codec import document_of, word_of
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.models.model_source import parse_source
from weft.kernel.values.units import size_words
from weft_app.cli.asked_model import SOURCE, pulled_source
from weft_app.cli.options import (
    DEFAULT_HOME,
    HomeOption,
    MeshConfigOption,
    OutputFormat,
    OutputOption,
    WideFormat,
    WideOutputOption,
    ended_by_signals,
)
from weft_app.cli.output import Listing, ProgressStyle, custom_columns, json_line, print_document, shown_progress
from weft_app.cli.terminal import note, safe_text, say
from weft_app.compose.home import WeftHome
from weft_app.config.config import WeftConfig
from weft_app.config.loader import load_files

_TENTHS = 10
"""Number of progress lines without a terminal."""

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar=SOURCE,
        help="hf:OWNER/REPO[:QUANTIZATION or FILE][@REVISION], https://HOST/FILE.gguf[#sha256=DIGEST], or a path.",
    ),
]

_COLUMNS = custom_columns(
    "SOURCE:source QUANT:quantization|form SIZE:sizeBytes:size PULLED:pullTime:ago USED_BY:usedBy"
)
_MODELS = Listing(
    columns=_COLUMNS,
    empty="no model has been pulled yet; pull one: weft pull hf:Qwen/Qwen3-0.6B-GGUF, or see weft models ls --found",
    wide=_COLUMNS + custom_columns("DIGEST:digest REVISION:revision COPIED_FROM:copiedFrom PATH:path"),
    kind="StoredModelList",
)


_FOUND_COLUMNS = custom_columns("SOURCE:source QUANT:quantization|form SIZE:sizeBytes:size")
_FOUND = Listing(
    columns=_FOUND_COLUMNS,
    empty="no models of Ollama, LM Studio or the hub's cache were found",
    wide=_FOUND_COLUMNS + custom_columns("PROJECTOR:projectorPath PATH:path"),
    kind="FoundModelList",
)


def _stage_line(progress: pb.PullProgress) -> str:
    """Returns a progress line, rounded so that few lines differ."""
    stage, detail = word_of(progress, "stage"), f": {progress.detail}" if progress.detail else ""
    if progress.stage == pb.PULL_STAGE_LOADING and not detail and progress.total_bytes:
        tenths = progress.done_bytes * _TENTHS // progress.total_bytes
        return f"{stage}: {tenths * 100 // _TENTHS} % of {size_words(progress.total_bytes)}"
    return safe_text(f"{stage}{detail}")


_PROGRESS = ProgressStyle(
    line=_stage_line,
    columns=lambda: (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    ),
    bar=lambda progress: {
        "total": progress.total_bytes or None,
        "completed": progress.done_bytes,
        "description": safe_text(progress.file or progress.detail or word_of(progress, "stage")),
    },
)


def pull(
    source: SourceArgument,
    form: Annotated[
        ModelForm | None,
        typer.Option(help="gguf, or folder for engines such as vLLM. Default: gguf if available."),
    ] = None,
    runner: Annotated[
        str,
        typer.Option(
            "--runner", "--on", metavar="NAME", help="Pull to the home of this runner, on whatever machine it runs."
        ),
    ] = "",
    home: HomeOption = DEFAULT_HOME,
    config: MeshConfigOption = None,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Pull a model from the Hugging Face hub, by short name, from a URL or a folder. No mesh needs to run.

    After an interruption, the same command continues with what was downloaded. A token for gated models is taken from
    HF_TOKEN or `hf auth login`. With -o json, each line is one state of the progress. With --runner it is an operation
    of the mesh, which continues after Ctrl-C.

    Example: weft pull hf:Qwen/Qwen3-8B-GGUF:Q4_K_M
    """
    source = pulled_source(source)
    if runner:
        _pull_there(source, runner, form, home, output)
        return
    wanted, settings = parse_source(source, SOURCE), _configuration(home, config).model_store
    store = _store(home)
    limits = PullSettings(disk_limit_bytes=settings.disk_limit_bytes, allow_http=settings.allow_http)
    last = pb.PullProgress()
    with ended_by_signals(), shown_progress(_PROGRESS, is_shown=output is OutputFormat.TABLE) as show:

        def report(progress: pb.PullProgress) -> None:
            last.CopyFrom(progress)
            if output is OutputFormat.JSON:
                say(json_line(document_of(progress)))
            else:
                show(progress)

        try:
            model = Puller(store, limits, report).pull(wanted, form)
        except KeyboardInterrupt:
            kept = f"{size_words(last.done_bytes)} are kept; " if last.done_bytes else ""
            note(f"stopped; {kept}run the same command to continue")
            raise
    if output is OutputFormat.TABLE:
        say(f"{model.source}: {size_words(model.size_bytes)}, {model.digest}\n{model.path}\n")
    elif output is OutputFormat.YAML:
        print_document(document_of(model), output)


def _pull_there(source: str, runner: str, form: ModelForm | None, home: Path, output: OutputFormat) -> None:
    """Pulls a model to a runner's home with an operation of the mesh."""
    from weft_app.cli import verbs  # noqa: PLC0415 - a pull without a mesh needs no client
    from weft_app.cli.mesh_api import connect  # noqa: PLC0415
    from weft_app.cli.operations import WATCH_TIMEOUT_SECONDS, begin, follow, outcome_text  # noqa: PLC0415

    with verbs.naming_options():
        action = verbs.pull(source, runner=runner, form="" if form is None else form.value)
        with connect(home, WATCH_TIMEOUT_SECONDS) as api:
            ended = follow(api, begin(api, document_of(action)), shown=output is OutputFormat.TABLE)
    if output is OutputFormat.TABLE:
        say(f"{outcome_text(ended)}\n")
    else:
        print_document(ended["result"]["pulled"], output)


def list_models(
    found: Annotated[
        bool, typer.Option("--found", help="List models of Ollama, LM Studio and the hub's cache instead.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    config: MeshConfigOption = None,
    output: WideOutputOption = WideFormat.TABLE,
) -> None:
    """List the models that were pulled: their size, when, and which models use them.

    Example: weft models ls --found
    """
    if found:
        _FOUND.print(map(document_of, found_models(program_folders())), output)
        return
    store = _store(home)
    models, damaged = store.models()
    configured = _configuration(home, config)
    for model in models:
        model.used_by.extend([*_users(model, store, configured), *_added_users(model, store, home)])
    for manifest in damaged:
        note(f"{manifest.file} {manifest.why}")
    _MODELS.print(map(document_of, models), output)


def remove(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE...", help="As `weft models ls` shows it.")],
    force: Annotated[bool, typer.Option("--force", help="Also remove models that weft.yaml uses.")] = False,
    home: HomeOption = DEFAULT_HOME,
    config: MeshConfigOption = None,
) -> None:
    """Remove pulled models, and files that no other one needs. Refused if a served model uses them.

    Example: weft models rm hf:Qwen/Qwen3-8B-GGUF:Q4_K_M
    """
    store = _store(home)
    models, _ = store.models()
    chosen = [model for source in sources for model in _named(models, source)]
    configured = None if force else _configuration(home, config)
    for model in chosen:
        users = [] if configured is None else _users(model, store, configured)
        if users:
            raise WeftError(
                Reason.RESOURCE_IN_USE,
                f"{model.source} is used by {', '.join(users)} in weft.yaml; use --force to remove it anyway",
            )
        added = [] if force else _added_users(model, store, home)
        if added:
            raise WeftError(
                Reason.RESOURCE_IN_USE,
                f"{model.source} is served as {', '.join(added)}; delete it first (weft delete model {added[0]}), or "
                "use --force",
            )
    for model in chosen:
        freed = store.remove(model)
        left = "" if freed else "; its files are kept for other models, or until weft models gc"
        say(f"{model.source} removed: {size_words(freed)} freed{left}\n")


def collect(
    everything: Annotated[
        bool, typer.Option("--partial", help="Also partial files of ended pulls that are less than 7 days old.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Remove files that belong to no model, and partial files of pulls that ended 7 or more days ago.

    Example: weft models gc --partial
    """
    collected = _store(home).collect(time.time(), all_partials=everything)
    if output is OutputFormat.TABLE:
        say(f"{size_words(collected.freed_bytes)} freed: {collected.blobs} files, {collected.partials} partial files\n")
        return
    facts = {"files": collected.blobs, "partialFiles": collected.partials, "freedBytes": str(collected.freed_bytes)}
    print_document({"kind": "ModelStoreCollection", **facts}, output)


def _configuration(home: Path, config: Path | None) -> WeftConfig:
    return load_files(WeftHome(home.expanduser().absolute()).config_files(config))


def _store(home: Path) -> ModelStore:
    return ModelStore(WeftHome(home.expanduser().absolute()).models)


def _named(models: list[pb.StoredModel], source: str) -> list[pb.StoredModel]:
    """Returns the stored models of a source. Raises NOT_FOUND if there are none."""
    found = [model for model in models if model.source == source] or [
        model for model in models if model.source == str(parse_source(source, SOURCE))
    ]
    if not found:
        raise WeftError(Reason.NOT_FOUND, f"{source} is not stored; weft models ls lists the stored models")
    return found


def _users(model: pb.StoredModel, store: ModelStore, config: WeftConfig) -> list[str]:
    """Returns the names of the configured models that use a stored model."""
    folder = store.path_of(model)
    if model.main_path:
        folder = store.root.absolute() / "snapshots" / model.folder
    return [
        configured.name
        for runner in config.runners or ()
        for configured in runner.models
        if isinstance(configured, SourcedModelSettings)
        if (
            configured.file.absolute().is_relative_to(folder)
            if configured.source is None
            else store.is_of(model, parse_source(configured.source, SOURCE)) and FORMS[configured.form] == model.form
        )
    ]


def _added_users(model: pb.StoredModel, store: ModelStore, home: Path) -> list[str]:
    """Returns the names of added models of this home's runners that use a stored model."""
    state = WeftHome(home.expanduser().absolute()).state
    return [
        added.name
        for added in remembered_models(state / "runners")
        if store.is_of(model, parse_source(added.stored_source, SOURCE)) and added.form == model.form
    ]
