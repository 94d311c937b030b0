"""``tokenspeed serve MODEL``: the server process and the engine processes behind it."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.arguments import add_engine_arguments, add_serving_arguments, engine_config, serving_config
from tokenspeed.cli.tokenizer_setup import tokenizer_of, unread_tools

if TYPE_CHECKING:
    from tokenspeed.config import ServingConfig
    from tokenspeed.engine.assembly import Assembly
    from tokenspeed.engine.launch import EngineHandle
    from tokenspeed.messages import EngineInfo
    from tokenspeed.plugins.specs import Spec
    from tokenspeed.serving.sockets import Sockets
    from tokenspeed.serving.tokenizer import Tokenizer

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the engine and of the server."""
    add_serving_arguments(parser, add_engine_arguments(parser))


def run(args: argparse.Namespace) -> int:
    """Serve until a signal or the engine's end. The ports are taken first, so that a conflict shows before anything is loaded."""
    engine, serving = engine_config(args), serving_config(args)
    from tokenspeed.cli.logs import configure_logging
    from tokenspeed.serving.sockets import bind_sockets

    configure_logging(serving.log_level)
    began_s = time.monotonic()
    sockets = bind_sockets(serving)
    try:
        from tokenspeed.engine.assembly import assemble
        from tokenspeed.engine.bootstrap import bootstrap
        from tokenspeed.engine.report import capacity_text
        from tokenspeed.model_tokenizer import check_tokenizer, renderer_asked
        from tokenspeed.plugins.events import EngineReadyContext, ShutdownContext
        from tokenspeed.weights.describe import describe_model

        description = describe_model(engine.model, engine.load_format)
        path = None if engine.skip_tokenizer_init else engine.tokenizer or description.tokenizer_path
        check_tokenizer(path, chat_template=serving.chat_template)
        assembly = assemble(
            engine,
            description,
            tool_call_parser=serving.tool_call_parser,
            reasoning_parser=serving.reasoning_parser,
            renderer=renderer_asked(serving.renderer, serving.chat_template),
        )
        print(assembly.explain(), flush=True)
        # This process is one of those that the plan is for: it loads its targets and tells its plugins as every other one does.
        events = bootstrap(assembly.plan, assembly.config, "server", model=description, host=assembly.host).events

        def announce(info: EngineInfo) -> None:
            seconds = time.monotonic() - began_s
            events.engine_ready(EngineReadyContext(model_name=engine.model, kv_pages=info.kv_pages, seconds=seconds))
            print(capacity_text(assembly.config, info))
            print(f"Serving {', '.join(serving.served_model_name)} at http://{serving.host}:{sockets.port}/v1 ", end="")
            print(f"(control routes at http://{serving.control_host}:{sockets.control_port})", flush=True)

        reason = "interrupted"
        try:
            code, reason = _launch_and_serve(assembly, serving, sockets, announce)
            return code
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            events.shutdown(ShutdownContext(role="server", reason=reason))
    finally:
        sockets.close()


def _launch_and_serve(
    assembly: Assembly, serving: ServingConfig, sockets: Sockets, announce: Callable[[EngineInfo], None]
) -> tuple[int, str]:
    """Exit code, and why the server ended."""
    from tokenspeed.engine.launch import launch

    with launch(assembly, log_level=serving.log_level.upper()) as handle:
        tokenizer = tokenizer_of(assembly, serving)
        if warning := unread_tools(assembly, tokenizer):
            logging.getLogger(__name__).warning("%s", warning)
        ready = False

        def once_ready(info: EngineInfo) -> None:
            nonlocal ready
            ready = True
            announce(info)

        code, reason = _serve(assembly, serving, sockets, handle, tokenizer, once_ready)
        if code == 130 or (code == 0 and not ready):  # forced, or while the engine starts, when it reads no messages
            handle.kill()
        handle.wait(5.0)
        failure = handle.poll()
        if code == 1 and failure is not None and failure.kind == "config":
            code = 2  # a setting that only the engine could judge is as wrong as any other
        return code, reason


def _serve(
    assembly: Assembly,
    serving: ServingConfig,
    sockets: Sockets,
    handle: EngineHandle,
    tokenizer: Tokenizer,
    announce: Callable[[EngineInfo], None],
) -> tuple[int, str]:
    from tokenspeed.serving.async_llm import AsyncLLM
    from tokenspeed.serving.context import ServerContext
    from tokenspeed.serving.engine_client import EngineClient
    from tokenspeed.serving.server import run_server

    def last_words() -> str:
        failure = handle.poll()
        return failure.error if failure is not None else ""

    client = EngineClient(
        handle.to_engine, handle.from_engine, handle.sentinels, pids=handle.pids, last_words=last_words
    )
    llm = AsyncLLM(
        client, tokenizer, log_requests=serving.enable_log_requests, log_stats=serving.enable_log_request_stats
    )
    context = ServerContext(
        llm=llm,
        config=serving,
        model_names=serving.served_model_name,
        tool_parser=_target(assembly.tool_parser),
        reasoning_parser=_target(assembly.reasoning_parser),
        grammar_checker=_checker(assembly),
        server_info={"model_path": assembly.config.model_path},
        plugins=assembly.to_json(),
    )

    code = run_server(context, sockets, on_ready=lambda: announce(llm.info))
    return code, str(client.failure) if client.failure is not None else "drained" if code == 0 else "interrupted"


def _target(spec: Spec | None) -> Any:
    if spec is None:
        return None
    from tokenspeed.plugins.selection import load_target

    return load_target(spec.target)


def _checker(assembly: Assembly) -> Any:
    from tokenspeed.plugins.selection import load_target
    from tokenspeed.serving.constraint import CheckedBefore, NoBackend

    spec = assembly.grammar_backend
    return NoBackend(assembly.absent["grammar_backend"]) if spec is None else CheckedBefore(load_target(spec.checker))
