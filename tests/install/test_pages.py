"""The pages of the first hour: every command in them is run, in their order, on an account with nothing installed."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from bare_account import TOOLS, BareAccount

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PROGRAMS = ("git", "cp", "rm", "ls", "curl")
pytestmark = [pytest.mark.install, pytest.mark.timeout(300)]
_BLOCK = re.compile(r"^```console\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_ASKED = re.compile(r"^\| [^|]+ \| `(?P<command>weft [^`]+)` \|", re.MULTILINE)


def blocks(page: str, first: str, last: str = "") -> list[str]:
    """The commands in the blocks of a page's sections from `first` to before `last`, in their order."""
    text = (DOCS / f"{page}.md").read_text("utf-8").partition(f"# {first}\n")[2]
    text = text.partition(f"## {last}\n")[0] if last else text
    lines = (line for block in _BLOCK.finditer(text) for line in block["body"].splitlines())
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


def asked() -> list[str]:
    """The commands of the second column of the page of symptoms."""
    return [found["command"] for found in _ASKED.finditer((DOCS / "trouble.md").read_text("utf-8"))]


class Reader:
    """Somebody who types what the pages say."""

    def __init__(self, account: BareAccount, repository: Path) -> None:
        self._account = account
        self._repository = repository

    def types(self, command: str, rc: int = 0) -> str:
        """Runs a command as it is printed, but for the repository's address and the port, which others may use."""
        typed = command.replace("<address of this repository>", str(self._repository))
        typed = typed.replace("weft up -d", "weft up -d --port 0")
        if "http://127.0.0.1:8080" in typed:
            typed = typed.replace("http://127.0.0.1:8080", str(self.facts()["url"]))
        return self._account.run("bash", "-c", typed, rc=rc)

    def facts(self) -> dict[str, object]:
        """What the running mesh says of itself; empty: none runs."""
        file = self._account.home / ".weft" / "run" / "up.json"
        found: dict[str, object] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def has_mesh(self) -> None:
        """Starts a mesh where none runs."""
        if not self.facts():
            self.types("weft up -d")

    def left(self) -> set[str]:
        """The files of the home."""
        return self._account.files()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the working tree, committed to a repository that can be cloned and pulled from."""
    folder = tmp_path_factory.mktemp("repository")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for arguments in (["init", "-q", "-b", "main"], ["add", "-A", "-f"], ["commit", "-qm", "Snapshot of the tree"]):
        named = ["git", "-c", "user.name=test", "-c", "user.email=test@invalid", *arguments]
        subprocess.run(named, cwd=folder, check=True)
    return folder


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, packages: Path, repository: Path) -> Iterator[Reader]:
    account = BareAccount.create(tmp_path_factory.mktemp("reader"), packages)
    for name in PROGRAMS:
        found = shutil.which(name)
        assert found is not None, f"this machine has no {name}"
        (account.path / name).symlink_to(found)
    (account.path / "pipx").symlink_to(TOOLS / "pipx")
    reader = Reader(account, repository)
    yield reader
    if reader.facts():
        reader.types("weft stop")
    shutil.rmtree(account.home)


def test_start_page_steps_end_in_an_answer(reader: Reader) -> None:
    printed = {command: reader.types(command) for command in blocks("start", "Start", "Programs that use the mesh")}
    (chat,) = (output for command, output in printed.items() if command.startswith("weft chat"))
    assert chat.split()
    (listed,) = (output for command, output in printed.items() if command.startswith("curl"))
    assert [model["id"] for model in json.loads(listed)["data"]] == ["smollm2-135m"]


def test_upgrade_page_steps_upgrade_and_roll_back(reader: Reader) -> None:
    reader.has_mesh()
    for command in blocks("deploy", "Upgrade"):
        reader.types(command.replace("EARLIER_COMMIT", "HEAD"))
    assert reader.facts()
    assert ".weft/state/key-pepper" in reader.left()


def test_every_command_of_the_troubleshooting_page_runs(reader: Reader) -> None:
    reader.has_mesh()
    reader.types('weft chat smollm2-135m "Say hello" --max-tokens 4')
    assert len(asked()) >= 12
    for command in dict.fromkeys([*asked(), *blocks("trouble", "Trouble", "Capacity planning")]):
        # The port of the page may be taken here: then the doctor says so.
        reader.types(command.replace("--port 8080", f"--port {_port(reader)}"))


def test_troubleshooting_page_quotes_messages_as_printed(reader: Reader) -> None:
    text = (DOCS / "trouble.md").read_text("utf-8")
    for command in (f"weft up --home ~/two --port {_port(reader)}", "weft up --port 0", "weft ps --home ~/none"):
        printed = reader.types(command, rc=1 if "none" in command else 4).splitlines()[-1].removeprefix("weft: ")
        assert any(
            _fixed(printed).startswith(_fixed(quoted)) for quoted in re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
        )


def _port(reader: Reader) -> str:
    return str(reader.facts()["url"]).rpartition(":")[2]


def _fixed(text: str) -> str:
    """A message without what differs: numbers and folders."""
    return re.sub(r"\d+", "N", re.sub(r"[~/][\w./-]*", "PATH", text.replace("127.0.0.1", "HOST")))


def test_uninstall_page_steps_leave_nothing(reader: Reader) -> None:
    reader.has_mesh()
    for command in blocks("start", "Uninstall"):
        reader.types(command)
    left = {name for name in reader.left() if not name.startswith(("weft-before/", "two/"))}
    assert left == set()
