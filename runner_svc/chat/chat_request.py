"""The inputs of a conversation: the engine, the chat request, and the runner's setup."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from runner_svc.backend.port import CallInfo
from runner_svc.chat.chat_settings import ChatSettings
from runner_svc.chat.offered_tools import Offer
from runner_svc.policy.platform_prompt import FunctionFacts, PromptFacts, platform_prompt
from runner_svc.policy.signals import SignalSettings
from runner_svc.request_records import RequestRecord
from runner_svc.tools.port import ToolDescription
from runner_svc.tools.tool_box import ToolBox
from weft.api.common.v1 import agent_behaviour_pb2
from weft.dispatch.frames import Frame, GenerationPayload
from weft.dispatch.payload_description import names_languages
from weft.kernel.time.clock import Clock
from weft.kernel.values.fast_dataclass import fast_dataclass


class ChatEngine(Protocol):
    """The engine of an admitted request, as used by a conversation."""

    @property
    def record(self) -> RequestRecord:
        """The request's record."""
        ...

    def generate(self, payload: GenerationPayload, call: CallInfo) -> AsyncGenerator[Frame]:
        """Runs one engine turn; see Backend.generate."""
        ...


@fast_dataclass(kw_only=True)
class ChatRequest:
    """A chat or completion request."""

    payload: GenerationPayload
    call: CallInfo
    behaviour: agent_behaviour_pb2.AgentBehaviour
    """Tools, signals and policies of the agent. Read-only."""
    agent: str = ""
    """The requested agent; empty: none."""
    allow_remote: bool = False
    """Whether tools may send its data to a remote provider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSetup:
    """The setup shared by all conversations with one model on one runner."""

    runner: str
    model: str
    settings: ChatSettings
    tools: ToolBox
    clock: Clock
    """The mesh's time of day."""

    def prompt(self, request: ChatRequest, offer: Offer, *, iterations_left: int, text_calls: bool) -> str:
        """Returns the current platform prompt; empty if neither the agent nor the model enables it.

        The model's setting does not apply to translations, because translation templates accept no instructions.
        """
        by_model = self.settings.platform_prompt and not names_languages(request.payload)
        if not request.behaviour.platform_prompt and not by_model:
            return ""
        facts = PromptFacts(
            now=self._local_now(),
            runner=self.runner,
            model=self.model,
            agent=request.agent,
            context=self.settings.platform_context,
            tools=[_facts(name, tool) for name, tool in offer.tools.items()],
            signals=[_facts(name, signal) for name, signal in offer.signals.items()],
            text_calls=text_calls,
            iterations_left=iterations_left,
        )
        return platform_prompt(facts)

    def _local_now(self) -> datetime:
        return self.clock.utc_now().astimezone(self.settings.zone)


def _facts(name: str, function: ToolDescription | SignalSettings) -> FunctionFacts:
    return FunctionFacts(name=name, description=function.description, parameters=function.parameters)
