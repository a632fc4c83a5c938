"""A laptop that joins a GPU box, each an account on which weft was installed by pipx and nothing else is there."""

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from bare_account import BareAccount
from distributions import Built
from kit.listing_server import WORDS, listing_server
from terminal import Terminal, typed

OLLAMA_PORT = 11434
"""Where Ollama listens, and weft looks for it."""
MODEL = "qwen3:0.6b"
pytestmark = [pytest.mark.install, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def accounts(
    tmp_path_factory: pytest.TempPathFactory, packages: Path, built: Built
) -> Iterator[tuple[BareAccount, BareAccount]]:
    """The box, and the laptop."""
    made = []
    for name in ("box", "laptop"):
        account = BareAccount.create(tmp_path_factory.mktemp(name), packages)
        account.tool("pipx", "install", built.wheel)
        assert account.files() == {".local/bin/weft"}
        made.append(account)
    box, laptop = made
    yield box, laptop
    for account in made:
        shutil.rmtree(account.home)


def test_laptop_without_files_joins_a_box_with_one_command_on_each(
    accounts: tuple[BareAccount, BareAccount],
) -> None:
    box, laptop = accounts
    commands: list[tuple[BareAccount, str]] = []

    def types(account: BareAccount, line: str) -> AbstractContextManager[Terminal]:
        commands.append((account, line))
        return typed(account, line)

    # Ports that are free here, and no download; the engine starts later, because both accounts are on one machine.
    with types(box, "weft up --host 0.0.0.0 --port 0 --join-port 0 --no-demo") as mesh:
        printed = mesh.shows(r"weft runner join weft\S+").group()
        mesh.shows("stop with Ctrl-C")
        with listing_server(MODEL, port=OLLAMA_PORT), types(laptop, printed) as runner:
            runner.shows(rf"found on this machine: .*{MODEL}")
            runner.shows("publish all of its models")
            runner.press("\n")
            runner.shows("ok   joined as ")
            assert [account for account, _ in commands] == [box, laptop], "one command on each"
            # The link is there; what comes over it follows within moments.
            box.weft("mesh", "wait", "model", MODEL)
            assert "".join(WORDS) in box.weft("chat", MODEL, "Say hello")
            assert MODEL in box.weft("ps")
            runner.end()
        mesh.end()
    assert not [name for name in laptop.files() if name.endswith(".yaml")], "the laptop has no configuration"
