"""Images, transcriptions and speech as tasks: their answers have the content, or signed URLs in its place."""

import base64
from functools import partial
from typing import Any

from gateway.answers.answer_builder import unfinished_answer, with_warnings
from gateway.openai.extension_fields import unknown_fields
from gateway.tasks.result_content import Link, no_link
from gateway.tasks.task_apis import Outputs, StoredRequest, TaskApi
from weft.api.common.v1 import audio_pb2, event_pb2, receipt_pb2
from weft.api.router.v1 import task_pb2
from weft.dispatch.frames import collected_images, collected_transcription
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.request_values import Operation
from weft.kernel.text.json_lines import encode_json
from weft_extensions.media import task_requests, transcriptions
from weft_extensions.media.image_answer import ImageFacts, facts_of_request, images_document
from weft_extensions.media.image_schema import AUTO, ImageRequest
from weft_extensions.media.task_requests import ImageEditTask, SpeechTask, TranscriptionTask

_JSON = b"application/json"
_NO_FACTS = ImageFacts(count=1, size=AUTO, quality=AUTO, background=AUTO, output_format=AUTO)


def _images(task: task_pb2.Task, outputs: Outputs, facts: ImageFacts, link: Link) -> bytes:
    events, receipt = _read(outputs)
    created = task.end_time.seconds or task.create_time.seconds
    return encode_json(images_document(collected_images([events]), created, receipt.usage, facts, link))


def _image_answer(stored: StoredRequest[ImageRequest]) -> bytes:
    body = _images(stored.task, stored.outputs, facts_of_request(stored.params), stored.link)
    return with_warnings(body, unknown_fields(stored.params))


def _answer_of_image(_payload: Any, task: task_pb2.Task, outputs: Outputs) -> bytes:
    return _images(task, outputs, _NO_FACTS, no_link)


def _transcription_answer(stored: StoredRequest[TranscriptionTask], *, translates: bool) -> bytes:
    """Captions and plain text are in the member `text`."""
    events, receipt = _read(stored.outputs)
    params, granularities = stored.params, stored.params.timestamp_granularities or ()
    transcription = collected_transcription([events])
    body = transcriptions.transcription_body(transcription, params, receipt, granularities, translates=translates)
    if transcriptions.media_type_of(params) != _JSON:
        body = encode_json({"text": body.decode()})
    return with_warnings(body, unknown_fields(params))


def _answer_of_transcription(_payload: Any, _task: task_pb2.Task, outputs: Outputs) -> bytes:
    return encode_json({"text": collected_transcription([_read(outputs)[0]]).text})


def _recording(outputs: Outputs, link: Link) -> bytes:
    """Raises BACKEND_PROTOCOL_ERROR for an empty recording."""
    events, _ = _read(outputs)
    spoken: list[audio_pb2.SpeechPart] = [event.speech for event in events if event.HasField("speech")]
    if not spoken:
        raise WeftError(Reason.BACKEND_PROTOCOL_ERROR, "the model sent an empty recording")
    first = spoken[0]
    content = {"url": link(first.file_id)} if first.file_id else {"b64_json": base64.b64encode(first.data).decode()}
    return encode_json({"media_type": first.media_type, **content})


def _speech_answer(stored: StoredRequest[SpeechTask]) -> bytes:
    return with_warnings(_recording(stored.outputs, stored.link), unknown_fields(stored.params))


def _answer_of_speech(_payload: Any, _task: task_pb2.Task, outputs: Outputs) -> bytes:
    return _recording(outputs, no_link)


def _read(outputs: Outputs) -> tuple[list[event_pb2.InferenceEvent], receipt_pb2.Receipt]:
    """Returns all events and the receipt. Raises BACKEND_PROTOCOL_ERROR if the end is missing."""
    events = [event for output in outputs for event in output.events]
    for event in events:
        if event.HasField("finished"):
            return events, event.finished.receipt
    raise unfinished_answer()


IMAGES = TaskApi(
    operation=Operation.IMAGE,
    schema=ImageRequest,
    to_payload=task_requests.image_payload,
    to_answer=_image_answer,
    of_payload=_answer_of_image,
)
IMAGE_EDITS = TaskApi(
    operation=Operation.IMAGE,
    schema=ImageEditTask,
    to_payload=task_requests.edit_payload,
    to_answer=_image_answer,
    to_origin=task_requests.without_files,
)
TRANSCRIPTIONS = TaskApi(
    operation=Operation.TRANSCRIPTION,
    schema=TranscriptionTask,
    to_payload=partial(task_requests.transcription_payload, translates=False),
    to_answer=partial(_transcription_answer, translates=False),
    of_payload=_answer_of_transcription,
    to_origin=task_requests.without_files,
)
TRANSLATIONS = TaskApi(
    operation=Operation.TRANSCRIPTION,
    schema=TranscriptionTask,
    to_payload=partial(task_requests.transcription_payload, translates=True),
    to_answer=partial(_transcription_answer, translates=True),
    to_origin=task_requests.without_files,
)
SPEECH = TaskApi(
    operation=Operation.SPEECH,
    schema=SpeechTask,
    to_payload=task_requests.speech_payload,
    to_answer=_speech_answer,
    of_payload=_answer_of_speech,
)
