"""What `weft explain` and `weft get clients` show of device time and energy."""

import pytest

from weft.api.common.v1.receipt_pb2 import DeviceUsage, Receipt
from weft.api.router.v1.request_pb2 import ClientRecord
from weft.documents.codec import document_of
from weft_app.cli.explain import receipt_lines
from weft_app.cli.output import TextTable
from weft_app.cli.records import CLIENTS


def _shown(receipt: Receipt) -> list[str]:
    lines = receipt_lines(document_of(receipt), "req-1")
    return [line.split(":", 1)[1].strip() for line in lines if line.strip().startswith("GPU:")]


def test_device_share_includes_energy_if_known() -> None:
    receipt = Receipt()
    assert _shown(receipt) == []
    receipt.device_usage.device_time.FromMilliseconds(843)
    assert _shown(receipt) == ["843 ms of device time, energy unknown"]
    receipt.device_usage.energy_millijoules = 72_233
    assert _shown(receipt) == ["843 ms of device time, 72.2 J"]


@pytest.mark.parametrize("gap", [gap for gap in DeviceUsage.Gap.values() if gap])
def test_every_gap_has_its_own_sentence(gap: DeviceUsage.Gap.ValueType) -> None:
    lines = {each: _shown(Receipt(device_usage=DeviceUsage(gap=each))) for each in DeviceUsage.Gap.values() if each}
    assert lines[gap][0].startswith("unknown: ")
    assert sum(line == lines[gap] for line in lines.values()) == 1


def test_client_totals_show_the_request_count_and_are_unknown_for_zero_requests() -> None:
    table = TextTable(CLIENTS.listing.wide)
    unknown, known = (
        ClientRecord(client_id="a"),
        ClientRecord(client_id="b", measured_count=3, energy_millijoules=5_000),
    )
    known.device_time.FromMilliseconds(2_500)
    assert table.cells(document_of(unknown))[-2:] == ["?", "?"]
    assert table.cells(document_of(known))[-2:] == ["2500 ms of 3", "5J"]
