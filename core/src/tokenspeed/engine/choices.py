"""What each slot asks of its candidates; ``plugins.selection`` does the choosing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tokenspeed.config import EngineConfig
from tokenspeed.engine.accelerators import Accelerator
from tokenspeed.engine.advice import how_to_get, left_out, where_parsers_are
from tokenspeed.errors import ConfigError, PluginError
from tokenspeed.interfaces.platform import Platform, PlatformContext
from tokenspeed.plugins.manager import PluginHost, innermost_cause
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.requirements import missing_requirements
from tokenspeed.plugins.selection import Choice, Need, load_target, owners, select
from tokenspeed.plugins.specs import (
    KernelSpec,
    KVStoreSpec,
    ModelSpec,
    PlatformSpec,
    RendererSpec,
    Spec,
)

if TYPE_CHECKING:
    from tokenspeed.weights.describe import ModelDescription

__all__ = [
    "check_kv_store",
    "choose_kv_store",
    "choose_model",
    "choose_parser",
    "choose_platform",
    "choose_renderer",
    "device_name",
    "make_platform",
    "usable_kernels",
]


def choose_platform(
    host: PluginHost, device: str, accelerators: Callable[[], list[Accelerator]]
) -> Choice[PlatformSpec]:
    """The platform for ``--device``.

    Raises:
        PluginError: nothing is detected, a detection that counts fails, or an accelerator would be left idle although ``device`` is ``auto``.
    """
    candidates = host.registry.specs("platform")
    failures: dict[PlatformSpec, str] = {}

    def fits(spec: PlatformSpec) -> str:
        try:
            description = load_target(spec.detect)()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            failures[spec] = innermost_cause(error)
            return f"detection failed: {failures[spec]}"
        return "finds no such device here" if description is None else ""

    flag = None if device == "auto" else device
    choice = select(
        "platform",
        candidates,
        flag=flag,
        flag_name="--device",
        active=host.active,
        fits=fits,
        names=lambda spec: tuple(dict.fromkeys((spec.device_type, spec.name))),
        excluded=host.broken,
    )
    if flag is None:
        for c in candidates:
            if c.automatic and c.spec in failures:
                raise PluginError(
                    f"{failures[c.spec]}\nplatform {c.name} failed to detect its device; --device names another"
                )
        _refuse_idle(host, choice, accelerators())
    return choice


def _refuse_idle(host: PluginHost, choice: Choice[PlatformSpec], present: Sequence[Accelerator]) -> None:
    if choice.spec.device_type != "cpu" or not present:
        return
    causes = "".join(f"{cause}\nplugin {plugin} is broken and may have served it\n" for plugin, cause in host.broken)
    one = present[0]
    raise PluginError(
        f"{causes}{one.what} is present ({one.evidence}), but no active plugin serves it: "
        f"{how_to_get(host, one.plugin)}, or run on the CPU with --device cpu"
    )


def device_name(host: PluginHost, choice: Choice[PlatformSpec]) -> str:
    """The ``--device`` text that names the chosen platform and nothing else."""
    device_type = choice.spec.device_type
    owners = [c for c in host.registry.specs("platform") if device_type in (c.spec.device_type, c.spec.name)]
    return device_type if len(owners) == 1 else choice.winner.name


def make_platform(
    choice: Choice[PlatformSpec], config: EngineConfig, options: Mapping[str, Mapping[str, Any]]
) -> Platform:
    """The platform object that assembly reads defaults from, as rank 0 sees it. A platform that cannot be made is fatal, cause first."""
    context = PlatformContext(
        threads=config.num_threads,
        local_world_size=config.parallel.tensor_parallel_size,
        options=options.get(choice.winner.plugin, {}),
    )
    try:
        platform: Platform = load_target(choice.spec.target)(context)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise PluginError(f"{innermost_cause(error)}\nplatform {choice.winner.name} cannot be used") from error
    return platform


def choose_model(
    host: PluginHost, model: ModelDescription, platform: str, preferences: Sequence[str] = ()
) -> Choice[ModelSpec]:
    """The class for the model's architecture; the more specific of two wins, then the platform's order."""

    def fits(spec: ModelSpec) -> str:
        if (
            model.gguf_architecture
        ):  # its config is derived, so that only a plugin that knows the family's files can vouch for it
            if model.gguf_architecture not in spec.gguf_architectures:
                return (
                    f"serves {', '.join(spec.gguf_architectures)} as GGUF"
                    if spec.gguf_architectures
                    else "serves no GGUF"
                )
        elif model.architecture not in spec.architectures:
            return f"serves {', '.join(spec.architectures or spec.gguf_architectures)}"
        if spec.model_type is not None and spec.model_type != model.model_type:
            return f"serves model_type {spec.model_type}, not {model.model_type}"
        return ""

    family = (model.model_type or model.architecture).replace("_", "-").lower()
    asked = (
        f"GGUF architecture {model.gguf_architecture}"
        if model.gguf_architecture
        else f"architecture {model.architecture}"
    )
    advice = (
        f"no installed plugin serves {asked} ({model.name}). Plugins for models are named "
        f"tokenspeed-plugin-models-FAMILY: try {how_to_get(host, f'tokenspeed-plugin-models-{family}')}"
    )
    if out := [name for name in left_out(host) if name.startswith("models-") and name not in advice]:
        advice += f"; --plugins also leaves out {', '.join(out)}"
    return select(
        "model class",
        host.registry.specs("model"),
        preferences=preferences,
        platform=platform,
        active=host.active,
        fits=fits,
        specificity=lambda spec: 1 if spec.model_type is None else 2,
        excluded=host.broken,
        nothing_fits=advice,
    )


_P = TypeVar("_P", bound=Spec)


def choose_parser(
    host: PluginHost,
    candidates: Sequence[Contribution[_P]],
    *,
    what: str,
    flag_name: str,
    asked: str | None,
    wanted: str,
    model: Choice[ModelSpec],
) -> tuple[Choice[_P] | None, str]:
    """A parser of one kind, and a warning where the model's own (``wanted``) is not there; ``auto`` does not fail a start for it."""
    if asked is None or (asked == "auto" and not wanted):
        return None, ""
    if asked != "auto":
        choice = select(what, candidates, flag=asked, flag_name=flag_name, active=host.active, excluded=host.broken)
        return choice, ""
    if not any(wanted in (c.spec.name, c.name, *getattr(c.spec, "aliases", ())) for c in candidates):
        return None, (
            f"{what} {wanted}, which model {model.winner.name} uses, is not active, and what it would find stays text; "
            f"{where_parsers_are(host, wanted, candidates, flag_name)}"
        )
    need = Need(wanted, f"model {model.winner.name}")
    return select(what, candidates, need=need, active=host.active, excluded=host.broken), ""


def choose_renderer(
    host: PluginHost, asked: str | None, model: Choice[ModelSpec]
) -> tuple[Choice[RendererSpec] | None, str]:
    """The renderer, or ``None`` for the tokenizer's chat template, and a warning where the model's own renderer is not there."""
    candidates = host.registry.specs("renderer")
    wanted = model.spec.renderer
    if asked is None or (asked == "auto" and not wanted):
        return None, ""
    if asked == "auto" and not any(wanted in (c.spec.name, c.name, *c.spec.aliases) for c in candidates):
        return None, (
            f"renderer {wanted}, which model {model.winner.name} uses, is not active, and chat needs a chat template; "
            f"{where_parsers_are(host, wanted, candidates, '--renderer')}"
        )
    if asked == "auto":
        need = Need(wanted, f"model {model.winner.name}")
        return select("renderer", candidates, need=need, active=host.active, excluded=host.broken), ""
    choice = select(
        "renderer", candidates, flag=asked, flag_name="--renderer", active=host.active, excluded=host.broken
    )
    return choice, ""


def choose_kv_store(host: PluginHost, asked: str | None, platform: str) -> Choice[KVStoreSpec] | None:
    """The L3 store; only a user can ask for one. Raises as ``select`` does."""
    if asked is None:
        return None
    return select(
        "KV store",
        host.registry.specs("kv_store"),
        flag=asked,
        flag_name="--kvstore",
        platform=platform,
        active=host.active,
        excluded=host.broken,
    )


def check_kv_store(choice: Choice[KVStoreSpec], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Let the chosen store's checker see the options of its plugin.

    Raises:
        ConfigError: what the checker refuses; PluginError: it failed itself, cause first.
    """
    if not choice.spec.checker:
        return
    try:
        load_target(choice.spec.checker)(options.get(choice.winner.plugin, {}))
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise PluginError(
            f"{innermost_cause(error)}\nthe options of KV store {choice.winner.name} cannot be checked"
        ) from error


def usable_kernels(host: PluginHost, platform: str, overrides: Mapping[str, str]) -> list[Contribution[KernelSpec]]:
    """Kernels that a request on this platform may be answered with. Those of plugins nobody asked for count where there is no other, or by override."""
    requirements: dict[tuple[str, ...], bool] = {}

    def runs(c: Contribution[KernelSpec]) -> bool:
        spec = c.spec
        if (
            c.off
            or (spec.platforms and platform not in spec.platforms)
            or any(n not in host.active for n in spec.needs)
        ):
            return False
        if spec.requires not in requirements:
            requirements[spec.requires] = not missing_requirements(spec.requires)
        return requirements[spec.requires]

    kernels: dict[str, list[Contribution[KernelSpec]]] = {}
    for c in host.registry.specs("kernel"):
        kernels.setdefault(f"{c.spec.family}.{c.spec.mode}", []).append(c)
    running = [c for c in host.registry.specs("kernel") if runs(c)]
    served = {(c.spec.family, c.spec.mode) for c in running if c.automatic and (c.named or not c.spec.opt_in)}

    def taken(c: Contribution[KernelSpec]) -> bool:
        operation = f"{c.spec.family}.{c.spec.mode}"
        if operation in overrides and c in owners(kernels[operation], overrides[operation]):
            return True
        if c.spec.opt_in and not c.named:
            return False
        return c.automatic or (c.spec.family, c.spec.mode) not in served

    return [c for c in running if taken(c)]
