"""The work on images and recordings, in words."""

from weft.api.common.v1.receipt_pb2 import OUTCOME_COMPLETED, Attempt, Receipt
from weft.api.common.v1.usage_pb2 import Usage
from weft.api.router.v1.usage_pb2 import UsageCounts, UsageRow
from weft.api.router.v1.usage_service_pb2 import ListUsageResponse
from weft.documents.codec import document_of
from weft_app.cli.chat import timings
from weft_app.cli.explain import receipt_lines, work_parts
from weft_app.cli.usage import csv_text, table_text


def _receipt(usage: Usage) -> Receipt:
    attempts = [Attempt(runner="r1", model="sdxl")]
    return Receipt(outcome=OUTCOME_COMPLETED, attempts=attempts, host="h", model="sdxl", usage=usage)


def test_image_usage_has_steps_and_megapixels() -> None:
    assert work_parts(document_of(Usage(image_steps=1, image_pixels=1_048_576))) == ["1 step", "1.05 megapixels"]


def test_recording_usage_has_its_length() -> None:
    assert work_parts(document_of(Usage(audio_milliseconds=12_400))) == ["12.4 s of audio"]


def test_image_receipt_shows_work_and_no_tokens() -> None:
    text = "\n".join(receipt_lines(document_of(_receipt(Usage(image_steps=20, image_pixels=262_144))), "req"))
    assert "20 steps, 0.262 megapixels" in text
    assert "Tokens" not in text


def test_receipt_of_a_chat_with_a_recording_shows_tokens_and_length() -> None:
    text = "\n".join(
        receipt_lines(document_of(_receipt(Usage(prompt_tokens=7, completion_tokens=2, audio_milliseconds=500))), "req")
    )
    assert "7 in, 2 out" in text
    assert "0.5 s of audio" in text


def test_chat_receipt_has_no_work_line() -> None:
    assert "Work" not in "\n".join(
        receipt_lines(document_of(_receipt(Usage(prompt_tokens=7, completion_tokens=2))), "req")
    )


def test_line_after_an_answer_shows_the_work() -> None:
    assert timings(_receipt(Usage(image_steps=20))).startswith("20 steps, ")
    assert timings(_receipt(Usage())).startswith("0 + 0 tokens, ")


def test_usage_has_work_in_wide_tables_and_csv() -> None:
    counts = UsageCounts(completed_count=1, image_steps=40, image_pixels=2_097_152, audio_milliseconds=1_500)
    found = document_of(ListUsageResponse(rows=[UsageRow(tenant="ann", counts=counts)]))
    title, row = table_text(found, ["tenant"], is_wide=True).splitlines()[:2]
    assert "IMAGE STEPS  MEGAPIXELS  AUDIO SECONDS" in title
    assert {"40", "2.10", "1.5"} <= set(row.split())
    assert "MEGAPIXELS" not in table_text(found, ["tenant"])
    assert csv_text(found, ["tenant"]).splitlines()[1].endswith("40,2097152,1500,,0,")
