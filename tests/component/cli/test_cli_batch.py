"""`weft batch`, against a scripted gateway."""

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from weft.kernel.values.unknown_names import FOR_TASKS, unknown_field_target
from weft_app.cli import batch as batch_commands
from weft_app.cli import follow
from weft_app.cli.main import app

ID = "batch-5f0c0d2b7a9e4c31d6a8b2f4"
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "qwen", "messages": []}}
ANSWERS = b'{"custom_id":"a"}\n' * 3


def document(status: str = "in_progress", completed: int = 0, failed: int = 0, **fields: Any) -> dict[str, Any]:
    counts = {"total": 3, "completed": completed, "failed": failed}
    return {
        "id": ID,
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "status": status,
        "created_at": 1795208385,
        "request_counts": counts,
        "output_file_id": None,
        "error_file_id": None,
        **fields,
    }


@dataclass
class GatewayScript:
    """What the gateway answers, and what it was asked."""

    home: Path
    states: list[dict[str, Any] | int] = field(default_factory=lambda: [document()])
    """What the batch is, question by question; the last one stays. A number: that status instead."""
    uploads: list[tuple[str, bytes]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    made: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    pages: list[dict[str, str]] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)

    def run(self, *arguments: str, **environment: str) -> Result:
        """A `weft batch` command to its end."""
        given = {"WEFT_HOME": str(self.home), "COLUMNS": "200", **environment}
        return CliRunner().invoke(app, ["batch", *arguments], env=given)

    def file(self, *lines: object) -> str:
        path = self.home / "requests.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(path)

    def next_state(self) -> web.Response:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, int):
            return web.json_response({"error": {"message": f"told {state}", "param": "endpoint"}}, status=state)
        return web.json_response(state)


async def _broken_content(request: web.Request) -> web.StreamResponse:
    """Sends a part of a file and closes the connection."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(ANSWERS)
    assert request.transport is not None
    request.transport.close()
    return response


def _application(script: GatewayScript) -> web.Application:
    async def upload(request: web.Request) -> web.Response:
        script.keys.append(request.headers.get("authorization"))
        form = await request.post()
        file = form["file"]
        assert isinstance(file, web.FileField)
        script.uploads.append((str(form["purpose"]), file.file.read()))
        script.names.append(file.filename)
        return web.json_response({"id": "file-1"})

    async def create(request: web.Request) -> web.Response:
        script.made.append(await request.json())
        return script.next_state()

    async def get(_: web.Request) -> web.Response:
        return script.next_state()

    async def list_all(request: web.Request) -> web.Response:
        script.pages.append(dict(request.query))
        start = int(request.query.get("after", "batch--1").removeprefix("batch-")) + 1
        found = [document() | {"id": f"batch-{number}"} for number in range(start, min(5, start + 2))]
        return web.json_response({"data": found, "has_more": start + 2 < 5})

    async def list_files(request: web.Request) -> web.Response:
        script.pages.append(dict(request.query))
        file = {
            "id": "file-1",
            "purpose": "batch",
            "bytes": 2048,
            "created_at": 1795208385,
            "filename": "a\x1b[31m.jsonl",
        }
        return web.json_response({"data": [file], "has_more": False})

    async def content(request: web.Request) -> web.Response:
        if request.match_info["id"] != "file-out":
            return web.json_response({"error": {"message": "no such file"}}, status=404)
        return web.Response(body=ANSWERS)

    async def delete(request: web.Request) -> web.Response:
        if request.match_info["id"] == "file-none":
            return web.json_response({"error": {"message": "no such file"}}, status=404)
        script.deleted.append(request.match_info["id"])
        return web.json_response({"deleted": True})

    application = web.Application()
    application.router.add_delete("/v1/files/{id}", delete)
    application.router.add_post("/v1/files", upload)
    application.router.add_get("/v1/files", list_files)
    application.router.add_post("/v1/batches", create)
    application.router.add_get("/v1/batches", list_all)
    application.router.add_get("/v1/batches/{id}", get)
    application.router.add_post("/v1/batches/{id}/cancel", get)
    application.router.add_get("/v1/files/file-cut/content", _broken_content)
    application.router.add_get("/v1/files/{id}/content", content)
    return application


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayScript]:
    monkeypatch.setattr(batch_commands, "POLL_SECONDS", 0.01)
    script = GatewayScript(tmp_path / "home")
    (script.home / "run").mkdir(parents=True)
    ready, loops, over = threading.Event(), list[asyncio.AbstractEventLoop](), asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(_application(script))
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        (script.home / "run" / "up.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
        loops.append(asyncio.get_running_loop())
        ready.set()
        await over.wait()
        await runner.cleanup()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield script
    loops[0].call_soon_threadsafe(over.set)
    thread.join(10)


def test_submit_creates_a_batch_and_prints_only_its_id(script: GatewayScript) -> None:
    file = script.file(LINE, LINE)
    done = script.run("submit", file, "--metadata", "team=red", "--window", "2h", WEFT_API_KEY="weft_k_1")
    assert (done.exit_code, done.stdout) == (0, f"{ID}\n")
    assert script.uploads == [("batch", Path(file).read_bytes())]
    assert script.keys == ["Bearer weft_k_1"]
    assert script.made == [
        {
            "input_file_id": "file-1",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "metadata": {"team": "red"},
            "window_seconds": 7200,
        }
    ]


@pytest.mark.parametrize(
    ("name", "sent"), [("my \u00fcber.jsonl", "my \u00fcber.jsonl"), ("a\udcff.jsonl", "a%3F.jsonl")]
)
def test_uploaded_file_keeps_its_name(script: GatewayScript, name: str, sent: str) -> None:
    """A space was listed as %20, and a name that is not UTF-8 ended the command with a traceback."""
    file = script.home / name
    file.write_text(json.dumps(LINE))
    assert script.run("submit", str(file)).exit_code == 0
    assert script.names == [sent]


def test_watch_shows_progress_and_ends_with_the_batch(script: GatewayScript) -> None:
    script.states = [document(), document(completed=1), 503, document("finalizing", 3), document("completed", 3)]
    done = script.run("submit", script.file(LINE), "--watch")
    assert (done.exit_code, done.stdout) == (0, f"{ID}\n")
    assert [line.partition(": ")[2] for line in done.stderr.splitlines()] == [
        f"{ID}: in_progress, 0/3 answered, 0 failed",
        f"{ID}: in_progress, 1/3 answered, 0 failed",
        f"{ID}: finalizing, 3/3 answered, 0 failed",
        f"{ID}: completed, 3/3 answered, 0 failed",
    ]


def test_watch_survives_a_call_that_hangs_longer_than_an_outage(
    script: GatewayScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]

    def sleep(_: float) -> None:
        seconds[0] += batch_commands.SILENCE_SECONDS

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: seconds[0])
    monkeypatch.setattr(batch_commands, "time", clock)
    monkeypatch.setattr(follow, "time", clock)
    script.states = [document(), 503, document("completed", 3)]
    assert script.run("submit", script.file(LINE), "--watch").exit_code == 0
    script.states = [document(), 503]
    assert script.run("submit", script.file(LINE), "--watch").exit_code == 1, "the second failure ends it"


def test_watched_batch_with_failed_lines_exits_with_code_1(script: GatewayScript) -> None:
    script.states = [document(), document("completed", completed=2, failed=1)]
    done = script.run("submit", script.file(LINE), "--watch", "-o", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["status"] == "completed"
    assert f"1 lines failed; `weft batch results {ID} --errors`" in done.stderr


def test_invalid_lines_are_listed(script: GatewayScript) -> None:
    errors = [{"line": number, "message": f"body.model: {number}", "code": "invalid"} for number in range(1, 13)]
    script.states = [document("failed", errors={"object": "list", "data": errors})]
    done = script.run("submit", script.file(LINE))
    assert done.exit_code == 1
    assert "line 1: body.model: 1" in done.stderr
    assert "and 2 more" in done.stderr


def test_file_without_an_endpoint_needs_the_option(script: GatewayScript) -> None:
    done = script.run("submit", script.file({"custom_id": "a"}))
    assert done.exit_code == 2
    assert "--endpoint" in done.stderr
    assert script.run("submit", script.file({"custom_id": "a"}), "--endpoint", "/v1/embeddings").exit_code == 0
    assert script.made[0]["endpoint"] == "/v1/embeddings"


@pytest.mark.parametrize(("name", "words"), [("none.jsonl", "No such file"), ("pipe", "is not a regular file")])
def test_missing_file_or_pipe_is_a_usage_error(script: GatewayScript, name: str, words: str) -> None:
    os.mkfifo(script.home / "pipe")
    done = script.run("submit", str(script.home / name))
    assert (done.exit_code, script.uploads) == (2, [])
    assert words in done.stderr


def test_batches_are_listed_across_pages(script: GatewayScript) -> None:
    done = script.run("list", "-o", "name")
    assert done.stdout.split() == [f"batch-{number}" for number in range(5)]
    assert [page.get("after") for page in script.pages] == [None, "batch-1", "batch-3"]
    assert script.run("list").stdout.split("\n")[0].split()[:3] == ["BATCH", "STATUS", "DONE"]


def test_results_go_to_stdout_or_to_a_file(script: GatewayScript) -> None:
    script.states = [document("completed", 3, output_file_id="file-out")]
    assert script.run("results", ID).stdout_bytes == ANSWERS
    to = script.home / "answers.jsonl"
    assert script.run("results", ID, "--to", str(to)).exit_code == 0
    assert to.read_bytes() == ANSWERS


def test_results_that_break_off_leave_an_existing_file_unchanged(script: GatewayScript) -> None:
    script.states = [document("completed", 3, output_file_id="file-cut")]
    folder = script.home / "results"
    folder.mkdir()
    to = folder / "answers.jsonl"
    to.write_bytes(b"earlier")
    done = script.run("results", ID, "--to", str(to))
    assert done.exit_code == 1
    assert "bytes missing" in done.stderr
    assert [(path, path.read_bytes()) for path in folder.iterdir()] == [(to, b"earlier")]


def test_results_go_into_a_pipe(script: GatewayScript) -> None:
    script.states = [document("completed", 3, output_file_id="file-out")]
    pipe = script.home / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDWR), "rb", buffering=0) as reader:
        assert script.run("results", ID, "--to", str(pipe)).exit_code == 0
        assert reader.read(len(ANSWERS)) == ANSWERS
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("state", "option", "code", "words"),
    [
        (document(), (), 4, f"weft batch get {ID} --watch"),
        (document("failed"), (), 2, f"`weft batch get {ID}` shows why"),
        (document("failed"), ("--errors",), 2, f"`weft batch get {ID}` shows why"),
        (document("completed", 3, output_file_id="file-out"), ("--errors",), 0, "no line failed"),
    ],
)
def test_results_that_do_not_exist_are_explained(
    script: GatewayScript, state: dict[str, Any], option: tuple[str, ...], code: int, words: str
) -> None:
    script.states = [state]
    done = script.run("results", ID, *option)
    assert (done.exit_code, done.stdout) == (code, "")
    assert words in done.stderr


def test_hint_for_a_missing_model_names_the_command_option(script: GatewayScript) -> None:
    """It named wait_for_model, the field of the API, which the command does not have."""
    said = unknown_field_target("qwn", ["qwen"], "body.model", FOR_TASKS).message
    error = {"line": 3, "message": said, "code": "model_not_found"}
    script.states = [document("failed", errors={"object": "list", "data": [error]})]
    done = script.run("get", ID)
    assert "did you mean qwen? (--wait-for-model accepts models that do not exist yet)" in done.stderr
    assert "wait_for_model" not in done.stderr
    assert said in script.run("get", ID, "-o", "json").stdout, "a document is as the API has it"


def test_cancel_reports_lines_already_answered(script: GatewayScript) -> None:
    script.states = [document("cancelling", 1)]
    assert script.run("cancel", ID).stdout == f"{ID}: cancelling, 1/3 answered\n"
    found = CliRunner().invoke(app, ["cancel", ID], env={"WEFT_HOME": str(script.home)})
    assert found.stdout == f"{ID}: cancelling, 1/3 answered\n"


def test_watched_batch_reports_why_its_results_cannot_be_written(script: GatewayScript) -> None:
    trouble = {"object": "list", "data": [{"message": "the tenant keeps all it may", "line": None}]}
    script.states = [document(), document("finalizing", 3, errors=trouble), document("completed", 3)]
    done = script.run("get", ID, "--watch")
    assert done.exit_code == 0
    assert "finalizing, 3/3 answered, 0 failed (the tenant keeps all it may)" in done.stderr


@pytest.mark.parametrize(("status", "deleted"), [(429, ["file-1"]), (400, ["file-1"]), (503, [])])
def test_uploaded_file_is_deleted_if_the_batch_was_rejected(
    script: GatewayScript, status: int, deleted: list[str]
) -> None:
    script.states = [status]
    assert script.run("submit", script.file(LINE)).exit_code != 0
    assert script.deleted == deleted


@pytest.mark.parametrize("batch_id", ["a/../../files", "..", "a?b", ""])
def test_batch_id_with_path_characters_is_a_usage_error(script: GatewayScript, batch_id: str) -> None:
    assert script.run("get", batch_id).exit_code == 2


def test_files_are_listed_with_sanitized_names(script: GatewayScript) -> None:
    listed = script.run("files", "--limit", "5")
    assert listed.exit_code == 0, listed.output
    assert listed.output.splitlines()[0].split() == ["FILE", "PURPOSE", "SIZE", "AGE", "NAME"]
    assert listed.output.splitlines()[1].split()[:4] == ["file-1", "batch", "2", "KiB"]
    assert "\x1b" not in listed.output
    assert script.pages == [{"limit": "5"}]


def test_file_is_deleted_by_id_and_a_missing_one_is_an_error(script: GatewayScript) -> None:
    assert script.run("delete-file", "file-1").output == "file-1 deleted\n"
    assert script.deleted == ["file-1"]
    refused = script.run("delete-file", "file-none")
    assert (refused.exit_code, "no such file" in refused.output) == (3, True), refused.output
    assert script.run("delete-file", "../batches").exit_code == 2
