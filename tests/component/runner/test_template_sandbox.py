"""Chat templates in the sandbox: ordinary ones are rendered as the field does, hostile ones end within their limits."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from kit.failures import fails
from kit.own_children import own_children
from kit.waiting import until

from runner_svc.model_files.gguf import read_gguf_header
from runner_svc.templates import sandbox as sandbox_module
from runner_svc.templates.sandbox import TemplateSandbox
from weft.kernel.errors.error_tree import WeftError
from weft.kernel.errors.reasons import Reason
from weft_app.compose.demo import demo_model_path

MESSAGES = [{"role": "user", "content": "Hi <b> & 'you'"}]
MAX_GROWTH_BYTES = 64 * 1024 * 1024

NESTED = "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
HOSTILE = {
    "a constant that is too large for the memory": "{{ 'a' * 2000000000 }}",
    "an output that is too large": "{{ 'a' * 20000000 }}",
    "an output that is too large, in pieces": "{% for i in range(9999) %}{{ 'a' * 1000 }}{% endfor %}",
    "a number that never ends": "{{ 9 ** (9 ** 9) }}",
    "loops in loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% for k in range(9999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "a doubling list": "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "a doubling text": "{% set n = namespace(t='a') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    "a range beyond the sandbox's": "{% for i in range(1000000000) %}{% endfor %}",
    "a walk over attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a walk over globals": "{{ raise_exception.__globals__['sys'].exit() }}",
    "a walk by a filter": "{{ (''|attr('__class__')).__mro__ }}",
    "a walk by a format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "a change of what is handed in": "{{ messages.append(1) }}",
    "a macro that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "nested brackets": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "a wide format": "{{ '%2000000000d' % 1 }}",
    "a wide indentation": "{{ [1, 2] | tojson(indent=2000000000) }}",
    "a chain of replacements": "{% set n = namespace(t='a') %}{% for i in range(60) %}"
    "{% set n.t = n.t | replace('a', 'aaaaaaaa') %}{% endfor %}",
    "a list of lists that doubles": NESTED + "{{ n.l }}",
    "the JSON of a list of lists that doubles": NESTED + "{{ n.l | tojson }}",
    "a deep list": "{% set n = namespace(l=[1]) %}{% for i in range(9000) %}{% set n.l = [n.l] %}{% endfor %}{{ n.l }}",
    "a long chain of operators": "{{ " + "1+" * 200_000 + "1 }}",
}


TO_THE_LIMIT = {
    *("a number that never ends", "loops in loops", "a doubling list", "a doubling text", "a long chain of operators"),
    *("a list of lists that doubles", "the JSON of a list of lists that doubles"),
}
SLOW = pytest.mark.slow("runs to the limit of a second")


def _hostile(kind: str) -> Any:
    return pytest.param(HOSTILE[kind], id=kind, marks=SLOW if kind in TO_THE_LIMIT else ())


@pytest.fixture
async def sandbox() -> AsyncIterator[TemplateSandbox]:
    async with TemplateSandbox(wall_seconds=1.0) as made:
        yield made


async def _failure(sandbox: TemplateSandbox, template: str, variables: dict[str, Any] | None = None) -> WeftError:
    with pytest.raises(WeftError) as failed:
        await sandbox.render(template, variables or {})
    return failed.value


@pytest.mark.parametrize("template", [_hostile(kind) for kind in HOSTILE])
async def test_hostile_template_fails_within_its_limits_and_the_next_one_works(template: str) -> None:
    before = psutil.Process().memory_info().rss
    async with TemplateSandbox(wall_seconds=1.0) as sandbox:
        error = await _failure(sandbox, template, {"messages": MESSAGES})
        assert error.reason is Reason.TEMPLATE_FAILED
        assert len(error.message) < 300
        assert template not in error.message
        assert await sandbox.render("ok", {}) == "ok"
    assert psutil.Process().memory_info().rss - before < MAX_GROWTH_BYTES


@SLOW
async def test_process_is_reused_for_the_next_rendering_and_replaced_after_a_kill(sandbox: TemplateSandbox) -> None:
    assert await sandbox.render("{{ a }}", {"a": "1"}) == "1"
    first = _workers()
    await sandbox.render("{{ a }}", {"a": "2"})
    assert _workers() == first
    await _failure(sandbox, HOSTILE["loops in loops"])
    assert not set(_workers()) & set(first)
    await sandbox.render("{{ a }}", {"a": "3"})
    (second,) = _workers()
    psutil.Process(second).kill()
    assert await sandbox.render("{{ a }}", {"a": "4"}) == "4", "that was no fault of the template"


async def test_worker_killed_for_memory_is_not_blamed_on_the_template(sandbox: TemplateSandbox) -> None:
    await sandbox.render("warm", {})
    rendering = asyncio.create_task(sandbox.render(HOSTILE["loops in loops"], {}))
    killed: set[int] = set()
    while not rendering.done():
        if new := set(_workers()) - killed:
            # Not before it has the request: what it was killed for is then in doubt.
            await asyncio.sleep(0.1)
            killed |= new
            for pid in new:
                psutil.Process(pid).kill()
        await asyncio.sleep(0.01)
    with fails(Reason.INTERNAL):
        await rendering
    assert len(killed) == 2, "it is tried once more, and not for ever"
    assert await sandbox.render("ok", {}) == "ok"


async def test_rendering_ended_by_a_stop_reports_it(sandbox: TemplateSandbox) -> None:
    await sandbox.render("warm", {})
    rendering = asyncio.create_task(sandbox.render(HOSTILE["loops in loops"], {}))
    await asyncio.sleep(0.05)
    await sandbox.stop()
    with fails(Reason.WORKER_RESTARTED):
        await rendering
    assert not _workers()


LITTLE = """
import asyncio, ctypes, os, resource, sys
if len(sys.argv) == 1:
    CAPBSET_DROP, SYS_RESOURCE = 24, 24
    ctypes.CDLL(None).prctl(CAPBSET_DROP, SYS_RESOURCE, 0, 0, 0)
    os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], "again"])
resource.setrlimit(resource.RLIMIT_AS, (480 * 2**20,) * 2)
from runner_svc.templates.sandbox import TemplateSandbox

async def main():
    async with TemplateSandbox() as sandbox:
        print(await sandbox.render("{{ a }}", {"a": "rendered"}))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
async def test_machine_with_lower_limits_still_renders() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LITTLE),
        env={**os.environ, "PROGRAM": LITTLE},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert output == b"rendered\n", errors.decode()


async def test_stop_leaves_no_process_and_the_sandbox_works_again(sandbox: TemplateSandbox) -> None:
    await asyncio.gather(*(sandbox.render("{{ a }}", {"a": "1"}) for _ in range(5)))
    assert len(_workers()) == 1, "renderings share a process"
    await sandbox.stop()
    assert not _workers()
    assert await sandbox.render("again", {}) == "again"


async def test_cancelled_rendering_leaves_no_busy_process(sandbox: TemplateSandbox) -> None:
    await sandbox.render("warm", {})
    rendering = asyncio.create_task(sandbox.render(HOSTILE["loops in loops"], {}))
    await asyncio.wait({rendering}, timeout=0.05)
    rendering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rendering
    assert not _workers()
    assert await sandbox.render("ok", {}) == "ok"


async def test_process_has_its_own_limits_and_an_empty_environment(
    sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_SECRET", "s3cret")
    await sandbox.render("warm", {})
    (pid,) = _workers()
    process = psutil.Process(pid)
    assert process.rlimit(psutil.RLIMIT_AS) == (512 * 1024 * 1024,) * 2
    assert process.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert "WEFT_SECRET" not in process.environ()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("loops in loops", marks=SLOW),
        "a walk over attributes",
        "an output that is too large, in pieces",
    ],
)
async def test_check_before_load_detects_a_template_over_its_limits(sandbox: TemplateSandbox, kind: str) -> None:
    with fails(Reason.TEMPLATE_FAILED):
        await sandbox.check(HOSTILE[kind], {"messages": MESSAGES})


async def test_template_that_rejects_the_sample_passes_the_check_and_fails_rendering(sandbox: TemplateSandbox) -> None:
    template = "{{ raise_exception('Roles must alternate\n') }}"
    await sandbox.check(template, {})
    assert "Roles must alternate" in (await _failure(sandbox, template)).message
    for broken in ("{% for %}", "{{ messages[0].nothing.more }}", "{{ 1 / 0 }}"):
        await sandbox.check(broken, {"messages": MESSAGES})
        await _failure(sandbox, broken, {"messages": MESSAGES})


async def test_words_with_which_a_template_rejects_a_chat_are_its_callers_only(sandbox: TemplateSandbox) -> None:
    refused = await _failure(sandbox, "{{ raise_exception(messages[0].content) }}", {"messages": MESSAGES})
    assert MESSAGES[0]["content"] in refused.message
    assert refused.log_message == "messages: the model's chat template rejects them"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <b> & \'you\'"}'),
        ("{{ {'ä': 1} | tojson(indent=2) }}", '{\n  "ä": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}{{ bos_token }}{% endgeneration %}", "<s>"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
        ("{{ not_there is defined }}{{ not_there }}", "False"),
        ("{{ '\u2603\U0001f600' }}", "\u2603\U0001f600"),
    ],
)
async def test_templates_have_the_helpers_they_expect(sandbox: TemplateSandbox, template: str, expected: str) -> None:
    assert await sandbox.render(template, {"messages": MESSAGES, "bos_token": "<s>"}) == expected


async def test_demo_model_template_renders_its_prompt(sandbox: TemplateSandbox) -> None:
    header = read_gguf_header(demo_model_path())
    assert header.chat_template is not None
    prompt = await sandbox.render(header.chat_template, {"messages": MESSAGES, "add_generation_prompt": True})
    assert prompt.endswith("<|im_start|>user\nHi <b> & 'you'<|im_end|>\n<|im_start|>assistant\n")


async def test_conversation_over_the_limit_is_rejected(
    sandbox: TemplateSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "MAX_REQUEST_BYTES", 1000)
    assert "1000 bytes" in (await _failure(sandbox, "{{ a }}", {"a": "x" * 1000})).message


async def test_too_deeply_nested_conversation_is_a_client_error(sandbox: TemplateSandbox) -> None:
    """Such as the arguments of an earlier call."""
    deep: Any = 1
    for _ in range(100_000):
        deep = {"a": deep}
    assert "too deeply" in (await _failure(sandbox, "{{ a }}", {"a": deep})).message


def _workers() -> list[int]:
    found = []
    for child in own_children():
        # A child that has ended may be reaped before it is asked for its status.
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


ORPHAN = """
import asyncio, psutil, sys
from runner_svc.templates.sandbox import TemplateSandbox

async def main():
    sandbox = TemplateSandbox(wall_seconds=600.0)
    await sandbox.render("warm", {})
    print(psutil.Process().children()[0].pid, flush=True)
    await sandbox.render(sys.argv[1], {})

asyncio.run(main())
"""


async def test_rendering_ends_when_its_parent_process_dies() -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", ORPHAN, HOSTILE["loops in loops"]), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(await parent.stdout.readline()))
    busy = worker.cpu_times().user
    await until(lambda: worker.cpu_times().user > busy + 0.05)
    parent.kill()
    await parent.wait()
    await until(lambda: _has_ended(worker))


def _has_ended(worker: psutil.Process) -> bool:
    try:
        if worker.status() == psutil.STATUS_ZOMBIE:
            return True
        assert worker.cpu_times().user < 1.0, "it works on, and its own limit would end it"
    except psutil.NoSuchProcess:
        return True
    return False
