"""``tokenspeed.LLM``: a model in this process, without a server. Texts and token ids in, texts out."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tokenspeed.config import EngineConfig, ParallelConfig
from tokenspeed.engine.signals import deferred_signals
from tokenspeed.errors import ConfigError, EngineError
from tokenspeed.llm_chat import ChatPrompts
from tokenspeed.llm_inputs import (
    Prompt,
    checked_params,
    checked_stop,
    grammar_of,
    listed_params,
    listed_prompts,
    prompt_ids,
)
from tokenspeed.messages import DEFAULT_NEW_TOKENS, Grammar, RequestStats, SamplingParams, TokenLogprobs, TokenOutput
from tokenspeed.model_tokenizer import make_tokenizer, renderer_asked
from tokenspeed.plugins.events import EngineReadyContext, ProcessInitContext, ShutdownContext
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.selection import load_target
from tokenspeed.serving.constraint import GrammarChecker, NoBackend
from tokenspeed.serving.generation import Choice, Delta, Generation, GenerationRequest
from tokenspeed.serving.protocol.sampling import Limits, check_context
from tokenspeed.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from types import TracebackType

    from tokenspeed.engine.local import LocalEngine

__all__ = ["LLM", "GeneratedText", "Piece"]


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """What became of one prompt.

    Attributes:
        prompt: the text, or ``None`` when ids were given.
        finish: ``stop``, ``length``, ``abort`` or ``error``.
        stop_reason: the stop string or stop token that ended it, if one did.
        logprobs: one per generated token, when asked for; ``prompt_logprobs`` one per prompt token, the first is ``None``.
        stats: tokens, cache hits and times.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish: str
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stats: RequestStats | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """New text of prompt number ``index``; ``result`` comes with the last piece."""

    index: int
    text: str
    result: GeneratedText | None = None


class LLM:
    """A model loaded into this process.

    Keyword arguments are the fields of ``EngineConfig`` (the flags of ``tokenspeed serve`` with underscores), for example ``dtype="bfloat16"`` or
    ``max_model_len=4096``; ``plugins`` defaults to ``TOKENSPEED_PLUGINS``. Several ranks need ``tokenspeed serve``.

    Several threads may call it at once: they take turns at the engine step by step, and their requests run in the same steps.

    Raises:
        ConfigError: an unknown or impossible setting; ModelError, PluginError: the model cannot be served, in words for the user.
    """

    def __init__(self, model: str, *, chat_template: str | None = None, **flags: Any) -> None:
        from tokenspeed.engine.assembly import assemble
        from tokenspeed.engine.local import LocalEngine
        from tokenspeed.weights.describe import describe_model

        began_s = time.monotonic()
        config = _engine_config(model, flags)
        description = describe_model(config.model, config.load_format)
        assembly = assemble(
            config,
            description,
            tool_call_parser=None,
            reasoning_parser=None,
            renderer=renderer_asked("auto", chat_template),
        )
        self.tokenizer: Tokenizer = make_tokenizer(
            None if config.skip_tokenizer_init else config.tokenizer or description.tokenizer_path,
            chat_template=chat_template,
            renderer=load_target(assembly.renderer.target) if assembly.renderer is not None else None,
        )
        grammar = assembly.grammar_backend
        self._checker: GrammarChecker | NoBackend = (
            NoBackend(assembly.absent["grammar_backend"]) if grammar is None else load_target(grammar.checker)
        )
        self._chat = ChatPrompts(assembly, self.tokenizer)
        # Of all streams: a step tells of every request, whichever stream asked for it.
        self._live: dict[int, _Live] = {}
        self._lock = threading.RLock()  # around the engine: one thread at a time
        self._events = assembly.events
        self._engine: LocalEngine | None = None
        self._end = "closed"
        try:
            self._events.configure(assembly.plan.to_json())
            self._events.process_init(ProcessInitContext(role="engine"))
            self._engine = LocalEngine(assembly)
        except BaseException as error:
            self._events.shutdown(ShutdownContext(role="engine", reason=f"{type(error).__name__}: {error}"))
            raise
        pages, seconds = self._engine.info.kv_pages, time.monotonic() - began_s
        self._events.engine_ready(EngineReadyContext(model_name=config.model, kv_pages=pages, seconds=seconds))

    @property
    def engine(self) -> LocalEngine:
        """The engine. Raises ``EngineError`` after ``close``, or when a step of it has failed."""
        if self._engine is None:
            raise EngineError(f"this LLM is {self._end}; make another one")
        return self._engine

    def close(self) -> None:
        """Give the model's memory back; streams that are still open raise ``EngineError``. May be called again."""
        self._close("closed")

    def _close(self, reason: str) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine, self._end = None, reason
            self._live.clear()
            self._events.shutdown(ShutdownContext(role="engine", reason=reason))

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        response_format: Mapping[str, Any] | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
    ) -> list[GeneratedText]:
        """Complete prompts, all at once.

        Args:
            prompts: texts or lists of token ids; a single one is a list of one.
            params: for all prompts, or one each; 128 tokens at temperature 1 unless given (``SamplingParams`` asks for 128 too unless it says otherwise).
            stop: a text, or several, that end a completion; they are not part of it.
            response_format, structured_outputs: what every completion is held to, as in a request to the server: ``{"type": "json_object"}``, or
                ``{"regex": "[a-z]+"}``.

        Returns:
            One result per prompt, in order.

        Raises:
            RequestError: a prompt does not fit or a parameter is out of range; nothing was generated then.
        """
        results: dict[int, GeneratedText] = {}
        held = {"response_format": response_format, "structured_outputs": structured_outputs}
        for piece in self.stream(prompts, params, stop=stop, **held):
            if piece.result is not None:
                results[piece.index] = piece.result
        return [results[index] for index in range(len(results))]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        response_format: Mapping[str, Any] | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
    ) -> Iterator[Piece]:
        """``generate`` that yields text as it comes. Closing the iterator early ends the requests.

        Several streams may be read in turns, and ``generate`` called between their pieces: their requests run in the same steps.
        """
        listed = listed_prompts(prompts)
        every, stops = listed_params(params, len(listed)), checked_stop(stop)
        grammar, param = grammar_of(response_format, structured_outputs, self._checker, every)
        return self._stream(
            listed,
            [self._prepare(prompt, one, stops, grammar, param) for prompt, one in zip(listed, every, strict=True)],
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        response_format: Mapping[str, Any] | None = None,
        structured_outputs: Mapping[str, Any] | None = None,
    ) -> GeneratedText:
        """Answer a conversation, rendered with the model's chat template; tool calls stay text, and so does reasoning, which a form that the answer is held to
        leaves no room for.

        Args:
            messages, tools: as in a request to the server, checked and converted as there.

        Raises:
            RequestError: as ``generate``; a message or a tool is malformed; the model has no chat template.
        """
        held = {"response_format": response_format, "structured_outputs": structured_outputs}
        (result,) = self.generate([self.render(messages, tools=tools)], params, stop=stop, **held)
        return result

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Token ids of a conversation up to where the model's answer begins.

        Raises:
            RequestError: a message or a tool is malformed, the model has no chat template, or it cannot render these messages.
        """
        return self._chat.ids(messages, tools, self._limits)

    @property
    def _limits(self) -> Limits:
        info = self.engine.info
        return Limits(
            max_model_len=info.max_model_len, vocab_size=info.vocab_size, max_logprobs=info.vocab_size, max_n=1
        )

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        stop: tuple[str, ...],
        grammar: Grammar | None,
        grammar_param: str,
    ) -> GenerationRequest:
        limits = self._limits
        ids = prompt_ids(prompt, self.tokenizer, limits.vocab_size)
        checked = None if params is None else checked_params(params, limits)
        wanted = check_context(
            len(ids),
            None if checked is None else checked.max_new_tokens,
            limits,
            default=DEFAULT_NEW_TOKENS,
            param="max_new_tokens",
        )
        return GenerationRequest(
            prompts=[ids],
            params=checked or SamplingParams(wanted),
            stop=stop,
            streaming=True,
            grammar=grammar,
            grammar_param=grammar_param,
        )

    def _stream(self, prompts: list[Prompt], requests: list[GenerationRequest]) -> Iterator[Piece]:
        mine: dict[int, _Live] = {}
        try:
            for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
                (ids,) = request.prompts
                owner = Generation(request, _Owner(self.engine))
                detokenizer = self.tokenizer.detokenizer()
                with self._lock, deferred_signals():
                    rid = self.engine.add_request(ids, request.params, grammar=request.grammar)
                    choice = Choice(owner, 0, rid, len(ids), detokenizer)
                    mine[rid] = self._live[rid] = _Live(index, prompt if isinstance(prompt, str) else None, choice)
            while mine:
                told = False
                for rid, one in list(mine.items()):
                    for piece in one.pieces():
                        told = True
                        if piece.result is not None:
                            del mine[rid]
                            self._live.pop(rid, None)
                        yield piece
                if mine and not told:
                    self._step()
        finally:
            self._leave(mine)

    def _step(self) -> None:
        """One step of the engine; what it tells is kept for the streams that asked. Ctrl-C waits for its end: half a step cannot be undone."""
        with self._lock, deferred_signals():
            engine = self.engine
            try:
                items = engine.step()
            except Exception as error:  # a plan without its results: nothing can be planned after it
                self._close(f"closed since a step failed ({type(error).__name__}: {error})")
                raise
            for item in items:
                one = self._live.get(item.rid)
                if one is not None:
                    one.inbox.append(item)

    def _leave(self, live: Mapping[int, _Live]) -> None:
        """The reader of a stream went away: end what still runs of it, so that the next call finds room."""
        if self._engine is None:
            return
        running = [rid for rid, one in live.items() if not one.ended]
        try:
            with self._lock:
                for rid in running:
                    self._engine.abort(rid)
            while self._engine.busy and not all(live[rid].ended for rid in running):
                self._step()
        finally:
            for rid in live:
                self._live.pop(rid, None)


class _Live:
    """One prompt on its way: its text and tokens so far, and the outputs that its stream has not looked at yet."""

    def __init__(self, index: int, prompt: str | None, choice: Choice) -> None:
        self.index = index
        self.prompt = prompt
        self.choice = choice
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.inbox: deque[TokenOutput] = deque()

    @property
    def ended(self) -> bool:
        """The engine's last output has come."""
        return bool(self.inbox) and bool(self.inbox[-1].finish)

    def pieces(self) -> Iterator[Piece]:
        """What came since the last look; the last piece brings the result."""
        while self.inbox:
            delta = self.choice.consume(self.inbox.popleft())
            if delta is None:
                continue
            self.text.append(delta.text)
            self.tokens += delta.tokens
            self.logprobs += [entry.logprobs for entry in delta.entries or ()]
            result = self._result(delta) if delta.finish else None
            if delta.text or result is not None:
                yield Piece(index=self.index, text=delta.text, result=result)

    def _result(self, end: Delta) -> GeneratedText:
        request = self.choice.generation.request
        return GeneratedText(
            prompt=self.prompt,
            prompt_token_ids=list(request.prompts[0]),
            text="".join(self.text),
            token_ids=self.tokens,
            finish=end.finish,
            stop_reason=end.stop_reason,
            logprobs=self.logprobs if request.params.logprobs >= 0 else None,
            prompt_logprobs=self.choice.prompt_logprobs,
            stats=self.choice.stats,
            error=end.error,
        )


class _Owner:
    """What a choice tells the one who runs it: a stop string ends the engine's request."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine

    def stopped(self, choice: Choice) -> None:
        """A stop string ended ``choice``."""
        self._engine.stop(choice.rid)

    def finished(self, choice: Choice) -> None:
        """Nothing to account for."""

    def aborted(self, generation: Generation, reason: str) -> None:
        """Nothing to account for."""


def _engine_config(model: str, flags: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in msgspec.structs.fields(EngineConfig)} - {"model", "model_path", "parallel"}
    parallel = {field.name for field in msgspec.structs.fields(ParallelConfig)}
    for name in flags:
        if name not in known | parallel:
            raise ConfigError(f"LLM has no setting {name!r}{did_you_mean(name, known | parallel)}")
    flags = {"plugins": os.environ.get("TOKENSPEED_PLUGINS", "")} | flags
    sizes = {name: value for name, value in flags.items() if name in parallel}
    if any(size not in (None, 1) for size in sizes.values()):
        raise ConfigError(
            "LLM runs one rank in this process; start several with tokenspeed serve --tensor-parallel-size"
        )
    try:
        return msgspec.convert({"model": model, **{n: v for n, v in flags.items() if n in known}}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"LLM: {error}") from error
