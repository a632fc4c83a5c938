"""The frames of images and transcriptions on their way out of a runner."""

import pytest

from runner_svc.servicers import inference
from runner_svc.servicers.inference import WholeAnswerWriter
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame


def _progress(done: int) -> Frame:
    return [event_pb2.InferenceEvent(work_progress=event_pb2.WorkProgress(done=done, total=4))]


def _image(index: int, size: int = 1) -> Frame:
    image = image_pb2.GeneratedImage(index=index, image=chat_pb2.MediaPart(data=b"x" * size))
    return [event_pb2.InferenceEvent(image=image)]


END: Frame = [event_pb2.InferenceEvent(finished=event_pb2.Finished())]


class Written:
    def __init__(self) -> None:
        self.frames: list[Frame] = []

    async def write(self, frame: Frame) -> None:
        self.frames.append(frame)


async def test_whole_answer_is_held_until_its_end_and_its_progress_is_not() -> None:
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=True)
    for frame in (_progress(1), _image(0), _progress(2)):
        await writer.put(frame)
    assert written.frames == [_progress(1), _progress(2)]
    await writer.put(_image(1))
    await writer.put(END)
    assert written.frames[2:] == [_image(0), _image(1), END]


async def test_streamed_answer_is_not_held() -> None:
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=False)
    await writer.put(_image(0))
    assert written.frames == [_image(0)]


async def test_held_content_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "MAX_WHOLE_BYTES", 1000)
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=True)
    await writer.put(_image(0, 600))
    assert not written.frames
    await writer.put(_image(1, 600))
    assert written.frames == [_image(0, 600), _image(1, 600)]
    await writer.put(_image(2))
    await writer.put(END)
    assert written.frames[2:] == [_image(2), END]


async def test_end_that_arrives_with_the_last_content_is_sent() -> None:
    written = Written()
    writer = WholeAnswerWriter(written.write, whole=True)
    await writer.put(_image(0))
    await writer.put([*_image(1), *END])
    assert written.frames == [_image(0), [*_image(1), *END]]
