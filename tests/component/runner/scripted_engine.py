"""A host program with a scripted engine that works on two requests at once; the text of a request says what it does.

python scripted_engine.py SOCKET
"""

import sys
import threading
import time

from runner_svc.engine_host.engine import Job, RefusedError
from runner_svc.engine_host.host import serve
from runner_svc.engine_host.messages import Done, Ready, Sound, Speak, Work

SLOTS = 2
MEETING_SECONDS = 20.0


class ScriptedEngine:
    """See runner_svc.engine_host.engine.Engine."""

    def __init__(self) -> None:
        self.facts = Ready(slots=SLOTS)
        self._meeting = threading.Barrier(SLOTS)

    def work(self, request: Work, job: Job) -> None:
        assert isinstance(request, Speak)
        what, _, rest = request.text.partition(" ")
        if what == "meet":
            # Nobody passes before two requests are here.
            self._meeting.wait(MEETING_SECONDS)
        elif what == "refuse":
            raise RefusedError("INVALID_ARGUMENT", rest)
        elif what == "fail":
            raise ValueError(rest)
        elif what == "count":
            for number in range(int(rest)):
                job.send(_sound(request, f"{number},"))
        elif what == "endless":
            while True:
                job.raise_if_cancelled()
                job.send(_sound(request, "."))
                time.sleep(0.01)
        job.send(_sound(request, "end"))
        job.send(Done(id=request.id))


def _sound(request: Speak, text: str) -> Sound:
    return Sound(id=request.id, data=text.encode(), media_type="text/plain")


if __name__ == "__main__":
    serve(sys.argv[1], lambda _: ScriptedEngine())
