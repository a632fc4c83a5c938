"""The page of clients tells of those that are pinned, and of what they try."""

import re

import pytest
from client_catalogue import CLIENTS, Client
from client_environments import FOLDER
from clients_page import PAGE, render, results_of


def test_page_matches_the_generated_results() -> None:
    page = PAGE.read_text()
    assert page == render(results_of(page)), "run make test-clients: clients, versions or what they try have changed"


def test_page_has_a_result_for_every_client() -> None:
    results = results_of(PAGE.read_text())
    assert results.keys() == {client.name for client in CLIENTS}
    assert all(results.values())


def test_client_count_meets_the_promised_minimum() -> None:
    assert len(CLIENTS) >= 15


OTHERS = {"phoenix"}
"""Pinned programs that are no clients: a mesh sends its spans to Phoenix."""


def test_every_folder_with_pins_is_a_client() -> None:
    pinned = {
        path.parent.name for pins in ("requirements.txt", "package-lock.json") for path in FOLDER.glob(f"*/{pins}")
    }
    assert pinned - OTHERS == {client.name for client in CLIENTS}


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_every_client_package_is_pinned_exactly(client: Client) -> None:
    pins = FOLDER / client.name / "requirements.txt"
    if pins.exists():
        lines = [line for line in pins.read_text().splitlines() if line and not line.startswith("#")]
        assert all(re.match(r"[A-Za-z0-9._-]+(\[[^]]*\])?==\S+", line) for line in lines)
    else:
        declared = (FOLDER / client.name / "package.json").read_text()
        assert re.findall(r'"[^"]+": "\d+\.\d+\.\d+"', declared)
        assert not re.findall(r'": "[\^~><*]', declared)
