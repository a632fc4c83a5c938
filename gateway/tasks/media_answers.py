"""Stored images, transcriptions and speech as the JSON of their APIs: with their content, or with signed URLs."""

import base64
from collections.abc import Callable, Iterable, Sequence

from gateway.answers.answer_builder import unfinished_answer
from gateway.deps import InferenceDeps
from gateway.openai import transcriptions
from gateway.openai.image_answer import ImageFacts, facts_of_request, images_document
from gateway.openai.image_schema import AUTO, ImageRequest
from gateway.tasks.media_requests import SpeechTask, TranscriptionTask
from weft.api.common.v1 import audio_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.frames import collected_images, collected_transcription
from weft.durable.media import filled, referring_part
from weft.kernel.channels.rpc import MAX_MESSAGE_BYTES
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.text.json_lines import encode_json

Outputs = Iterable[task_pb2.TaskOutput]
Link = Callable[[str], str]
"""Returns the signed URL of a result by the id of its file."""
_JSON = b"application/json"
_NO_FACTS = ImageFacts(count=1, size=AUTO, quality=AUTO, background=AUTO, output_format=AUTO)


def no_link(_file_id: str) -> str:
    """Raises UNSUPPORTED_OPERATION: this gateway signs no URLs."""
    raise WeftError(Reason.UNSUPPORTED_OPERATION, "this gateway cannot return result URLs")


async def with_content(
    deps: InferenceDeps, tenant: str, outputs: Sequence[task_pb2.TaskOutput], *, has_links: bool
) -> Sequence[task_pb2.TaskOutput]:
    """Returns stored outputs with the content of their images and recordings; unchanged if the answer has URLs.

    Raises NOT_FOUND if a result has expired.
    """
    refers = any(referring_part(event) is not None for output in outputs for event in output.events)
    if not refers or deps.files is None or (has_links and deps.links is not None):
        return outputs
    return await filled(deps.files, tenant, outputs, max_bytes=MAX_MESSAGE_BYTES)


def link_of(deps: InferenceDeps, base: str, tenant: str) -> Link:
    """Returns the function that signs URLs of a tenant's results; `base`: the gateway's URL for the caller."""
    links = deps.links
    return no_link if links is None else lambda file_id: links.link(base, tenant, file_id)


def image_answer(params: ImageRequest | None, task: task_pb2.Task, outputs: Outputs, link: Link) -> bytes:
    """Returns stored images. Raises BACKEND_PROTOCOL_ERROR if there are none."""
    events, receipt = _read(outputs)
    created = task.end_time.seconds or task.create_time.seconds
    facts = _NO_FACTS if params is None else facts_of_request(params)
    return encode_json(images_document(collected_images([events]), created, receipt.usage, facts, link))


def transcription_answer(
    params: TranscriptionTask | None,
    _task: task_pb2.Task,
    outputs: Outputs,
    _link: Link,
    *,
    translates: bool = False,
) -> bytes:
    """Returns a stored transcription; captions and plain text are in the member `text`."""
    events, receipt = _read(outputs)
    transcription = collected_transcription([events])
    if params is None:
        return encode_json({"text": transcription.text})
    body = transcriptions.transcription_body(
        transcription, params, receipt, params.timestamp_granularities or (), translates=translates
    )
    return body if transcriptions.media_type_of(params) == _JSON else encode_json({"text": body.decode()})


def speech_answer(_params: SpeechTask | None, _task: task_pb2.Task, outputs: Outputs, link: Link) -> bytes:
    """Returns stored speech. Raises BACKEND_PROTOCOL_ERROR for an empty recording."""
    events, _ = _read(outputs)
    spoken: list[audio_pb2.SpeechPart] = [event.speech for event in events if event.HasField("speech")]
    if not spoken:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model sent an empty recording")
    return encode_json({"media_type": spoken[0].media_type, **_content(spoken[0].data, spoken[0].file_id, link)})


def _content(data: bytes, file_id: str, link: Link) -> dict[str, object]:
    return {"url": link(file_id)} if file_id else {"b64_json": base64.b64encode(data).decode("ascii")}


def _read(outputs: Outputs) -> tuple[list[event_pb2.InferenceEvent], receipt_pb2.Receipt]:
    """Returns all events and the receipt. Raises BACKEND_PROTOCOL_ERROR if the end is missing."""
    events = [event for output in outputs for event in output.events]
    for event in events:
        if event.HasField("finished"):
            return events, event.finished.receipt
    raise unfinished_answer()
