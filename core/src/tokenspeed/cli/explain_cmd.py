"""``tokenspeed explain MODEL``: what every slot would choose and why each other candidate lost. Loads no weights."""

from __future__ import annotations

import argparse
import dataclasses
import json

from tokenspeed.cli.arguments import add_engine_arguments, add_serving_arguments, engine_config, serving_config

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what ``serve`` takes, so that its command line can be explained by changing one word."""
    parser.description = (
        "What would fill every slot if MODEL were served with these flags (platform, model class, attention backends, parsers, KV store), "
        "why, why each other candidate lost, and what serve would warn of. Loads no weights. Kernels, which backends and layers launch, are "
        "explained one operation at a time by: tokenspeed kernels explain FAMILY.MODE."
    )
    groups = add_engine_arguments(parser)
    add_serving_arguments(parser, groups)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the start-up block with every loser's reason."""
    config, serving = engine_config(args), serving_config(args)
    from tokenspeed.cli.tokenizer_setup import forewarn
    from tokenspeed.engine.assembly import assemble
    from tokenspeed.model_tokenizer import renderer_asked
    from tokenspeed.weights.describe import describe_model

    assembly = assemble(
        config,
        describe_model(config.model, config.load_format),
        tool_call_parser=serving.tool_call_parser,
        reasoning_parser=serving.reasoning_parser,
        renderer=renderer_asked(serving.renderer, serving.chat_template),
        announce=False,
    )
    assembly = dataclasses.replace(assembly, warnings=(*assembly.warnings, *forewarn(assembly, serving)))
    print(json.dumps(assembly.to_json(), indent=2) if args.json else assembly.explain(verbose=True))
    return 0
