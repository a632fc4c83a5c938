"""Tables, durations, expectations, targets and the lazy commands, each by itself."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from weft.api.registry.v1.model_pb2 import Model, ModelManifest
from weft.api.registry.v1.runner_pb2 import InstanceState
from weft.documents.resource_kinds import ResourceKind
from weft.documents.resources import model_document, plain
from weft.kernel.errors import removed_features as removed
from weft.kernel.errors.error_tree import FieldError
from weft_app.cli.background import arguments_of
from weft_app.cli.columns import listing_of
from weft_app.cli.commands import ALIASES, COMMANDS, OTHER_WORDS
from weft_app.cli.extension_commands import extension_commands
from weft_app.cli.main import app, load
from weft_app.cli.options import EXIT_OK, EXIT_USAGE
from weft_app.cli.output import Column, TextTable, custom_columns, fitted, page
from weft_app.cli.targets import Target, one_target, parse_targets
from weft_app.cli.terminal import safe_text
from weft_app.cli.wait import parse_duration, parse_expectation

TABLE = (
    Column("NAME", lambda row: row[0]),
    Column("WORDS", lambda row: row[1]),
    Column("AGE", lambda row: row[2], ticks=True),
)


def test_columns_are_as_wide_as_their_rows() -> None:
    table = TextTable(TABLE)
    assert table.text([("a", "one", "1s"), ("longer", "", "2s")]) == (
        "NAME    WORDS  AGE\na       one    1s\nlonger  -      2s\n"
    )
    assert table.line(["b", "two", "3s"]) == "b       two    3s\n", "a later row keeps the widths"


MOST_COMMANDS = 30
WIDTHS = {0: 30, 1: 10, 2: 60, 3: 8}
SOME_MINOR = custom_columns("REQUEST:a TENANT:b? MESSAGE:c AGE:d~")


@pytest.mark.parametrize(
    ("room", "shown"),
    [
        (120, {0: 30, 1: 10, 2: 60, 3: 8}),
        (100, {0: 30, 1: 10, 2: 46, 3: 8}),
        (74, {0: 30, 1: 10, 2: 20, 3: 8}),
        (70, {0: 30, 2: 28, 3: 8}),
        (54, {0: 30, 2: 12, 3: 8}),
        (50, {0: 30, 2: 18}),
        (40, {0: 30}),
        (10, {0: 30}),
    ],
)
def test_narrow_terminal_cuts_wide_columns_then_omits_minor_ones_then_the_rightmost(
    room: int, shown: dict[int, int]
) -> None:
    assert fitted(SOME_MINOR, WIDTHS, room) == shown


def test_table_in_a_narrow_terminal_names_the_omitted_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"a": "req-1", "b": "team", "c": "the engine of the model ended", "d": "9s"}]
    piped = TextTable(SOME_MINOR).text(rows)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "36")
    table = TextTable(SOME_MINOR, wider="-o wide")
    assert table.text(rows) == (
        "\x1b[1mREQUEST  MESSAGE                 AGE\x1b[0m\n"
        "req-1    the engine of the mod…  9s\n"
        "(-o wide also shows TENANT)\n"
    )
    assert table.row(rows[0] | {"a": "req-2000"}) == "req-2000  the engine of the mo…  9s\n"
    assert piped.endswith("\nreq-1    team    the engine of the model ended  9s\n")


def test_later_rows_of_a_watch_stay_within_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    table = TextTable(SOME_MINOR)
    table.text(())
    row = table.row({"a": "job-" + "1" * 24, "b": "team", "c": "a long message", "d": "9s"})
    assert row == f"job-{'1' * 24} …\n"


def test_table_on_a_terminal_shortens_generated_ids_to_unique_beginnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """28 characters of id took a third of the width."""
    first, second, third = (f"req-1b86a2f0{end:0<16}" for end in ("1", "2", "31"))
    callers = "job-1b86a2f01000000000000000"
    columns = custom_columns("REQUEST:a")
    rows = [{"a": each} for each in (first, second, callers)]
    piped = TextTable(columns).text(rows)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    table = TextTable(columns)
    assert table.text(rows).splitlines()[1:] == ["req-1b86a2f01…", "req-1b86a2f02…", callers]
    assert table.row({"a": third}) == "req-1b86a2f03…\n", "a later row of a watch"
    assert TextTable(columns).text(rows[:1]).splitlines()[1:] == ["req-1b86a2f0…"]
    for whole in (piped, TextTable(columns, is_cut=False).text(rows)):
        assert whole.splitlines()[1:] == [first, second, callers]


def test_states_are_colored_on_a_terminal_unless_no_color_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    columns = custom_columns("NAME:name STATE:state AGE:age~")
    rows = [{"name": "ready", "state": "ready", "age": "1s"}, {"name": "b", "state": "crash-loop", "age": "2s"}]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    colored = TextTable(columns).text(rows).splitlines()[1:]
    assert colored == ["ready  \x1b[32mready     \x1b[0m  1s", "b      \x1b[31mcrash-loop\x1b[0m  2s"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert TextTable(columns).text(rows).splitlines()[1:] == ["ready  ready       1s", "b      crash-loop  2s"]


def test_page_omits_the_line_of_an_empty_text() -> None:
    columns = (Column("Detail", "detail"), Column("Slots", "slots_total"))
    assert list(page(columns, InstanceState(slots_total=4))) == ["Slots:        4"]


def test_table_without_rows_has_a_header() -> None:
    assert TextTable(TABLE).text([]) == "NAME  WORDS  AGE\n"


def test_row_is_not_repeated_if_only_its_age_changed() -> None:
    table = TextTable(TABLE)
    assert table.fingerprint(("a", "one", "1s")) == table.fingerprint(("a", "one", "9s"))
    assert table.fingerprint(("a", "one", "1s")) != table.fingerprint(("a", "two", "1s"))


def test_terminal_text_has_no_control_characters() -> None:
    assert safe_text("a\x1b[31m\r\n\tb\u202ec") == "a [31m   b c"


def test_every_kind_has_columns_and_wide_has_more() -> None:
    for kind in ResourceKind:
        narrow = [column.title for column in listing_of(kind).columns]
        wide = [column.title for column in listing_of(kind).wide]
        assert narrow[0] == "NAME"
        assert set(narrow) < set(wide)


@pytest.mark.parametrize(
    ("text", "seconds"), [("60s", 60), ("90", 90), ("5m", 300), ("1h", 3600), ("250ms", 0.25), ("1.5s", 1.5), ("0", 0)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1d", "1e3", "NaN", "169h", "1h30m", "1" * 400])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(FieldError, match="--timeout"):
        parse_duration(text)


def _model(state: str) -> dict[str, Any]:
    number = Model.Status.Value(f"STATUS_{state.upper()}")
    return plain(model_document(Model(manifest=ModelManifest(name="m"), kind=Model.KIND_PUBLIC, status=number)))


def test_expectations_are_evaluated() -> None:
    active = parse_expectation("status=active", ResourceKind.MODEL)
    assert active(_model("active"))
    assert not active(_model("hibernating"))
    assert not active(None)
    gone = parse_expectation("delete", ResourceKind.MODEL)
    assert gone(None)
    assert not gone(_model("inactive"))
    exists = parse_expectation("exists", ResourceKind.POOL)
    assert exists({"kind": "pool", "name": "p"})
    assert not exists(None)


@pytest.mark.parametrize("word", ["ready", "Ready", "active", "awake"])
def test_expectation_may_be_a_bare_word(word: str) -> None:
    bare = parse_expectation(word, ResourceKind.MODEL)
    whole = parse_expectation("status=active" if word == "active" else f"condition={word}", ResourceKind.MODEL)
    models = None, _model("active"), _model("inactive"), _model("hibernating")
    assert bare(None) is False
    assert list(map(bare, models)) == list(map(whole, models))


@pytest.mark.parametrize(
    ("word", "kind"), [("active", ResourceKind.POOL), ("awake", ResourceKind.POOL), ("on", ResourceKind.MODEL)]
)
def test_bare_word_unknown_to_the_kind_is_refused(word: str, kind: ResourceKind) -> None:
    with pytest.raises(FieldError, match="--for: must be ready"):
        parse_expectation(word, kind)


def test_targets_are_a_kind_and_names_or_pairs() -> None:
    assert parse_targets(["models"]) == (ResourceKind.MODEL, ())
    two = (Target(ResourceKind.MODEL, "a"), Target(ResourceKind.MODEL, "b"))
    assert parse_targets(["llm", "a", "b"]) == (ResourceKind.MODEL, two)
    assert parse_targets(["model/a", "model/b"]) == (ResourceKind.MODEL, two)
    assert one_target(["pool/p"]) == Target(ResourceKind.POOL, "p")


@pytest.mark.parametrize(
    "words", [["model/"], ["/x"], ["model", "-x"], ["model/a//b"], ["model", "a" * 129], ["model/a", "b"]]
)
def test_invalid_targets_are_refused(words: list[str]) -> None:
    with pytest.raises(FieldError):
        parse_targets(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_has_help_with_an_example(name: str) -> None:
    command = load(name)
    assert command.name == name.rpartition(" ")[2]
    assert command.help
    assert "Example" in f"{command.help}{command.epilog}"


@pytest.mark.parametrize("name", COMMANDS)
def test_table_summary_is_the_first_paragraph_of_command_help(name: str) -> None:
    *groups, own = name.split()
    group: Any = load(groups[0]) if groups else get_command(app)
    listed = group.get_command(None, own)
    assert listed.help == " ".join(load(name).help.split("\n\n")[0].split())


def test_group_lists_every_command_once() -> None:
    group = get_command(app)
    listed = group.list_commands(None)  # type: ignore[attr-defined]  # it is a group
    assert sorted(listed) == sorted(name for name in (*COMMANDS, *extension_commands()) if " " not in name)
    assert len(listed) <= MOST_COMMANDS
    assert listed[0] == "up", "a newcomer starts there"
    assert group.get_command(None, "nonsense") is None  # type: ignore[attr-defined]


@pytest.mark.parametrize("word", OTHER_WORDS)
def test_command_of_another_tool_suggests_the_equivalent_commands(word: str) -> None:
    refused = _invoked(word)
    assert refused.exit_code == EXIT_USAGE
    assert word not in COMMANDS
    named = re.findall(r"weft (\w+)", OTHER_WORDS[word])
    assert set(named) <= COMMANDS.keys()
    assert " ".join(f"there is no command {word}; use: {OTHER_WORDS[word]}".split()) in _unboxed(refused.output)


@pytest.mark.parametrize("path", removed.COMMANDS)
def test_removed_command_names_its_replacement(path: str) -> None:
    refused = _invoked(*path.split(), "night", "--dry-run")
    assert refused.exit_code == EXIT_USAGE
    assert path not in COMMANDS
    assert refused.output == f"weft: the command {path} was removed; use: {removed.COMMANDS[path]}\n"


def test_misspelled_command_suggests_close_matches() -> None:
    assert "there is no command pul; did you mean pull?" in _unboxed(_invoked("pul").output)
    assert "there is no command xyzzy; see weft --help" in _unboxed(_invoked("xyzzy").output)


def test_command_of_a_group_is_suggested_with_its_group() -> None:
    assert "there is no command attach; did you mean models attach?" in _unboxed(_invoked("attach").output)
    assert "there is no command atach; did you mean models attach" in _unboxed(_invoked("atach").output)


def test_invalid_choice_error_hides_library_wording() -> None:
    said = _unboxed(_invoked("keys", "create", "--role", "owner").output)
    assert "weft: invalid value for '--role': 'owner' is not one of 'user'" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ctx",), "there is no option --ctx; options of a command follow its name: weft COMMAND --ctx"),
        (
            ("--hme", "x", "ps"),
            "there is no option --hme; did you mean --home? options of a command follow its name: weft COMMAND --home",
        ),
        (("--hlp",), "there is no option --hlp; did you mean --help?"),
        (("load", "--ctxt", "4"), "there is no option --ctxt for weft load; did you mean --ctx?"),
        (
            ("mesh", "operation", "--fo"),
            "there is no option --fo for weft mesh operation; see weft mesh operation --help",
        ),
        (("mesh", "lease", "acquir"), "no such command 'acquir'. Did you mean 'acquire'?"),
        (("load",), "missing argument 'MODEL'; see weft load --help"),
        (("load", "a", "--ctx", "x"), "invalid value for '--ctx' / '--context-tokens': must be a whole number; "),
    ],
)
def test_invalid_command_line_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    refused = _invoked(*words)
    assert refused.exit_code == EXIT_USAGE
    assert refused.output.startswith(f"weft: {said}")
    assert refused.output.count("\n") == 1


def _invoked(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def _unboxed(output: str) -> str:
    return " ".join(re.sub(r"[╭─╮│╰╯]", " ", output).split())


@pytest.mark.parametrize("word", ALIASES)
def test_alias_is_an_unlisted_name_of_a_command(word: str) -> None:
    command = ALIASES[word]
    assert command in COMMANDS
    assert not {word} & (COMMANDS.keys() | OTHER_WORDS.keys())
    asked = _invoked(word, "--help")
    assert asked.exit_code == EXIT_OK
    assert f"weft {command}" in _unboxed(asked.output)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("models", "list"), "weft models ls"),
        (("keys", "ls"), "weft keys list"),
        (("keys", "rm"), "weft keys revoke"),
        (("models", "remove"), "weft models rm"),
        (("runtime", "rm"), "weft runtime remove"),
        (("batch", "show"), "weft batch get"),
        (("runner", "token", "ls"), "weft runner token list"),
    ],
)
def test_group_accepts_other_names_of_its_commands(typed: tuple[str, ...], meant: str) -> None:
    asked = _invoked(*typed, "--help")
    assert asked.exit_code == EXIT_OK
    assert f"Usage: {meant} " in _unboxed(asked.output)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("ls",), ["get", "models"]),
        (("list", "-o", "json"), ["get", "models"]),
        (("ls", "runners"), ["get", "runners"]),
        (("list", "models"), ["get", "models"]),
    ],
)
def test_list_means_get_and_alone_the_models(typed: tuple[str, ...], meant: list[str]) -> None:
    group = get_command(app)
    with group.make_context("weft", ["--version"], resilient_parsing=True) as context:
        name, _, rest = group.resolve_command(context, list(typed))  # type: ignore[attr-defined]  # it is a group
    assert [name, rest[0]] == meant


@pytest.mark.parametrize("words", [(), ("ps",), ("models", "ls"), ("help",)])
def test_help_command_shows_the_help_of_a_command(words: tuple[str, ...]) -> None:
    assert _invoked("help", *words).output == _invoked(*(word for word in words if word != "help"), "--help").output


def test_help_shows_choices_and_names_of_values_but_no_types() -> None:
    said = _unboxed(_invoked("up", "--help").output) + _unboxed(_invoked("mesh", "lease", "acquire", "--help").output)
    assert "--discover <ask|yes|no>" in said
    assert "--memory -m SIZE" in said
    assert not re.search(r"<(bool|int|str|path|list)|range", said)


def test_command_options_are_repeated_as_typed() -> None:
    app = typer.Typer()
    found: list[list[str]] = []

    @app.command()
    def up(
        context: typer.Context,
        port: Annotated[int | None, typer.Option("--port", "-p", envvar="PORT")] = None,
        home: Annotated[Path, typer.Option()] = Path("x"),
        name: Annotated[list[str] | None, typer.Option()] = None,
        *,
        tls: Annotated[bool, typer.Option("--tls/--no-tls")] = True,
        detach: Annotated[bool, typer.Option("-d")] = False,
    ) -> None:
        assert (port, home, name, tls, detach) == (0, Path("h"), ["a", "b"], False, True)
        found.append(arguments_of(context, without=frozenset({"detach"})))

    words = ["-p", "0", "--home", "h", "--name", "a", "--name", "b", "--no-tls", "-d"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == EXIT_OK
    assert found == [["--port", "0", "--home", "h", "--name", "a", "--name", "b", "--no-tls"]]


@pytest.mark.parametrize("words", [["model", "über/tiny"], ["model/über/tiny"]])
def test_model_is_named_in_any_letters(words: list[str]) -> None:
    assert one_target(words) == Target(ResourceKind.MODEL, "xn--ber-goa/tiny")


def test_columns_are_written_as_titles_paths_and_formats() -> None:
    columns = custom_columns("LAST_SEEN:status.at:ago~ RATE:rate:{:.1f}/s SLOTS", SLOTS=lambda record: record["slots"])
    assert columns == (
        Column("LAST SEEN", "status.at", "ago", ticks=True),
        Column("RATE", "rate", "{:.1f}/s"),
        Column("SLOTS", columns[2].source),
    )
    assert [each.text({"rate": 2, "slots": "1/4"}) for each in columns] == [None, "2.0/s", "1/4"]
