"""Environments of clients are made once, by one test session at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import client_environments
import pytest
from client_environments import EnvironmentFactory

WAIT_SECONDS = 30.0


def test_concurrent_sessions_share_one_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installs, has_begun, may_end = list[Path](), threading.Event(), threading.Event()
    two_install = threading.Event()

    def install(_: EnvironmentFactory, folder: Path, *_more: object) -> None:
        installs.append(folder)
        if len(installs) > 1:
            two_install.set()
        has_begun.set()
        assert may_end.wait(WAIT_SECONDS)
        (folder / "program").touch()

    monkeypatch.setattr(EnvironmentFactory, "_tool_environment", lambda *_: None)
    monkeypatch.setattr(EnvironmentFactory, "_virtual_environment", install)
    client = next(path.parent.name for path in client_environments.FOLDER.glob("*/requirements.txt"))
    sessions = [EnvironmentFactory(tmp_path / "cache") for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sessions[0].get, client)
        assert has_begun.wait(WAIT_SECONDS)
        second = pool.submit(sessions[1].get, client)
        # Without a lock the second session empties the folder of the first, and begins as well.
        assert not two_install.wait(0.5)
        may_end.set()
        folder = first.result(WAIT_SECONDS).folder
        assert second.result(WAIT_SECONDS).folder == folder
    assert installs == [folder]
    assert (folder / "program").exists()
    for session in sessions:
        session.close()
