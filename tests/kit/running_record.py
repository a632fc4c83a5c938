"""The record of a request that runs."""

from collections.abc import Iterator
from contextlib import contextmanager

from runner_svc.request_records import RequestRecord, RequestRecords


@contextmanager
def running_record(records: RequestRecords, request_id: str) -> Iterator[RequestRecord]:
    record = records.begin(request_id)
    try:
        yield record
    except BaseException as error:  # noqa: BLE001 - the end of the record says what is raised
        ended_by = records.end(record, error)
        assert ended_by is not None
        raise ended_by from None
    records.end(record, None)
