"""A scriptable engine with llama-server's HTTP API: `python -m weft_testing.fake_backend`.

It is a real process. Tests start it with `process.run_fake_backend`; a runner starts it like any llama-server. Its
answers are deterministic, its faults are switches of `behaviour.Behaviour`, and `GET /fake/state` counts the requests
that it received.
"""
