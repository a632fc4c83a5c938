"""The text of a PDF over HTTP: what is returned, and which files are refused."""

import json
import signal
from pathlib import Path

import pytest
from gateway_script import RawResponse, serving
from kit.pdf_files import encrypted, pdf

from gateway.media import documents
from gateway.media.document_worker import extracted
from gateway.workbench import pdf_text

PDF = {"Content-Type": "application/pdf"}
FILE = pdf("The weft runs across.", "", "Caf\xe9 <b>x</b>")


async def asked(body: bytes, headers: dict[str, str] = PDF) -> RawResponse:
    async with serving() as gateway:
        return await gateway.request("POST", "/api/v1/pdf-text", body, headers=headers)


def refusal(answer: RawResponse) -> tuple[int, str]:
    return answer.status, json.loads(answer.body)["error"]["message"]


@pytest.mark.slow("starts the process that reads documents")
async def test_text_of_all_pages_is_returned_and_a_pdf_without_usable_text_refused() -> None:
    answer = await asked(FILE)
    assert answer.status == 200, answer.body
    assert json.loads(answer.body) == {"text": "The weft runs across.\n\n\n\nCaf\xe9 <b>x</b>", "pages": 3}
    status, message = refusal(await asked(encrypted(FILE, "secret")))
    assert status == 400
    assert message.startswith("the PDF is encrypted: remove its password"), message


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (encrypted(FILE, "secret"), "is encrypted: remove its password"),
        (FILE[:300], "is damaged: open it in a viewer"),
        (b"no PDF", "is damaged"),
        (b"", "is damaged"),
        (pdf("", ""), "has no text, only images: recognize its text"),
        (pdf(*[""] * 501), "has 501 pages, more than 500: attach only the pages"),
    ],
    ids=["encrypted", "cut", "other", "empty", "images", "pages"],
)
def test_pdf_without_usable_text_is_refused_with_the_next_step(file: bytes, words: str) -> None:
    assert str(extracted(file)["error"]).startswith(words)


def test_empty_password_is_tried() -> None:
    assert extracted(encrypted(FILE, ""))["pages"] == 3


def test_text_above_the_limit_is_refused() -> None:
    assert "more than 20 characters" in str(extracted(FILE, max_chars=20)["error"])


async def test_body_must_be_a_pdf_within_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(await asked(FILE, {"Content-Type": "text/plain"})) == (
        400,
        "the Content-Type must be application/pdf",
    )
    monkeypatch.setattr(pdf_text, "MAX_BYTES", 100)
    assert refusal(await asked(FILE)) == (413, "the body is larger than 100 bytes")


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        ("time.sleep(60)", 400, "takes too long to read"),
        (f"os.kill(os.getpid(), {signal.SIGPROF})", 400, "takes too long to read"),
        ("sys.exit(3)", 500, ""),
    ],
    ids=["wall", "processor", "failure"],
)
async def test_reader_that_does_not_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, end: str, status: int, words: str
) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(f"import os, sys, time\n{end}\n")
    monkeypatch.setattr(documents, "_WORKER", str(worker))
    monkeypatch.setattr(documents, "WALL_SECONDS", 0.3)
    found, message = refusal(await asked(FILE))
    assert found == status
    assert words in message


async def test_one_more_pdf_than_are_read_concurrently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.app.MAX_PDFS", 0)
    assert refusal(await asked(FILE)) == (429, "0 PDFs are being read already; try again")
