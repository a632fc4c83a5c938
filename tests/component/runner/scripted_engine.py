"""A host program with a scripted engine that works on two requests at once; a request's first prompt says what it does.

python scripted_engine.py SOCKET
"""

import sys
import threading
import time

from runner_svc.engine_host.engine import Job, RefusedError
from runner_svc.engine_host.host import serve
from runner_svc.engine_host.messages import Done, Generate, Ready, Token, Tokenize, Tokens, Work

SLOTS = 2
MEETING_SECONDS = 20.0


class ScriptedEngine:
    """See runner_svc.engine_host.engine.Engine."""

    def __init__(self) -> None:
        self.facts = Ready(context_tokens=64, slots=SLOTS)
        self._meeting = threading.Barrier(SLOTS)

    def work(self, request: Work, job: Job) -> None:
        assert isinstance(request, Generate)
        what, _, rest = str(request.prompts[0]).partition(" ")
        if what == "meet":
            # Nobody passes before two requests are here.
            self._meeting.wait(MEETING_SECONDS)
        elif what == "refuse":
            raise RefusedError("INVALID_ARGUMENT", rest)
        elif what == "fail":
            raise ValueError(rest)
        elif what == "count":
            for number in range(int(rest)):
                job.send(Token(request.id, 0, f"{number},"))
        elif what == "endless":
            while True:
                job.raise_if_cancelled()
                job.send(Token(request.id, 0, "."))
                time.sleep(0.01)
        job.send(Token(request.id, 0, "end", "stop"))
        job.send(Done(id=request.id, prompt_tokens=1))

    def tokenize(self, request: Tokenize, job: Job) -> None:
        job.send(Tokens(id=request.id, ids=list(range(int(request.text)))))
        job.send(Done(id=request.id, prompt_tokens=0))


if __name__ == "__main__":
    serve(sys.argv[1], lambda _: ScriptedEngine())
