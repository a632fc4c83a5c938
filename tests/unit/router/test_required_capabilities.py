"""What a candidate lacks, and why no member of a queue can serve a request."""

from dataclasses import replace

import pytest
from index_harness import CHAT, index, member, pick, place

from router_svc.policy.endpoints.candidates import Candidate, Needs, Readiness, context_class
from router_svc.policy.endpoints.required_capabilities import fits, profile_of
from router_svc.policy.endpoints.routes import Route
from weft.kernel.errors.reasons import Reason
from weft.kernel.requests.capabilities import ThinkingMode
from weft.kernel.requests.request_values import Operation, Skill

NEVER = frozenset({ThinkingMode.DEFAULT, ThinkingMode.DISABLED})
THINKS = Needs(Operation.CHAT, thinking=ThinkingMode.ENABLED)
PICTURE = Needs(Operation.CHAT, skills=frozenset({Skill.TEXT, Skill.IMAGE}))
TOOLS = Needs(Operation.CHAT, tools=frozenset({"search", "files"}))
LONG = Needs(Operation.CHAT, context_tokens=8192)
ONLY_TEXT = frozenset({Skill.TEXT})
OFF = {"remote": True}


@pytest.mark.parametrize(
    ("candidate", "needs", "gate"),
    [
        (member(), CHAT, ""),
        (member(), Needs(Operation.EMBEDDING), "does not offer embedding"),
        (member(remote=True), CHAT, "remote, and the request has no permit"),
        (member(remote=True), Needs(Operation.CHAT, allow_remote=True), ""),
        (member(skills=ONLY_TEXT), PICTURE, "does not support images"),
        (member(skills=frozenset()), PICTURE, "does not support text and does not support images"),
        (member(skills=None), PICTURE, ""),
        (member(skills=frozenset({Skill.TEXT, Skill.IMAGE, Skill.AUDIO})), PICTURE, ""),
        (member(skills=ONLY_TEXT), Needs(Operation.CHAT, skills=frozenset({Skill.AUDIO})), "does not support audio"),
        (member(), THINKS, ""),
        (member(thinking_modes=NEVER), THINKS, "does not support thinking"),
        (member(thinking_modes=NEVER), Needs(Operation.CHAT, thinking=ThinkingMode.DISABLED), ""),
        (
            member(skills=ONLY_TEXT, thinking_modes=NEVER),
            replace(PICTURE, thinking=ThinkingMode.ENABLED),
            "does not support images and does not support thinking",
        ),
        (member(skills=ONLY_TEXT), Needs(Operation.CHAT, skills=frozenset({Skill.TOOLS})), "does not support tools"),
        (member(), TOOLS, "its runner lacks files, search"),
        (member(tools=frozenset({"search"})), TOOLS, "its runner lacks files"),
        (member(tools=frozenset({"search", "files", "more"})), TOOLS, ""),
        (member(context_tokens=4096), LONG, "its context of 4096 tokens is too short"),
        (member(context_tokens=8192), LONG, ""),
        (member(context_tokens=0), LONG, ""),
        (member(context_tokens=4096), Needs(Operation.CHAT), ""),
    ],
)
def test_missing_capability_of_a_candidate_is_named(candidate: Candidate, needs: Needs, gate: str) -> None:
    assert fits(candidate, needs) == gate
    mesh = index(candidate)
    assert (place(mesh, asked=pick(needs)) is not None) == (gate == "")


@pytest.mark.parametrize("context", [0, 1, 4095, 4096, 4097, 131_072])
@pytest.mark.parametrize("prompt", [0, 1, 3, 5_000, 9_000, 300_000])
def test_profile_serves_the_same_requests_as_its_candidate(context: int, prompt: int) -> None:
    candidate = member(context_tokens=context)
    needs = Needs(Operation.CHAT, context_tokens=context_class(prompt))
    assert bool(fits(candidate, needs)) == bool(fits(profile_of(candidate), needs))


@pytest.mark.parametrize(
    ("members", "needs", "reason", "message"),
    [
        (
            [member(readiness=Readiness.DOWN, clock_refused=True, detail="its clock is 600 s ahead of the mesh's")],
            CHAT,
            Reason.CLOCK_OFF,
            "no runner that serves p takes requests (on-a: its clock is 600 s ahead of the mesh's)",
        ),
        ([member()], Needs(Operation.EMBEDDING), Reason.UNSUPPORTED_OPERATION, "p does not offer embedding"),
        (
            [member(remote=True)],
            CHAT,
            Reason.PERMISSION_DENIED,
            "p is remote, and the request has no permit: see allow_remote, its own and its tenant's",
        ),
        ([member(skills=ONLY_TEXT)], PICTURE, Reason.MODALITY_UNSUPPORTED, "p does not support images"),
        ([member(thinking_modes=NEVER)], THINKS, Reason.MODALITY_UNSUPPORTED, "p does not support thinking"),
        ([member()], TOOLS, Reason.TOOL_UNAVAILABLE, "no runner that serves p has all of files, search"),
        (
            [member("a", context_tokens=2048), member("b", context_tokens=4096)],
            LONG,
            Reason.CONTEXT_LENGTH_EXCEEDED,
            "the prompt is longer than the context of p, which is 4096 tokens",
        ),
        (
            [member(readiness=Readiness.DOWN, detail="it crashed")],
            CHAT,
            Reason.NO_RUNNER_AVAILABLE,
            "no runner that serves p is up (on-a: it crashed)",
        ),
        (
            # Each lacks something else: what would have to change is named for those who come closest.
            [member("a", operations=frozenset()), member("b", skills=ONLY_TEXT)],
            PICTURE,
            Reason.MODALITY_UNSUPPORTED,
            "p does not support images",
        ),
        (
            [member("a", readiness=Readiness.DOWN), member("b", remote=True)],
            CHAT,
            Reason.NO_RUNNER_AVAILABLE,
            "no runner that serves p is up",
        ),
    ],
)
def test_refusal_explains_why_no_candidate_qualifies(
    members: list[Candidate], needs: Needs, reason: Reason, message: str
) -> None:
    mesh = index(*members)
    assert list(mesh.permitted("p", needs, frozenset())) == []
    summary = mesh.refusal("p", needs)
    assert (summary.reason, summary.message) == (reason, message)
    assert sum(summary.gates.values()) == len(members)
    assert mesh.refusal("p", needs, "my-model").message.count("my-model") == 1


def test_refusal_summarizes_a_large_pool() -> None:
    mesh = index(*(member(f"m{number:02}", readiness=Readiness.DOWN, detail="gone") for number in range(40)))
    message = mesh.refusal("p", CHAT).message
    assert message.count("gone") == 8
    assert message.endswith("; ...)")


def test_route_refusal_reports_candidates_excluded_by_the_cloud_guard() -> None:
    route = Route(name="r", candidates=("nothing", "cloud"))
    mesh = index(member("cloud", pool="cloud", **OFF), routes=[route], cloud_fallback=False)
    summary = mesh.refusal("route/r", Needs(Operation.CHAT, allow_remote=True))
    assert summary.reason is Reason.PERMISSION_DENIED
    assert summary.message == ("only remote models could answer for route/r, and the mesh does not fall back to them")


def test_route_with_offline_local_candidates_does_not_blame_the_cloud_guard() -> None:
    route = Route(name="r", candidates=("a", "cloud"))
    down = member("a", readiness=Readiness.DOWN)
    mesh = index(down, member("cloud", pool="cloud", **OFF), routes=[route], cloud_fallback=False)
    assert mesh.refusal("route/r", CHAT).reason is Reason.NO_RUNNER_AVAILABLE


def test_route_without_a_member_in_the_mesh_has_no_runner_available() -> None:
    mesh = index(routes=[Route(name="r", candidates=("nothing",))])
    assert mesh.table.queue_of("route/r") == "route/r"
    assert mesh.refusal("route/r", CHAT).reason is Reason.NO_RUNNER_AVAILABLE
