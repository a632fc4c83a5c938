"""The line with which a server announces its port."""

import pytest
from kit.presence import present

from runner_svc.runtimes.started_server import LISTENING


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("listening on http://127.0.0.1:41045", "41045"),
        ("0.00.766.016 I srv          init: listening on http://127.0.0.1:18099", "18099"),
        ("main: server is listening on http://127.0.0.1:8080 - starting the main loop", "8080"),
        ("main: HTTP server is listening, hostname: 127.0.0.1, port: 8081, http threads: 5", "8081"),
        ("listening on http://127.0.0.1:41045listening on http://127.0.0.1:41045", "41045"),
    ],
)
def test_port_is_found_in_the_output_of_every_server(line: str, port: str) -> None:
    found = present(LISTENING.search(line))
    assert port in found.groups()


def test_log_line_joined_to_the_port_is_not_parsed_as_another_port() -> None:
    """Observed: two writers on one pipe made 127.0.0.1:410450.00.766."""
    assert LISTENING.search("listening on http://127.0.0.1:410450.00.766.016 I srv") is None
