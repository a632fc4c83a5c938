"""The picture of the routing table."""

from xml.etree import ElementTree as ET

from routing_picture import PICTURE, RESULTS, picture


def test_picture_shows_the_recorded_results() -> None:
    assert PICTURE.read_text() == picture(RESULTS.read_text()), "`make docs` draws it again"


def test_picture_has_a_bar_for_each_router_and_workload() -> None:
    bars = [each for each in ET.parse(PICTURE).iter() if each.get("class") in {"weft", "other"}]
    assert len(bars) == 3 * 8
    assert all(float(bar.get("width", "0")) > 0 for bar in bars)
