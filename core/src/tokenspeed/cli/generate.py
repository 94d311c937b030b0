"""``tokenspeed generate MODEL``: complete prompts without a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenspeed.cli.arguments import add_engine_arguments, argument_type, engine_config
from tokenspeed.cli.readers import count, number
from tokenspeed.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from tokenspeed.llm import LLM, GeneratedText
    from tokenspeed.llm_inputs import Prompt
    from tokenspeed.messages import SamplingParams

__all__ = ["add_arguments", "run"]

_INT32 = 2**31 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, sampling, and the flags of the engine."""
    add_engine_arguments(parser)
    prompts = parser.add_argument_group("Prompts")
    prompts.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="a prompt; may be given again; - reads standard input",
    )
    prompts.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt a line")
    prompts.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message, rendered with the model's chat template"
    )
    prompts.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    sampling = parser.add_argument_group("Sampling")
    numbers: tuple[tuple[str, Callable[[str], float], float, str, str], ...] = (
        ("--max-tokens", count(1, _INT32), 128, "N", "tokens to generate at most"),
        ("--temperature", number(0, 100), 0.0, "T", "0 takes the likeliest token"),
        ("--top-k", count(0, _INT32), 0, "N", "0 is off"),
        ("--top-p", number(0, 1, above=True), 1.0, "P", "1 is off"),
        ("--min-p", number(0, 1), 0.0, "P", "0 is off"),
    )
    for name, read, default, metavar, text in numbers:
        kind = argument_type(read)
        sampling.add_argument(name, type=kind, default=default, metavar=metavar, help=f"{text} (default: %(default)s)")
    sampling.add_argument(
        "--stop",
        action="append",
        type=argument_type(_not_empty),
        default=[],
        metavar="TEXT",
        help="ends a completion; may be given again",
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="the model's end tokens do not end a completion")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt, when all are done")


def run(args: argparse.Namespace) -> int:
    """Print completions; 1 when one ended with an error."""
    import msgspec

    from tokenspeed.llm import LLM
    from tokenspeed.messages import SamplingParams

    texts = _prompts(args)
    config = engine_config(args)
    if config.skip_tokenizer_init:
        raise ConfigError("--skip-tokenizer-init: generate takes and prints text, which needs the tokenizer")
    flags = {field.name: getattr(config, field.name) for field in msgspec.structs.fields(config)}
    parallel = msgspec.structs.asdict(flags.pop("parallel"))
    model = flags.pop("model")
    flags.pop("model_path")
    params = SamplingParams(
        max_new_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=vars(args).get("seed"),
        ignore_eos=args.ignore_eos,
    )
    with LLM(model, **flags, **parallel) as llm:
        try:
            prompts = [_rendered(llm, text, args.system) for text in texts] if args.chat else texts
            results = (
                _print_stream(llm, prompts, params, args.stop)
                if len(texts) == 1 and not args.json
                else llm.generate(prompts, params, stop=args.stop)
            )
        except RequestError as refusal:  # nothing ran: what was given is wrong
            raise ConfigError(str(refusal)) from refusal
    if args.json:
        for text, result in zip(texts, results, strict=True):
            print(json.dumps(_plain(text, result)))
    elif len(texts) > 1:
        for text, result in zip(texts, results, strict=True):
            print(f"{text!r}\n{result.text}\n")
    failed = [result.error for result in results if result.finish == "error"]
    for error in failed:
        print(f"tokenspeed: {error}", file=sys.stderr)
    return 1 if failed else 0


def _prompts(args: argparse.Namespace) -> list[str]:
    texts = [_standard_input() if text == "-" else text for text in args.prompt]
    if not all(texts):
        raise ConfigError("--prompt: the text is empty; give at least one character")
    if args.prompt_file is not None:
        try:
            texts += [line for line in args.prompt_file.read_text(encoding="utf-8").splitlines() if line]
        except (OSError, ValueError) as error:
            raise ConfigError(f"--prompt-file {args.prompt_file}: cannot be read: {error}") from error
    if not texts:
        raise ConfigError("no prompt is given: use --prompt TEXT (again for more), --prompt - or --prompt-file FILE")
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat: only a chat template knows where it belongs")
    return texts


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt -: standard input is not UTF-8 text: {error}") from None


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("an empty text would end every completion at once")
    return text


def _rendered(llm: LLM, text: str, system: str | None) -> Prompt:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.render([*messages, {"role": "user", "content": text}])


def _print_stream(llm: LLM, prompts: list[Any], params: SamplingParams, stop: list[str]) -> list[GeneratedText]:
    """Print a single completion as it comes."""
    results = []
    for piece in llm.stream(prompts, params, stop=stop):
        print(piece.text, end="", flush=True)
        if piece.result is not None:
            results.append(piece.result)
    print()
    return results


def _plain(text: str, result: GeneratedText) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = {
        "prompt": text,
        "text": result.text,
        "finish": result.finish,
        "stop_reason": result.stop_reason,
        "token_ids": result.token_ids,
    }
    if result.stats is not None:
        plain["stats"] = msgspec.structs.asdict(result.stats)
    return plain
