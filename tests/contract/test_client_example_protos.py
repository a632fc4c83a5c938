"""The protos of Google that lie beside the example clients, as those clients' languages do not bring them."""

from importlib.resources import files
from pathlib import Path

import pytest

COPIES = Path(__file__).parents[2] / "examples" / "clients" / "protos"


@pytest.mark.parametrize("path", sorted(str(copy.relative_to(COPIES)) for copy in COPIES.rglob("*.proto")))
def test_example_proto_matches_the_packaged_file(path: str) -> None:
    assert (COPIES / path).read_text() == files("google").joinpath(path.removeprefix("google/")).read_text()


def test_error_detail_protos_are_included() -> None:
    assert {copy.stem for copy in COPIES.rglob("*.proto")} == {"status", "error_details"}
