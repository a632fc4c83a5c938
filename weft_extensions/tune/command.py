"""`weft models tune`: the best load parameters of a model for its machine."""

import json
import shlex
import sys
from difflib import unified_diff
from typing import Annotated, Any

import typer

from runner_svc.policy.tuning import Trial
from weft.documents.yaml_documents import yaml_text
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.values.units import size_words
from weft_app.cli.completion import complete_model
from weft_app.cli.mesh_api import Document, MeshApi, connect
from weft_app.cli.operations import begin, follow
from weft_app.cli.options import DEFAULT_HOME, HomeOption, OutputFormat, OutputOption, ended_by_signals
from weft_app.cli.output import custom_columns, print_document, print_table
from weft_app.cli.terminal import is_err_terminal, note, say
from weft_extensions.tune.tuning_run import TunedModel, TuningReport, TuningRun, find_model
from weft_extensions.tune.tuning_search import TuningSearch

DEFAULT_MINUTES = 10.0
DEFAULT_AGREEMENT = 0.9
TIMEOUT_SECONDS = 60.0
_FLAGS = {
    "contextTokens": "--ctx={}",
    "quantization": "--quantization={}",
    "memoryBudgetMb": "--budget={}MiB",
    "keepAlive": "--keep-alive={}",
}
"""Options of `weft load`, by load setting."""
_COLUMNS = custom_columns(
    "TRIAL:trial SETTINGS END:end PROMPT_TOK/S:promptTokensPerSecond:{:.0f} "
    "OUTPUT_TOK/S:outputTokensPerSecond:{:.1f} MEMORY:memoryBytes:size LOAD:loadSeconds:{:.1f} "
    "AGREEMENT:agreement:{:.0%} DETAIL:detail?",
    SETTINGS=lambda row: _words(row["settings"]),
)


def tune(
    model: Annotated[str, typer.Argument(help="A model with a runner.", autocompletion=complete_model)],
    *,
    minutes: Annotated[
        float, typer.Option(min=0.1, max=1440, help="Time for trials, waits for callers included.")
    ] = DEFAULT_MINUTES,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Vary only this load parameter, even if the model's settings have it."),
    ] = None,
    min_agreement: Annotated[
        float, typer.Option(min=0, max=1, help="Share of greedy continuations that must stay equal.")
    ] = DEFAULT_AGREEMENT,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    apply: Annotated[
        bool, typer.Option("--apply", help="Load with the best settings without asking; undone with one command.")
    ] = False,
    home: HomeOption = DEFAULT_HOME,
    output: OutputOption = OutputFormat.TABLE,
) -> None:
    """Find the best load parameters of a model for its machine, by measuring while it is idle.

    The model is loaded as before at the end, after Ctrl-C, and whenever a caller comes. Needs optuna (the extra
    `tune`).

    Example: weft models tune smollm2-135m --minutes 5
    """
    with connect(home, TIMEOUT_SECONDS) as api:
        found = find_model(api, model, vary or ())
    search = TuningSearch(found.space, seed)
    note(f"varying {', '.join(found.space)} for at most {minutes:g} min; Ctrl-C leaves {model} as it was")
    run = TuningRun(home, found, search, min_agreement=min_agreement)
    with ended_by_signals():
        report = run.run(minutes * 60, lambda trial: note(_line(trial)))
    document = _document(report)
    if output is OutputFormat.TABLE:
        print_table(document["trials"], _COLUMNS)
        say(outcome(report))
    if report.best is None:
        if output is not OutputFormat.TABLE:
            print_document(document, output)
        return
    asks = output is OutputFormat.TABLE and sys.stdin.isatty()
    is_wanted = apply or (asks and typer.confirm("Apply?", err=True))
    try:
        if is_wanted:
            with connect(home, TIMEOUT_SECONDS) as api:
                _load(api, found, report.best)
            document["applied"] = True
    finally:
        if output is not OutputFormat.TABLE:
            print_document(document, output)
    if document["applied"]:
        note(f"loaded with these settings; undo it with: {undo_command(found)}")
    else:
        note("nothing was changed; --apply loads it with these settings")


def _load(api: MeshApi, model: TunedModel, best: Trial) -> None:
    """Loads the model with the best settings. Raises the error of a load that fails."""
    action = {"type": "load", "model": model.name, "settings": model.options_with(best.settings)}
    try:
        follow(api, begin(api, action), shown=is_err_terminal())
    except WeftError as error:
        error.message += f"; load it as before with: {undo_command(model)}"
        raise


def undo_command(model: TunedModel) -> str:
    """Returns the command that loads the model as before the search, or unloads it if no operation had loaded it."""
    if not model.loaded_by_operation:
        return shlex.join(("weft", "unload", model.name))
    options = model.options
    words = [flag.format(options[name]) for name, flag in _FLAGS.items() if options.get(name) is not None]
    words += [f"--set={name}={_word(value)}" for name, value in options.get("parameters", {}).items()]
    return shlex.join(("weft", "load", model.name, *words, *(["--pin"] if options.get("pin") else [])))


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def outcome(report: TuningReport) -> str:
    """Returns what a search has found: the changed options with the speeds before and after, or why there are none."""
    if report.best is None or report.present is None:
        if sum(each.figures is not None for each in report.trials) < 2:
            return "no other settings were measured; nothing was changed. Give it more --minutes, or fewer callers\n"
        return "the present settings are the best ones found; nothing was changed\n"
    model = report.model
    before, after = (
        yaml_text({"model": model.name, "parameters": options["parameters"]}).splitlines(keepends=True)
        for options in (model.options_with({}), model.options_with(report.best.settings))
    )
    changes = "".join(unified_diff(before, after, "load options (now)", "load options (best)"))
    return f"{changes}{_speed_words(report.present)} -> {_speed_words(report.best)}\n"


def _speed_words(trial: Trial) -> str:
    figures = trial.figures
    assert figures is not None
    return (
        f"{figures.prompt_tokens_per_second:.0f} prompt tokens/s, "
        f"{figures.output_tokens_per_second:.1f} output tokens/s"
    )


def _line(trial: Trial) -> str:
    """Returns the progress line of a trial."""
    text = f"trial {trial.number}: {_words(trial.settings)}: {trial.end}"
    if trial.figures is None:
        return f"{text}: {trial.detail}"
    memory = f", {size_words(trial.figures.memory_bytes)}" if trial.figures.memory_bytes else ""
    return f"{text}: {_speed_words(trial)}{memory}, agreement {trial.figures.agreement:.0%}"


def _words(settings: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "as now"


def _document(report: TuningReport) -> Document:
    document: Document = {
        "kind": "TuningReport",
        "model": report.model.name,
        "runner": report.model.runner,
        "runtime": report.model.runtime,
        "trials": [_trial_document(each) for each in report.trials],
        "applied": False,
    }
    if report.best is not None and report.present is not None:
        document |= {
            "present": _trial_document(report.present),
            "best": _trial_document(report.best),
            "options": report.model.options_with(report.best.settings),
            "undo": undo_command(report.model),
        }
    return document


def _trial_document(trial: Trial) -> Document:
    found: Document = {"trial": trial.number, "settings": dict(trial.settings), "end": trial.end.value}
    if trial.detail:
        found["detail"] = trial.detail
    if (figures := trial.figures) is not None:
        found |= {
            "promptTokensPerSecond": round(figures.prompt_tokens_per_second, 1),
            "outputTokensPerSecond": round(figures.output_tokens_per_second, 1),
            "requestSeconds": round(figures.request_seconds, 3),
            "memoryBytes": figures.memory_bytes,
            "loadSeconds": figures.load_seconds,
            "agreement": figures.agreement,
        }
    return found
