"""The selector of services: it returns what Python's own does."""

import os
import selectors
import socket
import sys
from contextlib import closing

import pytest

if sys.platform == "linux":
    from weft_app.cli.serving import _LeanSelector as Selector
else:
    pytest.skip("the default selector serves there", allow_module_level=True)


def test_events_are_those_of_the_default_selector() -> None:
    found = []
    for kind in (selectors.EpollSelector, Selector):
        (here, there), (reader, writer) = socket.socketpair(), os.pipe()
        with closing(kind()) as selector, here, there:
            selector.register(here, selectors.EVENT_READ | selectors.EVENT_WRITE, "both")
            selector.register(reader, selectors.EVENT_READ, "reader")
            selector.register(writer, selectors.EVENT_WRITE, "writer")
            seen = [selector.select(0)]
            there.send(b"text")
            seen.append(selector.select(None))
            os.close(reader)
            there.close()
            seen.append(selector.select(0.001))
            selector.unregister(here)
            os.close(writer)
            seen.append(selector.select(0.001))
            found.append([{(key.data, events & key.events) for key, events in each} for each in seen])
    assert found[0] == found[1]
    assert found[0] == [
        {("both", 2), ("writer", 2)},
        {("both", 3), ("writer", 2)},
        {("both", 3), ("writer", 2)},
        set(),
    ]
