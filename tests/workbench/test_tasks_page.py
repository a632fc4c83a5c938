"""The pages of durable work in a real browser: tasks, batches and their files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest
from kit.waiting import wait_until
from mesh_process import MeshProcess, fake_runner, running_mesh, write_config
from pages import accessibility_faults, finished, opened, picture

from weft_testing.free_port import free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.workbench, pytest.mark.timeout(180)]

CHAT = "/v1/chat/completions"
MAX_FILE_BYTES = 4096
ANSWER_TOKENS = 8


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshProcess]:
    """A mesh whose files are small; one slot, so that a slow answer holds up all others."""
    folder = tmp_path_factory.mktemp("tasks")
    gateway = {"batches": {"max_file_bytes": MAX_FILE_BYTES}}
    config = write_config(folder, fake_runner("a", slots=1, answer_tokens=ANSWER_TOKENS), gateway=gateway)
    with running_mesh(folder / "home", "--config", str(config)) as mesh:
        yield mesh


@pytest.fixture
def slow(mesh: MeshProcess) -> Iterator[None]:
    """Answers take minutes until the test ends."""
    finished(behave(mesh, tokens_per_second=4.0, answer_tokens=1000))
    yield
    finished(behave(mesh, tokens_per_second=0.0, answer_tokens=ANSWER_TOKENS))


async def behave(mesh: MeshProcess, **switches: Any) -> None:
    async with await mesh.backend("a") as backend:
        await backend.set_behaviour(**switches)


def posted(mesh: MeshProcess, path: str, body: object) -> Any:
    request = Request(
        mesh.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urlopen(request) as answer:
        return json.load(answer)


def submitted(mesh: MeshProcess) -> str:
    body = {"model": "pool", "body": {"messages": [{"role": "user", "content": "Hello"}]}}
    return str(posted(mesh, "/api/v1/inference-tasks", body)["id"])


def line(custom_id: str, model: str = "pool", **fields: object) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": custom_id}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **fields})


def requests_file(folder: Path, *lines: str, name: str = "requests.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def test_submitted_task_shows_answer_attempt_and_journal(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "tasks", "Tasks")
    page.get_by_role("button", name="New task").click()
    form = page.get_by_role("dialog", name="New task")
    form.get_by_role("combobox", name="Model").fill("pool")
    form.get_by_label("Text").fill("Hello")
    form.get_by_label("Further fields").fill('{"max_tokens": 4}')
    picture(page, "tasks-new")
    form.get_by_role("button", name="Submit").click()
    page.get_by_role("group", name="Answer").get_by_text("tok0 tok1 tok2 tok3", exact=True).wait_for()
    page.get_by_role("table", name="Attempts").get_by_role("cell").first.wait_for()
    page.get_by_text("Journal").click()
    page.get_by_role("table", name="Journal").get_by_role("cell", name="completed", exact=True).first.wait_for()
    picture(page, "task")


def test_ended_task_shows_its_event_with_the_attempts_to_deliver_it(page: "Page", mesh: MeshProcess) -> None:
    webhook = {"url": f"http://127.0.0.1:{free_port()}/", "secretRef": "secret/hooks"}
    tenant = json.dumps({"kind": "tenant", "name": "default", "webhook": webhook})
    finished(mesh.weft("keys", "secret", "create", "hooks", "-", stdin=f"whsec_{'A' * 32}"))
    finished(mesh.weft("apply", "-f", "-", stdin=tenant))
    task = submitted(mesh)
    wait_until(lambda: "connect_failed" in finished(mesh.weft("describe", "task", task)))
    opened(page, mesh, f"tasks/{task}", task)
    page.get_by_text("task.completed").wait_for()
    page.get_by_role("table", name="Webhook attempts").get_by_role("cell", name="connect_failed").wait_for()
    picture(page, "task-webhook")
    finished(mesh.weft("delete", "tenant", "default"))


@pytest.mark.usefixtures("slow")
def test_answer_streams_and_remains_when_the_task_is_cancelled(page: "Page", mesh: MeshProcess) -> None:
    task = submitted(mesh)
    opened(page, mesh, f"tasks/{task}", task)
    page.get_by_role("group", name="Answer").get_by_text("tok0").wait_for()
    picture(page, "task-running")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("main").get_by_text("cancelled", exact=True).first.wait_for()
    page.get_by_role("button", name="Delete").wait_for()


def test_ended_task_is_deleted_after_confirmation(page: "Page", mesh: MeshProcess) -> None:
    task = submitted(mesh)
    opened(page, mesh, f"tasks/{task}", task)
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog", name="Delete this task?").get_by_role("button", name="Delete").click()
    page.get_by_role("heading", level=1, name="Tasks").wait_for()
    page.get_by_role("button", name="New task").wait_for()
    assert page.get_by_role("link", name=task).count() == 0


def test_unknown_model_shows_the_server_error_and_can_be_accepted(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "tasks", "Tasks")
    page.get_by_role("button", name="New task").click()
    form = page.get_by_role("dialog", name="New task")
    form.get_by_role("combobox", name="Model").fill("later")
    form.get_by_label("Text").fill("Hello")
    form.get_by_role("button", name="Submit").click()
    form.get_by_role("alert").get_by_text("later").wait_for()
    form.get_by_label("Accept a model that the mesh does not have yet").check()
    form.get_by_role("button", name="Submit").click()
    page.get_by_text("Waiting:").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Delete").wait_for()


def test_tasks_are_listed_in_pages_and_by_state(page: "Page", mesh: MeshProcess) -> None:
    tasks = [submitted(mesh) for _ in range(3)]
    page.route(
        re.compile(r"/api/v1/inference-tasks\?"),
        lambda route: route.continue_(url=route.request.url.replace("=100", "=2")),
    )
    opened(page, mesh, "tasks", "Tasks")
    page.get_by_role("link", name=tasks[2]).wait_for()
    page.get_by_role("button", name="Show more").click()
    page.get_by_role("link", name=tasks[0]).wait_for()
    page.get_by_label("State").select_option("cancelled")
    page.get_by_role("link", name=tasks[0]).wait_for(state="detached")
    assert page.url.endswith("?state=cancelled")


def test_task_submitted_elsewhere_is_listed_and_updates_live(page: "Page", mesh: MeshProcess) -> None:
    opened(page, mesh, "tasks", "Tasks")
    page.get_by_role("banner").get_by_text("live", exact=True).wait_for()
    finished(behave(mesh, tokens_per_second=4.0, answer_tokens=1000))
    try:
        task = submitted(mesh)
        row = page.get_by_role("row").filter(has_text=task)
        row.get_by_text("running", exact=True).wait_for()
        posted(mesh, f"/api/v1/inference-tasks/{task}/cancel", {})
        row.get_by_text("cancelled", exact=True).wait_for()
    finally:
        finished(behave(mesh, tokens_per_second=0.0, answer_tokens=ANSWER_TOKENS))
    picture(page, "tasks")


def test_batch_is_validated_submitted_followed_and_its_results_saved(
    page: "Page", mesh: MeshProcess, tmp_path: Path
) -> None:
    path = requests_file(tmp_path, *(line(f"r{number}") for number in range(3)))
    opened(page, mesh, "tasks/batches", "Tasks")
    page.get_by_role("button", name="New batch").click()
    form = page.get_by_role("dialog", name="New batch")
    form.get_by_label("File with one request per line").set_input_files(path)
    form.get_by_text(f"3 requests for {CHAT}").wait_for()
    form.get_by_label("Metadata").fill("team=search")
    picture(page, "batch-new")
    form.get_by_role("button", name="Start").click()
    page.get_by_role("table", name="Results").get_by_role("cell", name="r2", exact=True).wait_for()
    page.get_by_text("3 / 3").wait_for()
    page.get_by_text("search", exact=True).wait_for()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download").click()
    found = [json.loads(text) for text in saved.value.path().read_text().splitlines()]
    assert [each["custom_id"] for each in found] == ["r0", "r1", "r2"]
    picture(page, "batch")
    page.get_by_role("link", name="Batches").click()
    page.get_by_role("table", name="Batches").get_by_text("completed").first.wait_for()
    picture(page, "batches")


@pytest.mark.usefixtures("slow")
def test_batch_shows_its_progress_and_can_be_cancelled(page: "Page", mesh: MeshProcess, tmp_path: Path) -> None:
    path = requests_file(tmp_path, line("x"), line("y"))
    opened(page, mesh, "tasks/batches", "Tasks")
    page.get_by_role("button", name="New batch").click()
    form = page.get_by_role("dialog", name="New batch")
    form.get_by_label("File with one request per line").set_input_files(path)
    form.get_by_role("button", name="Start").click()
    page.get_by_text("0 / 2").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("main").get_by_text("cancelled", exact=True).first.wait_for()


def test_invalid_lines_are_listed_before_upload(page: "Page", mesh: MeshProcess, tmp_path: Path) -> None:
    wrong = requests_file(
        tmp_path, line("a"), "{not json", line("a"), line("b", method="GET"), "", line("c", url="/v1/other"), "[]",
        line("d", body={"messages": []}), json.dumps({"custom_id": 7}),
    )  # fmt: skip
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    opened(page, mesh, "tasks/files", "Tasks")
    page.get_by_role("button", name="Upload").click()
    form = page.get_by_role("dialog", name="Upload a file of requests")
    form.get_by_label("File with one request per line").set_input_files(wrong)
    found = form.get_by_role("list", name="Errors").get_by_role("listitem")
    form.get_by_text("A batch of this file would be refused").wait_for()
    texts = found.all_text_contents()
    for number, words in (
        (2, "not valid JSON"), (3, "another line of this file has the same one"), (4, "method: must be 'POST'"),
        (6, "url: must be one of"), (7, "must be a JSON object"), (8, "body.model: is required"),
        (9, "custom_id: must be a text"), (9, "method: is required"), (9, "url: is required"), (9, "body: is required"),
    ):  # fmt: skip
        assert any(text.startswith(f"line {number}: ") and words in text for text in texts), (number, words, texts)
    assert len(texts) == 10
    assert form.get_by_role("button", name="Upload").is_disabled()
    assert not sent
    picture(page, "files-wrong-lines")
    with page.expect_file_chooser() as chosen:
        form.get_by_label("File with one request per line").click()
    chosen.value.set_files(requests_file(tmp_path, line("a")))
    form.get_by_text(f"1 request for {CHAT}").wait_for()
    assert form.get_by_role("button", name="Upload").is_enabled()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "the file has no requests"), (b"\n \n", "the file has no requests"), (b'"\xff"\n', "not text in UTF-8")],
)
def test_file_without_requests_is_rejected_before_upload(
    page: "Page", mesh: MeshProcess, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(content)
    opened(page, mesh, "tasks/files", "Tasks")
    page.get_by_role("button", name="Upload").click()
    form = page.get_by_role("dialog")
    form.get_by_label("File with one request per line").set_input_files(path)
    form.get_by_role("listitem").get_by_text(words).wait_for()


def test_file_can_be_uploaded_downloaded_used_and_deleted(page: "Page", mesh: MeshProcess, tmp_path: Path) -> None:
    path = requests_file(tmp_path, line("u1"), name="mine <b>.jsonl")
    opened(page, mesh, "tasks/files", "Tasks")
    page.get_by_role("button", name="Upload").click()
    form = page.get_by_role("dialog")
    form.get_by_label("File with one request per line").set_input_files(path)
    form.get_by_role("button", name="Upload").click()
    row = page.get_by_role("row").filter(has_text=path.name)
    row.wait_for()
    with page.expect_download() as saved:
        row.get_by_role("button", name="Download").click()
    assert saved.value.path().read_bytes() == path.read_bytes()
    picture(page, "files")
    row.get_by_role("link", name="Start a batch").click()
    page.get_by_role("dialog", name="New batch").get_by_role("button", name="Start").click()
    page.get_by_role("table", name="Results").get_by_role("cell", name="u1", exact=True).wait_for()
    opened(page, mesh, "tasks/files", "Tasks")
    row.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog", name="Delete this file?").get_by_role("button", name="Delete").click()
    row.wait_for(state="detached")


@pytest.mark.parametrize(
    ("lines", "words"), [(60, f"the file is larger than {MAX_FILE_BYTES} bytes"), (20_000, "the body is larger than")]
)
def test_file_over_the_limit_shows_the_server_error(
    page: "Page", mesh: MeshProcess, tmp_path: Path, lines: int, words: str
) -> None:
    path = requests_file(tmp_path, *(line(f"r{number}") for number in range(lines)))
    assert path.stat().st_size > MAX_FILE_BYTES
    opened(page, mesh, "tasks/files", "Tasks")
    page.get_by_role("button", name="Upload").click()
    form = page.get_by_role("dialog")
    form.get_by_label("File with one request per line").set_input_files(path)
    form.get_by_role("button", name="Upload").click()
    form.get_by_text(words).wait_for()
    picture(page, "files-too-large")


def test_lines_rejected_by_the_server_are_shown_with_the_batch(page: "Page", mesh: MeshProcess, tmp_path: Path) -> None:
    path = requests_file(tmp_path, line("ok"), line("no", model="no-such-model"))
    opened(page, mesh, "tasks/batches", "Tasks")
    page.get_by_role("button", name="New batch").click()
    form = page.get_by_role("dialog", name="New batch")
    form.get_by_label("File with one request per line").set_input_files(path)
    form.get_by_role("button", name="Start").click()
    errors = page.get_by_role("table", name="Errors")
    errors.get_by_role("cell", name="model_not_found").wait_for()
    assert errors.get_by_role("cell", name="2", exact=True).count() == 1
    picture(page, "batch-failed")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", ["tasks", "tasks/batches", "tasks/files"])
def test_lists_have_no_accessibility_violations(browser: "Browser", mesh: MeshProcess, path: str, theme: str) -> None:
    submitted(mesh)
    assert not accessibility_faults(browser, f"{mesh.url}/ui/{path}", theme=theme)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_task_page_has_no_accessibility_violations(browser: "Browser", mesh: MeshProcess, theme: str) -> None:
    assert not accessibility_faults(browser, f"{mesh.url}/ui/tasks/{submitted(mesh)}", theme=theme)
