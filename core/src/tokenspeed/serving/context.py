"""What every route shares: the requests, the served names, and whether the server takes work."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, cast

from litestar import Request

from tokenspeed.config import ServingConfig
from tokenspeed.errors import RequestError
from tokenspeed.interfaces.parser import ToolParser
from tokenspeed.interfaces.reasoning import ReasoningParser
from tokenspeed.serving.async_llm import AsyncLLM
from tokenspeed.serving.constraint import GrammarChecker, NoBackend
from tokenspeed.serving.generation import Generation, GenerationRequest
from tokenspeed.serving.protocol.sampling import Limits
from tokenspeed.serving.protocol.sessions import Session, session_of
from tokenspeed.serving.tokenizer import NoTokenizer

__all__ = ["HttpRequest", "ServerContext", "check_header", "context_of"]

_OWN_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
HttpRequest = Request[Any, Any, Any]


@dataclass(kw_only=True)
class ServerContext:
    """Shared by the routes of both ports.

    Attributes:
        model_names: names that requests may use; the first is shown in answers.
        tool_parser: class of the tool-call parser, or ``None``.
        reasoning_parser: class of the reasoning parser, or ``None``: thinking stays in the text.
        grammar_checker: refuses grammars that the backend would not enforce; anything but a checker: there is no grammar backend.
        server_info: what ``/get_server_info`` shows besides the engine's own description.
        plugins: what ``/plugins`` shows: the plan, and why each other candidate lost.
        draining: the server ends; running requests may finish, new ones are refused.
    """

    llm: AsyncLLM
    config: ServingConfig
    model_names: tuple[str, ...]
    tool_parser: type[ToolParser] | None = None
    reasoning_parser: type[ReasoningParser] | None = None
    grammar_checker: GrammarChecker | NoBackend | None = None
    server_info: dict[str, Any] = field(default_factory=dict)
    plugins: dict[str, Any] = field(default_factory=dict)
    started_s: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    http_requests: int = 0

    def unavailable(self) -> str:
        """Why no work is taken now; empty when it is."""
        client = self.llm.client
        if client.failure is not None:
            return str(client.failure)
        if self.draining:
            return "the server is shutting down"
        if client.info is None:
            return "the model is still loading"
        return "the engine does not answer" if client.hung else ""

    def admit(self, choices: int = 1) -> None:
        """Refuse work early.

        Args:
            choices: how many engine requests it takes: prompts times ``n``.

        Raises:
            RequestError: 503 while starting, draining, hung or full; 400 for more choices than the limit lets in at all.
        """
        reason = self.unavailable()
        if reason:
            raise RequestError(f"{reason}; try again later", code="unavailable", status=503)
        limit = self.config.max_pending_requests
        if limit and choices > limit:
            raise RequestError(f"{choices} choices in one request; at most {limit} may be pending here", param="n")
        pending = self.llm.live_requests
        if limit and pending + choices > limit:
            raise RequestError(
                f"{pending} requests are pending and {choices} more would pass the limit of {limit}; try again later",
                code="overloaded",
                status=503,
            )

    def check_model(self, model: str | None) -> None:
        """Raises ``RequestError`` 404 for a name that is not served."""
        if model is not None and model not in self.model_names:
            raise RequestError(
                f"the model {model[:200]!r} is not served here; served: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def check_text(self) -> None:
        """Raises ``RequestError`` for a route that writes texts where no tokenizer is loaded."""
        if isinstance(self.llm.tokenizer, NoTokenizer):
            raise RequestError(
                "this server runs without a tokenizer (--skip-tokenizer-init), and this route takes or writes texts: ask /generate, "
                "with input_ids; its answers hold output_ids",
                code="no_tokenizer",
            )

    @property
    def limits(self) -> Limits:
        """Bounds of requests to the loaded model."""
        info = self.llm.info
        return Limits(
            max_model_len=info.max_model_len,
            vocab_size=min(info.vocab_size, self.llm.tokenizer.vocab_size),
            max_logprobs=min(self.config.max_logprobs, info.vocab_size),
            max_n=self.config.max_n,
        )

    def session_of(
        self, request: HttpRequest, session_id: str | None, retain_s: float | None, *, salt: str | None, choices: int
    ) -> Session:
        """The session that the body's fields or the headers name. Raises ``RequestError``, see ``protocol.sessions``."""
        for name in ("X-Session-Id", "X-Retain-S"):
            check_header(request, name)
        cached = bool(self.llm.info.config.get("enable_prefix_caching", True))
        return session_of(
            request.headers, session_id, retain_s, salt=(salt or "").encode(), choices=choices, cached=cached
        )

    def submit(self, request: GenerationRequest) -> Generation:
        """Hand a request to the engine, unless it would pass the limit on pending ones or the server began to end meanwhile."""
        self.admit(len(request.prompts) * request.n)
        return self.llm.submit(request)

    @staticmethod
    def new_id(prefix: str, request: HttpRequest) -> str:
        """An id for an answer: the client's own (``X-Request-Id``, so that it can be aborted by it), or a random one."""
        given = request.headers.get("x-request-id", "")
        return f"{prefix}-{given if _OWN_ID.fullmatch(given) else uuid.uuid4().hex}"


def context_of(request: HttpRequest) -> ServerContext:
    """The context that ``build_app`` put into the application's state."""
    return cast(ServerContext, request.app.state["context"])


def check_header(request: HttpRequest, name: str) -> None:
    """Raises ``RequestError`` where a header is there more than once and its values contradict each other."""
    if len(set(request.headers.getall(name, []))) > 1:
        raise RequestError(f"{name}: given more than once, with different values; give one", param=name)
