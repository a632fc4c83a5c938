"""`weft pull` and `weft models` as processes, against a hub on this machine."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.waiting import wait_until
from kit.warm_python import warm

from weft_testing.model_hub import HubRepository, ModelHub

pytestmark = pytest.mark.slow("runs weft as processes")

WEFT = warm("weft_app.cli.main")
WEIGHTS = bytes(range(256)) * 2_000
SOURCE = "hf:acme/tiny-GGUF:Q4_K_M"
WAIT_SECONDS = 60.0


class Stage:
    """A home, a working directory, and a hub."""

    def __init__(self, folder: Path, hub: ModelHub) -> None:
        self.folder = folder
        self.hub = hub
        self.home = folder / "home"
        self.environment = {
            **os.environ,
            "WEFT_HOME": str(self.home),
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(folder / "hf"),
            "HF_TOKEN": "",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*WEFT, *words],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*words)
        out, err = process.communicate(timeout=WAIT_SECONDS)
        return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    hub = ModelHub()
    hub.repositories["acme/tiny-GGUF"] = HubRepository(
        files={"tiny-Q4_K_M.gguf": WEIGHTS, "tiny-Q8_0.gguf": WEIGHTS[::-1]}
    )
    with hub.running():
        yield Stage(tmp_path, hub)


def test_model_is_pulled_listed_and_removed_without_a_mesh(stage: Stage) -> None:
    pulled = stage.run("pull", SOURCE)
    assert pulled.returncode == 0, pulled.stderr
    path = pulled.stdout.splitlines()[1]
    assert Path(path).read_bytes() == WEIGHTS
    assert "Q4_K_M, 500 KiB in 1 file\n" in pulled.stderr
    listed = stage.run("models", "ls")
    assert listed.stdout.splitlines()[1].split()[:4] == [SOURCE, "Q4_K_M", "500", "KiB"]
    wide = json.loads(stage.run("models", "ls", "-o", "json").stdout)
    assert wide["kind"] == "StoredModelList"
    assert wide["items"][0]["path"] == path
    removed = stage.run("models", "rm", SOURCE)
    assert removed.stdout == f"{SOURCE} removed: 500 KiB freed\n"
    empty = stage.run("models", "ls")
    assert empty.stdout.count("\n") == 1
    assert "weft: no model has been pulled yet; pull one: weft pull " in empty.stderr
    assert stage.run("models", "ls", "-o", "json").stderr == ""
    gone = stage.run("models", "rm", SOURCE)
    assert gone.returncode == 3
    assert "is not stored; weft models ls lists the stored models" in gone.stderr


def test_each_json_line_is_a_progress_state_and_the_last_has_the_model(stage: Stage) -> None:
    lines = [json.loads(line) for line in stage.run("pull", SOURCE, "-o", "json").stdout.splitlines()]
    assert [lines[0]["stage"], lines[-1]["stage"]] == ["looking", "done"]
    assert all(line["source"] == SOURCE for line in lines)
    assert lines[-1]["model"]["source"] == SOURCE
    assert "model" not in lines[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_pull_suggests_resuming_and_resumes(stage: Stage, number: signal.Signals, code: int) -> None:
    stage.hub.faults.chunk_seconds = 0.1
    process = stage.start("pull", SOURCE)
    wait_until(lambda: stage.hub.sent_bytes >= 100_000, WAIT_SECONDS)
    process.send_signal(number)
    _, err = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == code
    assert "are kept; run the same command to continue" in err
    assert "Traceback" not in err
    assert stage.run("models", "ls").stdout.count("\n") == 1
    stage.hub.faults.chunk_seconds = 0.0
    sent = stage.hub.sent_bytes
    assert stage.run("pull", SOURCE).returncode == 0
    assert stage.hub.sent_bytes - sent < len(WEIGHTS) - 50_000


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("pull", "acme/tiny-GGUF"), 2, "write hf:acme/tiny-GGUF for the hub's repository"),
        (("pull", "hf:acme/tiny-GGUF:Q2_K"), 2, "available: Q4_K_M, Q8_0"),
        (("pull", "hf:acme/none"), 3, "the hub has no such repository, or it is private"),
    ],
)
def test_failed_pull_ends_with_one_line_and_the_code_of_its_reason(
    stage: Stage, words: tuple[str, ...], code: int, text: str
) -> None:
    ended = stage.run(*words)
    assert ended.returncode == code
    assert ended.stderr.count("weft: ") >= 1
    assert text in ended.stderr
    assert "Traceback" not in ended.stderr


def test_weft_yaml_limit_is_reported_before_the_pull(stage: Stage) -> None:
    (stage.folder / "weft.yaml").write_text("model_store: {disk_limit: 100KiB}\n")
    ended = stage.run("pull", SOURCE)
    assert ended.returncode == 2
    assert "the limit of stored models is 100 KiB" in ended.stderr
    assert stage.hub.sent_bytes == 0
    (stage.folder / "weft.yaml").write_text("model_store: {disk_limit: 5 apples}\n")
    assert "model_store.disk_limit" in stage.run("pull", SOURCE).stderr


def test_model_used_by_weft_yaml_is_marked_and_needs_force_to_be_removed(stage: Stage) -> None:
    path = stage.run("pull", SOURCE).stdout.splitlines()[1]
    (stage.folder / "weft.yaml").write_text(f"runners: [{{name: a, models: [{{name: tiny, path: {path}}}]}}]\n")
    assert json.loads(stage.run("models", "ls", "-o", "json").stdout)["items"][0]["usedBy"] == ["tiny"]
    refused = stage.run("models", "rm", SOURCE)
    assert refused.returncode == 4
    assert "is used by tiny in weft.yaml" in refused.stderr
    assert stage.run("models", "rm", SOURCE, "--force").returncode == 0


def test_gc_frees_partial_pulls_on_request(stage: Stage) -> None:
    stage.run("pull", SOURCE)
    (stage.home / "models" / "partial" / "sha256-0").write_bytes(b"x" * 2048)
    assert stage.run("models", "gc").stdout == "0 bytes freed: 0 files, 0 partial files\n"
    found = json.loads(stage.run("models", "gc", "--partial", "-o", "json").stdout)
    assert found == {"kind": "ModelStoreCollection", "files": 0, "partialFiles": 1, "freedBytes": "2048"}


def test_no_command_imports_the_hub_at_startup() -> None:
    program = (
        "import sys; import weft_app.cli.main, weft_app.cli.models, weft_app.cli.up, weft_app.compose.runner;"
        "print([name for name in ('huggingface_hub', 'httpx2', 'tqdm') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_existing_relative_path_needs_no_leading_dot(stage: Stage) -> None:
    (stage.folder / "files").mkdir()
    (stage.folder / "files" / "mine.gguf").write_bytes(WEIGHTS)
    (stage.folder / "other.gguf").write_bytes(WEIGHTS[:100])
    assert "/files/mine.gguf: 500 KiB, sha256:" in stage.run("pull", "files/mine.gguf").stdout
    assert stage.run("pull", "other.gguf").returncode == 0
    absent = stage.run("pull", "files/absent.gguf")
    assert "write hf:files/absent.gguf for the hub's repository, or ./files/absent.gguf for a path" in absent.stderr
