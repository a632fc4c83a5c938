"""What weft.yaml is refused with: the field, its line, what is expected, and the closest name."""

from pathlib import Path

import pytest

from weft.kernel.errors.error_tree import MAX_REFUSALS, FieldError
from weft.kernel.errors.reasons import Reason
from weft_app.config.loader import load_config

GPU = "runners:\n  - name: gpu\n"
MODEL = "models: [{name: m, path: /m.gguf}]\n"
SERVER = "- {name: a, runtime: openai_http, models: [{name: m, url: 'http://127.0.0.1:1/v1'}]}\n"
HTTP = "runners:\n  - name: gpu\n    runtime: openai_http\n    models:\n"


def refused(folder: Path, text: str) -> FieldError:
    """What a file with this text is refused with."""
    path = folder / "weft.yaml"
    path.write_text(text)
    with pytest.raises(FieldError) as caught:
        load_config(path)
    return caught.value


@pytest.mark.parametrize(
    ("text", "field", "words", "line"),
    [
        # a mapping or a text where a list belongs
        (
            "runners:\n  local:\n    models: []\n",
            "runners",
            "must be a list, and is a mapping",
            1,
        ),
        (f"runners:\n  name: gpu\n  {MODEL}", "runners", "must be a list, and is a mapping", 1),
        (f"{GPU}    models:\n      name: m\n", "runners.0.models", "must be a list, and is a mapping", 3),
        (
            f"{GPU}    models: m.gguf\n",
            "runners.0.models",
            'must be a list, and is the text "m.gguf"',
            3,
        ),
        (f"{GPU}    command: server --x\n    {MODEL}", "runners.0.command", 'a list, and is the text "server --x"', 3),
        # a text or a list where a mapping belongs
        (
            f"{GPU}    models:\n      - m.gguf\n",
            "runners.0.models.0",
            'must be a mapping of names to values, and is the text "m.gguf"',
            4,
        ),
        (
            "log: debug\n",
            "log",
            'must be a mapping of names to values, and is the text "debug"',
            1,
        ),
        ("router: [1]\n", "router", "must be a mapping of names to values, and is a list", 1),
        # a variable, which weft does not expand
        (
            f"{HTTP}      - {{name: m, url: 'http://${{MODEL_HOST}}:8000'}}\n",
            "runners.0.models.0.url",
            "has ${MODEL_HOST}, and variables are not expanded: write the address itself",
            5,
        ),
        # a text where a number belongs, and other wrong values
        (
            "host: '::1'\nport: '8080'\n",
            "port",
            'must be a whole number, and is the text "8080"',
            2,
        ),
        ("port: http\n", "port", 'must be a whole number, and is the text "http"', 1),
        ("port: 80.5\n", "port", "must be a whole number, and is 80.5", 1),
        ("port: yes\n", "port", "must be a whole number, and is true", 1),
        ("port: 99999\n", "port", "must be at most 65535, and is 99999", 1),
        ("drain_seconds: 10s\n", "drain_seconds", 'must be a number, and is the text "10s"', 1),
        ("drain_seconds: .inf\n", "drain_seconds", "must be a finite number", 1),
        (
            "auth:\n  required: 'yes'\n",
            "auth.required",
            'must be true or false, and is the text "yes"',
            2,
        ),
        ("host: 127\n", "host", "must be a text, and is 127", 1),
        (
            "log:\n  level: warn\n",
            "log.level",
            "'warning' or 'error', and is the text \"warn\"; did you mean warning?",
            2,
        ),
        (
            f"{GPU}    models:\n      - {{name: m, path: /m, slots: 0}}\n",
            "runners.0.models.0.slots",
            "at least 1, and is 0",
            4,
        ),
        # nothing where something belongs
        ("port:\n", "port", "has no value: write one, or remove the line", 1),
        (GPU, "runners.0.models", "is missing", 2),
        (f"{GPU}    models: []\n", "runners.0.models", "must have 1 or more items", 3),
        # a home that is not known
        (
            f"{GPU}    models: [{{name: m, path: ~nobody-here/m.gguf}}]\n",
            "runners.0.models.0.path",
            "there is no user nobody-here; a file of yours begins with ~/",
            3,
        ),
        # names that are not known
        ("prot: 8080\n", "prot", "is not a setting; did you mean port?", 1),
        ("port: 1\nrunner:\n  - name: a\n", "runner", "is not a setting; did you mean runners?", 2),
        ("router:\n  queue_timeout: 30\n", "router.queue_timeout", "did you mean queue_timeout_seconds?", 2),
        (f"{GPU}    modles: []\n", "runners.0.modles", "is not a setting; did you mean models?", 3),
        (
            f"{GPU}    models:\n      - name: m\n        path: /m\n        context: 1\n",
            "runners.0.models.0.context",
            "did you mean context_tokens?",
            6,
        ),
        (
            f"{GPU}    runtime: llama\n    {MODEL}",
            "runners.0.runtime",
            "did you mean llama_cpp_python or llama_server?",
            3,
        ),
        (
            f"{GPU}    runtime: vllm_server\n    {MODEL}",
            "runners.0.runtime",
            "did you mean llama_server or server?",
            3,
        ),
        # names that are there twice
        (
            f"{HTTP}      - {{name: m, url: 'http://a/v1'}}\n      - {{name: m, url: 'http://b/v1'}}\n",
            "configuration",
            "m (replicas have their own names and share a pool) (in {folder}/weft.yaml line 5, weft.yaml line 6)",
            None,
        ),
        # a key that is no text
        ("1: 2\n", "1", "must be a text", 1),
    ],
)
def test_mistake_is_reported_with_its_line_and_the_expected_value(
    tmp_path: Path, text: str, field: str, words: str, line: int | None
) -> None:
    error = refused(tmp_path, text)
    assert error.reason is Reason.INVALID_ARGUMENT
    first = error.message.splitlines()[0]
    assert (error.field, words.replace("{folder}", str(tmp_path)) in first) == (field, True), first
    if line is not None:
        assert first.endswith(f"(in {tmp_path}/weft.yaml line {line})")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("runners:\n\t- name: gpu\n", "is not YAML (line 2): tabs cannot indent; use spaces"),
        ("router:\n  pools:\n\tx: 1\n", "is not YAML (line 3): tabs cannot indent; use spaces"),
        (
            "runners:\n  - name: gpu\n   models: []\n",
            "(line 3): the line is indented unlike the lines that it belongs to",
        ),
        ("host: a: b\n", "(line 1): a text with a colon needs quotes"),
        ("port: 1\nhost\nlog: {}\n", "(line 3): write `name: value`, with a space after the colon"),
        ("runners: [{name: gpu\n", "(line 2): a bracket is not closed, or a comma is missing"),
        ('host: "127.0.0.1\nport: 1\n', "a quote is not closed"),
        ('host: "C:\\models"\n', "(line 1): in double quotes a backslash begins an escape; use single quotes"),
        ("host: *x\n", "(line 1): a text that begins with * or & needs quotes"),
        ("host: @x\n", "(line 1): a text that begins with this character needs quotes"),
        ("port: 1\n---\nport: 2\n", "is not YAML of one document (line 3): remove the line `---`"),
        ("port: 1\nport: 2\n", "is refused (line 2): the key 'port' appears twice"),
        ("a: &a [*a]\n", "is refused (line 1): an alias inside what it stands for"),
        ("port: \x00\n", "is not YAML: it has a character that may not stand in YAML"),
    ],
)
def test_file_that_is_not_yaml_is_refused_with_line_and_remedy(tmp_path: Path, text: str, words: str) -> None:
    error = refused(tmp_path, text)
    assert (error.reason, error.field) == (Reason.MALFORMED_REQUEST, "--config")
    assert words in error.message, error.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "port 8080\n",
            "must be a mapping of names to values: write `name: value`, with a space after the colon (line 1)",
        ),
        ("port:8080\n", "with a space after the colon (line 1)"),
        ("\n- name: gpu\n", "and line 2 begins a list: runners are the list below `runners:`"),
    ],
)
def test_file_that_is_not_a_mapping_is_refused_with_a_remedy(tmp_path: Path, text: str, words: str) -> None:
    error = refused(tmp_path, text)
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "--config")
    assert words in error.message, error.message


def test_several_mistakes_are_reported_together_with_unknown_names_first(tmp_path: Path) -> None:
    error = refused(tmp_path, "drain_seconds: x\nprot: 1\n")
    first, second = error.message.splitlines()
    assert first == f"prot: is not a setting; did you mean port? (in {tmp_path}/weft.yaml line 2)"
    assert second.startswith('  drain_seconds: must be a number, and is the text "x"')


def test_mistakes_inside_models_are_reported_beside_a_missing_runtime_setting(tmp_path: Path) -> None:
    text = (
        "runner: 1\n"
        "runners:\n- name: local\n  models:\n"
        "  - {name: a, path: /a.gguf, slots: 0}\n"
        "  - {name: b, pat: /b.gguf}\n"
    )
    told = {line.strip().split(": ")[0]: line for line in refused(tmp_path, text).message.splitlines()}
    assert set(told) == {"runner", "runners.0.models.0.slots", "runners.0.models.1.pat", "runners.0.models.1.path"}
    assert "did you mean runners?" in told["runner"]
    assert "did you mean path?" in told["runners.0.models.1.pat"]


@pytest.mark.parametrize("pool", ["local", "helper"])
def test_pool_named_like_a_runner_or_agent_is_refused_with_its_lines(tmp_path: Path, pool: str) -> None:
    text = (
        "runners:\n- name: local\n  models:\n"
        f"  - {{name: a, path: /a.gguf, pool: {pool}}}\n"
        "  agents:\n  - {name: helper, model: a}\n"
    )
    message = refused(tmp_path, text).message
    assert f"a pool cannot have the name of a runner or an agent: {pool}" in message
    assert "weft.yaml line 4" in message


def test_pool_may_have_the_name_of_its_model(tmp_path: Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text("runners:\n- name: local\n  models:\n  - {name: a, path: /a.gguf, pool: a}\n")
    assert load_config(path).runners


def test_number_of_reported_mistakes_is_limited(tmp_path: Path) -> None:
    error = refused(tmp_path, "".join(f"nonsense_{number}: 1\n" for number in range(MAX_REFUSALS + 2)))
    lines = error.message.splitlines()
    assert (len(lines), lines[-1]) == (MAX_REFUSALS + 1, "  and 2 more")


def test_invalid_value_in_the_local_file_error_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "weft.local.yaml").write_text("log:\n  level: info\nport: http\n")
    error = refused(tmp_path, f"port: 1\nrunners:\n{SERVER}")
    assert error.message.endswith(f"(in {tmp_path}/weft.local.yaml line 3)")


def test_invalid_command_line_value_error_names_it(tmp_path: Path) -> None:
    path = tmp_path / "weft.yaml"
    path.write_text("port: 1\n")
    with pytest.raises(FieldError) as caught:
        load_config(path, {"port": 99_999})
    assert caught.value.message == "port: must be at most 65535, and is 99999 (from command line)"


def test_refused_secret_is_not_shown(tmp_path: Path) -> None:
    text = "runners:\n  - name: a\n    runtime: openai_remote\n    models:\n      - {name: m, api_key: 771234}\n"
    assert "771234" not in refused(tmp_path, text).message


def test_secret_command_in_one_text_is_not_shown(tmp_path: Path) -> None:
    """The suggestion how to write the list had its words, with the token."""
    wake = "{type: command, argv: 'wake --token 771234'}"
    message = refused(tmp_path, f"{GPU}    models: [{{name: m, path: /m.gguf, wake: {wake}}}]\n").message
    assert "runners.0.models.0.wake.argv: must be a list, and is a text" in message
    assert "771234" not in message


def test_long_value_is_truncated(tmp_path: Path) -> None:
    assert len(refused(tmp_path, f"port: {'x' * 10_000}\n").message) < 300


def test_ambiguous_runtime_does_not_hide_other_mistakes(tmp_path: Path) -> None:
    mixed = "{name: a, path: /a.gguf, slotz: 4}, {name: b, url: 'http://127.0.0.1:1/v1'}"
    error = refused(
        tmp_path, f"prot: 1\nrunners:\n- name: box\n  nmae: x\n  models: [{mixed}]\nrunner: []\nport: http\n"
    )
    named = [line.strip().partition(": ")[0] for line in error.message.splitlines()]
    assert sorted(named) == [
        "port",
        "prot",
        "runner",
        "runners.0.models.0.slotz",
        "runners.0.nmae",
        "runners.0.runtime",
    ]


def test_ambiguous_runtime_reports_no_errors_of_the_default_runtime(tmp_path: Path) -> None:
    mixed = "{name: a, path: /a.gguf}, {name: b, url: 'http://127.0.0.1:1/v1'}"
    error = refused(tmp_path, f"runners:\n- name: box\n  models: [{mixed}]\n")
    assert error.message.startswith("runners.0.runtime: must be named")
    assert len(error.message.splitlines()) == 1


def test_http_port_error_suggests_port(tmp_path: Path) -> None:
    """`http_port` is a setting of runners; at the top the closest name was `grpc_port`."""
    assert "http_port: is not a setting; did you mean port?" in refused(tmp_path, "http_port: 8080\n").message
