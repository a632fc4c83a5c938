"""The commands of weft in the files of deploy/ exist with their options."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from doc_blocks import ROOT, weft_faults

DEPLOY = ROOT / "deploy"
FILES = [
    path for path in sorted(DEPLOY.rglob("*")) if path.suffix in (".yaml", ".service") or path.name == "Dockerfile"
]


def _lists(document: Any) -> Iterator[list[Any]]:
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        yield document
        for item in document:
            yield from _lists(item)


def _commands(path: Path) -> Iterator[list[str]]:
    """The words of each command, after `weft`."""
    text = path.read_text("utf-8")
    if path.suffix == ".yaml":
        for words in _lists(list(yaml.safe_load_all(text))):
            if words[:2] == ["CMD", "weft"] or words[:1] in (["serve"], ["runtime"]):
                yield words[2:] if words[0] == "CMD" else words
        return
    for line in text.splitlines():
        program, _, rest = line.replace("%h", "").partition("bin/weft ")
        if program.startswith("ExecStart="):
            yield rest.replace("%i", "one").split()
        if line.startswith("HEALTHCHECK"):
            yield yaml.safe_load(line.partition("CMD ")[2])[1:]


FOUND = [(path, words) for path in FILES for words in _commands(path)]


def test_deployed_files_have_commands_of_every_kind() -> None:
    assert {path.suffix for path, _ in FOUND} == {".yaml", ".service", ""}


@pytest.mark.parametrize("words", [pytest.param(words, id=f"{path.name}-{words[0]}") for path, words in FOUND])
def test_deployed_command_exists(words: list[str]) -> None:
    """Compose asked `weft health` after it had become `weft mesh health`, so no registry became healthy."""
    assert weft_faults(words) == []
