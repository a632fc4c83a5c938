"""Batches of missing files, and unknown fields."""

from bad_inputs_stage import Case, of_kind, with_fields

_BATCHES = of_kind("batch")

CASES = (
    *(
        Case(f"B1 {name} {value!r:.30}", with_fields({name: value}), applies=_BATCHES)
        for name, value in (
            ("input_file_id", ""),
            ("input_file_id", "../etc/passwd"),
            ("input_file_id", "a\x00b"),
            ("input_file_id", "x" * 10_000),
            ("input_file_id", ["file-1"]),
            ("endpoint", "/etc/passwd"),
            ("endpoint", "/v1/batches"),
            ("endpoint", None),
            ("completion_window", "1h"),
            ("completion_window", 24),
            ("window_seconds", 0),
            ("window_seconds", -1),
            ("window_seconds", 10**12),
            ("window_seconds", 3600.5),
            ("metadata", {"a": "x" * 10_000}),
            ("metadata", {"x" * 65: ""}),
            ("metadata", {str(number): "" for number in range(1000)}),
            ("metadata", {"a": {"b": "c"}}),
            ("metadata", "a"),
        )
    ),
    *(
        Case(f"B1 no {name}", with_fields({}, without=(name,)), applies=_BATCHES)
        for name in ("input_file_id", "endpoint", "completion_window")
    ),
    Case("B2 no such file", with_fields({"input_file_id": "file-9"}), frozenset({404}), _BATCHES),
)
