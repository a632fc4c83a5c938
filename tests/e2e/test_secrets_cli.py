"""`weft keys secret create` and its companions against a registry that runs as a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from registry_process import serving_registry, stop_in_order, weft

VALUE = "sk-canary-0123456789"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home on which a registry serves."""
    folder = tmp_path_factory.mktemp("secrets")
    with serving_registry(folder) as process:
        yield folder
        stop_in_order(process)


def _file(folder: Path) -> str:
    path = folder / "value"
    path.write_text(f"{VALUE}\n")
    return str(path)


def test_secret_lifecycle_never_prints_its_value_in_any_format(home: Path, tmp_path: Path) -> None:
    printed = []
    done = weft(home, "keys", "secret", "create", "provider", "--from-file", _file(tmp_path))
    assert (done.exit_code, done.stdout) == (0, "secret/provider created\n"), done.output
    done = weft(home, "keys", "secret", "rotate", "provider", "--from-file", _file(tmp_path))
    assert (done.exit_code, done.stdout) == (0, "secret/provider rotated, version 2\n"), done.output
    for output in ("table", "wide", "json", "name"):
        printed.append(weft(home, "get", "secrets", "-o", output).stdout)
        assert "provider" in printed[-1]
    assert printed[0].split()[:4] == ["SECRET", "VERSION", "AGE", "USED"]
    (item,) = json.loads(printed[2])["items"]
    assert (item["name"], item["version"], item["usedBy"]) == ("provider", 2, [])
    assert printed[3] == "secret/provider\n"
    made = weft(home, "keys", "secret", "create", "second", "--from-file", _file(tmp_path), "-o", "json")
    assert json.loads(made.stdout)["kind"] == "secret"
    done = weft(home, "delete", "secret", "provider", "second")
    assert (done.exit_code, done.stdout) == (0, "secret/provider deleted\nsecret/second deleted\n")
    everything = "".join((*printed, made.stdout, done.output))
    assert VALUE not in everything
    logs = "".join(path.read_text() for path in (home / "logs").iterdir())
    assert "secret created" in logs, "a negative control: the log was read"
    assert VALUE not in logs


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["keys", "secret", "create", "a", VALUE], 2, "cannot be an argument"),
        (["keys", "secret", "create", "a", "--from-file", "/nowhere"], 2, "--from-file: /nowhere cannot be read"),
        (["keys", "secret", "create", "a", "--from-env", "WEFT_TEST_UNSET"], 2, "--from-env WEFT_TEST_UNSET: is empty"),
        (["keys", "secret", "create", "a", "-", "--from-env", "HOME"], 2, "cannot be combined"),
        (["keys", "secret", "create", "no name", "--from-env", "HOME"], 2, "NAME"),
        (["keys", "secret", "rotate", "absent", "--from-env", "HOME"], 3, "there is no secret absent"),
        (["delete", "secret", "absent"], 3, "there is no secret absent"),
        (["get", "secret", "absent"], 3, "there is no secret absent"),
        (["get", "secrets", "-o", "yaml"], 2, "secrets cannot be declared"),
    ],
)
def test_mistake_prints_one_line_with_its_exit_code(home: Path, arguments: list[str], code: int, words: str) -> None:
    done = weft(home, *arguments)
    assert done.exit_code == code, done.output
    assert words in done.output
    assert VALUE not in done.output
