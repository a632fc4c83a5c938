"""Everything but chat: health, keys, slots, completions, embeddings, the pages about the server."""

import asyncio
import io
import math

import pytest
from fake_backend_client import COMPLETION, EMBEDDINGS, chat_body, fake, until
from kit.fake_backend import run_fake_backend


@pytest.mark.slow("a model that loads for a second")
async def test_health_is_503_until_the_model_is_loaded() -> None:
    async with fake(load_seconds=1.5) as client:  # long enough to be asked twice on a busy machine
        loading = await client.get("/health")
        refused = await client.chat()

        async def healthy() -> bool:
            return (await client.get("/health")).status == 200

        await until(healthy)
        served = await client.chat()
    assert loading.status == refused.status == 503
    assert loading.error == {"code": 503, "message": "Loading model", "type": "unavailable_error"}
    assert served.status == 200


async def test_a_model_may_never_load() -> None:
    async with fake(never_healthy=True) as client:
        assert (await client.get("/health")).status == 503
        await client.backend.set_behaviour(never_healthy=False)
        assert (await client.get("/health")).status == 200


async def test_with_a_key_everything_but_health_asks_for_it() -> None:
    async with fake("--api-key", "secret") as client:
        assert (await client.get("/health")).status == 200
        refused = await client.get("/v1/models")
        assert refused.status == 401
        assert refused.error == {"code": 401, "message": "Invalid API Key", "type": "authentication_error"}
        assert (await client.get("/slots", Authorization="Bearer wrong")).status == 401
        assert (await client.get("/slots", Authorization="Bearer secret")).status == 200
        assert (await client.get("/slots", **{"X-Api-Key": "secret"})).status == 200
        assert (await client.chat()).status == 401
        assert (await client.backend.state()).requests_started == 0


async def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_API_KEY", "from-env")
    async with fake() as client:
        assert (await client.get("/props")).status == 401
        assert (await client.get("/props", Authorization="Bearer from-env")).status == 200


async def test_the_pages_about_the_server_tell_alias_slots_and_context_per_slot() -> None:
    flags = ("--alias", "tiny", "--parallel", "2", "--ctx-size", "2048", "--model", "/models/tiny.gguf", "--jinja")
    async with fake(*flags) as client:
        models, props, slots = [(await client.get(path)).json for path in ("/v1/models", "/props", "/slots")]
        output = client.backend.output
    assert models["data"][0]["id"] == "tiny"
    assert {"n_params", "size", "n_ctx", "n_ctx_train", "n_embd", "n_vocab", "ftype"} <= set(models["data"][0]["meta"])
    assert props["total_slots"] == 2
    assert props["default_generation_settings"]["n_ctx"] == 1024
    assert props["model_path"] == "/models/tiny.gguf"
    assert [(slot["id"], slot["n_ctx"], slot["is_processing"]) for slot in slots] == [
        (0, 1024, False),
        (1, 1024, False),
    ]
    assert any("ignored unknown arguments: --jinja" in line for line in output)


async def test_slots_and_metrics_show_work_in_progress() -> None:
    async with fake("--parallel", "2", stall_after_tokens=3) as client:
        async with client.open_stream():
            await client.backend.wait_for_state(lambda state: state.tokens_sent == 3)
            slots = (await client.get("/slots")).json
            metrics = (await client.get("/metrics")).raw.decode()
        await client.backend.wait_for_state(lambda state: state.busy_slots == 0)
    busy = [slot for slot in slots if slot["is_processing"]]
    assert len(busy) == 1
    assert (busy[0]["n_prompt_tokens"], busy[0]["n_prompt_tokens_processed"]) == (7, 4)
    assert busy[0]["next_token"][0]["n_decoded"] == 3
    assert "llamacpp:requests_processing 1\n" in metrics
    assert "llamacpp:tokens_predicted_total 3\n" in metrics


async def test_more_requests_than_slots_wait_inside() -> None:
    async with fake("--parallel", "1", stall_after_tokens=1, fail_times=1) as client:
        async with client.open_stream() as stalled:
            await stalled.content.readany()
            waiting = asyncio.create_task(client.chat())
            state = await client.backend.wait_for_state(lambda state: state.waiting_requests == 1)
            assert (state.active_requests, state.busy_slots) == (2, 1)
            assert not waiting.done()
        assert (await asyncio.wait_for(waiting, 5)).status == 200
        state = await client.backend.state()
    assert (state.requests_cancelled, state.requests_finished) == (1, 1)


async def test_a_request_that_leaves_while_it_waits_is_forgotten() -> None:
    async with fake("--parallel", "1", stall_after_tokens=1, fail_times=1) as client:
        async with client.open_stream() as stalled:
            await stalled.content.readany()
            waiting = asyncio.create_task(client.chat())
            await client.backend.wait_for_state(lambda state: state.waiting_requests == 1)
            waiting.cancel()
            await client.backend.wait_for_state(lambda state: state.waiting_requests == 0, seconds=1)
        assert (await client.chat()).status == 200


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_text_completion_carries_text_and_always_usage(streamed: bool) -> None:
    async with fake() as client:
        reply = await client.post(COMPLETION, {"prompt": "a b c", "max_tokens": 2, "stream": streamed})
    objects = reply.chunks if streamed else [reply.json]
    assert {item["object"] for item in objects} == {"text_completion"}
    assert "".join(item["choices"][0]["text"] for item in objects) == "tok0 tok1"
    assert objects[-1]["choices"][0]["finish_reason"] == "length"
    assert objects[-1]["usage"]["prompt_tokens"] == 3
    assert objects[-1]["timings"]["predicted_n"] == 2


async def test_a_completion_of_several_prompts_numbers_its_choices_in_prompt_order() -> None:
    async with fake(answer_tokens=2) as client:
        body = {"prompt": ["a", "b c", [1, 2, 3]], "n": 2, "logprobs": 1, "stream": True}
        streamed = await client.post(COMPLETION, body)
        whole = await client.post(COMPLETION, {**body, "stream": False})
    assert streamed.payloads[0] == "null", "as llama-server opens such a stream"
    chunks = [chunk for chunk in streamed.chunks if chunk is not None]
    usages = {chunk["choices"][0]["index"]: chunk["usage"]["prompt_tokens"] for chunk in chunks if "usage" in chunk}
    assert usages == {0: 1, 1: 1, 2: 2, 3: 2, 4: 3, 5: 3}
    assert [choice["index"] for choice in whole.json["choices"]] == list(range(6))
    assert whole.json["choices"][0]["logprobs"]["content"][0]["token"] == "tok0"


@pytest.mark.parametrize("prompt", [None, 3, [], [None], ["x", 3.5]])
async def test_a_completion_without_a_proper_prompt_is_refused_and_counts_as_answered(prompt: object) -> None:
    async with fake() as client:
        reply = await client.post(COMPLETION, {"prompt": prompt})
        state = await client.backend.state()
    assert reply.status == 400
    assert (state.requests_finished, state.requests_failed) == (1, 0)


async def test_an_unknown_route_is_not_found() -> None:
    async with fake() as client:
        reply = await client.get("/v1/no/such/route")
    assert reply.error == {"code": 404, "message": "File Not Found", "type": "not_found_error"}


async def test_embeddings_are_the_same_for_the_same_text_and_close_for_similar_ones() -> None:
    inputs = ["a small cat", "a small kitten", "stock market news", "a small cat", [1, 2]]
    async with fake("--embeddings", "--alias", "mini") as client:
        reply = await client.post(EMBEDDINGS, {"input": inputs})
    cat, kitten, stocks, same, ids = [entry["embedding"] for entry in reply.json["data"]]
    assert [entry["index"] for entry in reply.json["data"]] == list(range(5))
    assert reply.json["model"] == "mini"
    assert reply.json["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    assert cat == same != ids
    assert math.isclose(math.hypot(*cat), 1.0, rel_tol=1e-5)
    assert math.dist(cat, kitten) < math.dist(cat, stocks)


async def test_embeddings_are_refused_unless_enabled() -> None:
    async with fake() as client:
        reply = await client.post(EMBEDDINGS, {"input": "x"})
    assert reply.status == 501
    assert reply.error["type"] == "not_supported_error"


@pytest.mark.parametrize("body", [{}, {"input": []}, {"input": ""}, {"input": "x", "encoding_format": "hex"}])
async def test_embeddings_refuse_a_bad_body(body: dict[str, object]) -> None:
    async with fake("--embeddings") as client:
        assert (await client.post(EMBEDDINGS, body)).status == 400


async def test_an_embedding_input_beyond_the_context_is_refused() -> None:
    async with fake("--embeddings", "--ctx-size", "8", "--parallel", "1") as client:
        reply = await client.post(EMBEDDINGS, {"input": "w " * 9})
    assert reply.error["type"] == "exceed_context_size_error"


async def test_text_is_tokenized_into_words() -> None:
    async with fake() as client:
        plain = await client.post("/tokenize", {"content": "one two  three"})
        pieces = await client.post("/tokenize", {"content": "one two  three", "with_pieces": True})
    assert len(plain.json["tokens"]) == 3
    assert [token["piece"] for token in pieces.json["tokens"]] == ["one", " two", "  three"]


async def test_the_last_request_is_recorded_with_its_headers() -> None:
    async with fake() as client:
        await client.post("/v1/chat/completions", chat_body("hi"), **{"X-Request-Id": "req-7"})
        state = await client.backend.state()
    assert state.last_request_body == chat_body("hi")
    assert state.last_request_headers["x-request-id"] == "req-7"
    assert state.pid == client.backend.pid


async def test_a_large_body_is_served_but_not_recorded() -> None:
    async with fake() as client:
        assert (await client.chat("x" * 1_000_000)).status == 200
        assert (await client.backend.state()).last_request_body is None


@pytest.mark.parametrize(("body", "status"), [(b"{", 400), (b"x" * (65 * 1024 * 1024), 413)], ids=["half", "huge"])
async def test_a_body_that_is_no_json_or_too_large_is_refused(body: bytes, status: int) -> None:
    async with fake() as client:
        url = client.backend.base_url + "/v1/chat/completions"
        async with client.session.post(url, data=io.BytesIO(body)) as response:
            assert response.status == status
        assert (await client.get("/health")).json == {"status": "ok"}


async def test_an_unknown_switch_is_refused_by_the_route_and_by_the_command_line() -> None:
    async with fake() as client:
        with pytest.raises(ValueError, match="no_such_switch"):
            await client.backend.set_behaviour(no_such_switch=1)
        with pytest.raises(ValueError, match="stall_after_tokens"):
            await client.backend.set_behaviour(stall_after_tokens=-1)
    with pytest.raises(ChildProcessError, match="tokens_per_second"):
        async with run_fake_backend("--tokens-per-second", "fast"):
            pass


async def test_behaviour_is_changed_in_part_and_can_be_read() -> None:
    async with fake(answer_tokens=3) as client:
        await client.backend.set_behaviour(echo=True, tool_call={"name": "f"})
        behaviour = await client.backend.behaviour()
    assert (behaviour.answer_tokens, behaviour.echo) == (3, True)
    assert [call.name for call in behaviour.scripted_calls] == ["f"]


async def test_a_connection_serves_many_requests_unless_told_otherwise() -> None:
    async with fake() as client:
        async with client.open_stream() as response:
            await response.read()
            assert response.headers.get("Connection", "keep-alive") == "keep-alive"
        await client.backend.set_behaviour(close_after_stream=True)
        host, _, port = client.backend.base_url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"messages":[{"role":"user","content":"x"}],"stream":true}'
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        raw = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        await writer.wait_closed()
    assert raw.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert b"connection: close" not in raw.lower()
