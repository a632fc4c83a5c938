"""A scriptable engine that speaks llama-server's HTTP contract: `python -m weft_testing.fake_backend`.

It is a real process. Tests start it with `process.run_fake_backend`; a runner starts it like any llama-server.
Everything it says is deterministic, every way it can fail is a switch of `behaviour.Behaviour`, and
`GET /fake/state` shows what really reached it.
"""
