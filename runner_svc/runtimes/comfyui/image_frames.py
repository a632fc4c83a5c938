"""Converts ComfyUI's messages about a prompt to frames: steps, and previews at equal intervals. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from runner_svc.runtimes.comfyui.messages import Preview, Progress
from weft.api.common.v1 import chat_pb2, event_pb2, image_pb2
from weft.dispatch.frames import Frame
from weft.dispatch.workflow_graph import expected_steps


@dataclass(slots=True, kw_only=True)
class StepCounter:
    """Counts the steps of all images in a request."""

    image_count: int
    previews_per_image: int
    _done_before: int = 0
    """Steps of completed images."""
    _expected: int = 0
    """Steps of the current image according to its graph; 0: unknown."""
    _samplers: frozenset[str] = frozenset()
    _nodes: dict[str, Progress] = field(default_factory=dict)
    _previews: int = 0
    _index: int = 0

    def begin(self, graph: Mapping[str, Any], index: int) -> None:
        """Starts counting the steps of another image."""
        self._done_before += self._done
        self._expected = expected_steps(dict(graph))
        self._samplers = frozenset(node for node, each in graph.items() if "steps" in each["inputs"])
        self._nodes.clear()
        self._previews, self._index = 0, index

    @property
    def _done(self) -> int:
        return sum(each.done for each in self._nodes.values())

    @property
    def _total(self) -> int:
        return max(self._expected, sum(each.total for each in self._nodes.values()))

    @property
    def steps(self) -> int:
        """Completed steps of all images."""
        return self._done_before + self._done

    def waiting(self, stage: str) -> Frame:
        """Returns the frame for a waiting prompt."""
        return [self._event(stage)]

    def note(self, progress: Progress) -> Frame:
        """Returns the frame for progress; empty: the node is not a sampler, such as a decoder."""
        if self._samplers and progress.node not in self._samplers:
            return []
        self._nodes[progress.node] = progress
        return [self._event("")]

    def preview(self, preview: Preview) -> Frame:
        """Returns the frame for a preview; empty: none is due."""
        due = self._total * (self._previews + 1) <= self._done * (self.previews_per_image + 1)
        if self._previews >= self.previews_per_image or not self._done or not due or self._done >= self._total:
            return []
        part = chat_pb2.MediaPart(media_type=preview.media_type, data=preview.data)
        partial = image_pb2.PartialImage(index=self._index, partial_index=self._previews, image=part)
        self._previews += 1
        return [event_pb2.InferenceEvent(partial_image=partial)]

    def _event(self, stage: str) -> event_pb2.InferenceEvent:
        progress = event_pb2.WorkProgress(
            unit=event_pb2.WORK_UNIT_STEPS,
            done=self.steps,
            total=self._done_before + self._total * (self.image_count - self._index),
            stage=stage,
        )
        return event_pb2.InferenceEvent(work_progress=progress)
