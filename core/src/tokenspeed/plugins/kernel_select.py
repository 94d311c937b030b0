"""Kernels by family and mode: the same choice as for every other kind, asked for often and therefore remembered.

Order: override (which must still pass the gates), gates, objective, what was measured on this device, then the platform-independent rest of ``selection``.

Objectives: ``latency`` and ``throughput`` leave out kernels that are meant for others; ``portability`` takes those that run on any platform;
``determinism`` those that give one call the same bits each time, which a spec denies by listing other objectives; ``debug`` the references. A kernel
that lists the objective itself passes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tokenspeed.errors import ConfigError, NothingFitsError, PluginError, UnusableChoiceError
from tokenspeed.plugins.kernel_times import KernelTimes, Measurement
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.requirements import missing_requirements
from tokenspeed.plugins.selection import Choice, Loser, load_target, owners, refusals, select
from tokenspeed.plugins.specs import KERNEL_OBJECTIVES, KernelSpec, Priority

__all__ = ["KernelQuery", "KernelRegistry", "check_overrides"]

_log = logging.getLogger(__name__)

_Key = tuple[str, str, str, str, frozenset[str], Hashable, str]


class KernelQuery(Protocol):
    """What is read of an ``interfaces.kernel.KernelRequest``."""

    @property
    def family(self) -> str: ...
    @property
    def mode(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def shape(self) -> Mapping[str, int]: ...
    @property
    def objective(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class _Anything:
    """A request of which no more is known than its element type."""

    family: str
    mode: str
    dtype: str
    features: frozenset[str]
    shape: Mapping[str, int]
    layout: str = ""
    objective: str = "latency"


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


def _known_objective(name: str) -> str:
    if name not in KERNEL_OBJECTIVES:
        raise ConfigError(
            f"no objective is named {name!r}{did_you_mean(name, KERNEL_OBJECTIVES)}; objectives are {', '.join(KERNEL_OBJECTIVES)}"
        )
    return name


def check_overrides(overrides: Mapping[str, str], contributions: Sequence[Contribution[KernelSpec]]) -> None:
    """Refuse an override of a mode or by a solution that no active plugin has.

    Raises:
        ConfigError: naming the nearest.
    """
    solutions: dict[str, set[str]] = {}
    for c in contributions:
        solutions.setdefault(f"{c.spec.family}.{c.spec.mode}", set()).update((c.spec.name, c.name))
    for operation, solution in overrides.items():
        if operation not in solutions:
            raise ConfigError(
                f"--kernel {operation}={solution}: no active plugin has kernels for {operation}"
                f"{did_you_mean(operation, solutions)}; known: {', '.join(sorted(solutions)) or 'none'}"
            )
        known = solutions[operation]
        if solution not in known:
            raise ConfigError(
                f"--kernel {operation}={solution}: no such solution{did_you_mean(solution, known)}; "
                f"known: {', '.join(sorted(name for name in known if ':' in name))}"
            )


class KernelRegistry:
    """Chooses, imports and builds kernels for one rank. Not thread safe.

    Args:
        contributions: kernels of all active plugins.
        platform_name: the platform that they must run on.
        capability: what its device reports, compared with ``KernelSpec.capability``.
        overrides: ``family.mode`` to solution (``name`` or ``plugin:name``).
        objective: replaces the objective of every request where it is not empty (``--kernel-objective``).
        context_factory: given a plugin's name, makes the ``interfaces.kernel.KernelContext`` for its ``factory`` kernels.
        active: names of active plugins, for ``Spec.needs``; ``None`` skips that check.
        times: what was measured on the device: of the candidates that fit, the fastest is taken for a request that is in there.
    """

    def __init__(
        self,
        contributions: Sequence[Contribution[KernelSpec]],
        *,
        platform_name: str,
        capability: tuple[int, ...] = (),
        overrides: Mapping[str, str] | None = None,
        objective: str = "",
        context_factory: Callable[[str], object] | None = None,
        active: Collection[str] | None = None,
        times: KernelTimes | None = None,
    ) -> None:
        self._times = times
        self.platform_name = platform_name
        self.capability = capability
        self.overrides = dict(overrides or {})
        self.objective = _known_objective(objective) if objective else ""
        self._context_factory = context_factory
        self._active = active
        self._requirements = functools.cache(missing_requirements)
        self._by_mode: dict[str, list[Contribution[KernelSpec]]] = {}
        for c in contributions:
            self._by_mode.setdefault(f"{c.spec.family}.{c.spec.mode}", []).append(c)
        self._limits = {
            operation: sorted({trait for c in kernels for trait in c.spec.traits})
            for operation, kernels in self._by_mode.items()
        }
        self._built: dict[str, Callable[..., Any]] = {}
        self._chosen: dict[_Key, Callable[..., Any]] = {}
        check_overrides(self.overrides, contributions)

    @property
    def operations(self) -> list[str]:
        """``family.mode`` of everything that has a candidate."""
        return sorted(self._by_mode)

    def select(self, request: KernelQuery) -> Callable[..., Any]:
        """The kernel for a request, the same object for equal requests.

        Raises:
            NothingFitsError: none fits; every candidate's gate is listed.
            PluginError: the override cannot run.
        """
        key = self._key(request)
        kernel = self._chosen.get(key)
        if kernel is None:
            kernel = self._chosen[key] = self._load(request)
        return kernel

    def choose(self, request: KernelQuery) -> Choice[KernelSpec]:
        """The choice behind ``select``, without importing anything. Raises as ``select`` does."""
        operation = f"{request.family}.{request.mode}"
        if request.objective not in KERNEL_OBJECTIVES:
            raise PluginError(
                f"no objective is named {request.objective!r}; objectives are {', '.join(KERNEL_OBJECTIVES)}"
            )
        candidates = self._by_mode.get(operation, [])
        if not candidates:
            raise NothingFitsError(
                f"no active plugin has a kernel for {operation}{did_you_mean(operation, self._by_mode)}; "
                f"known: {', '.join(sorted(self._by_mode)) or 'none'}"
            )
        override = self.overrides.get(operation)
        choice = select(
            f"kernel {operation}",
            candidates,
            flag=override,
            flag_name=f"--kernel {operation}",
            platform=self.platform_name,
            active=self._active,
            fits=lambda spec: self._gate(spec, request, with_objective=override is None),
            requirements=self._requirements,
        )
        return choice if override is not None else self._fastest(choice, candidates, request)

    def candidates(self, request: KernelQuery) -> dict[str, str]:
        """Each candidate as ``plugin:name`` with the gates that refuse it; an empty text where it can serve the request."""
        return refusals(
            self._by_mode.get(f"{request.family}.{request.mode}", []),
            platform=self.platform_name,
            active=self._active,
            fits=lambda spec: self._gate(spec, request, with_objective=True),
            requirements=self._requirements,
        )

    def check_override(self, operation: str, dtype: str) -> None:
        """Refuse an override that cannot run here whatever the request: another platform or capability, a missing requirement, none of the element types.

        Raises:
            PluginError: with the reason.
        """
        family, _, mode = operation.partition(".")
        named = self.overrides[operation]
        own = owners(self._by_mode[operation], named)

        def fits(spec: KernelSpec) -> str:
            asked = _Anything(family=family, mode=mode, dtype=dtype, features=frozenset(), shape={})
            # What takes fp32 may be asked for that whatever the model's type, as the sampler's kernels are.
            dtypes = () if "fp32" in spec.dtypes else spec.dtypes
            return self._gate(
                dataclasses.replace(spec, traits=(), dtypes=dtypes, layouts=()), asked, with_objective=False
            )

        reasons = refusals(
            own, platform=self.platform_name, active=self._active, fits=fits, requirements=self._requirements
        )
        if all(reasons.values()):
            text = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
            raise UnusableChoiceError(f"--kernel {operation}={named} cannot be used: {text}")

    def _measured(self, request: KernelQuery) -> Measurement | None:
        """What was measured for a request; features do not count, but for the type of the pages."""
        if self._times is None:
            return None
        kv = next((name[3:] for name in request.features if name.startswith("kv_")), "")
        operation = f"{request.family}.{request.mode}"
        return self._times.find(operation, request.dtype, request.shape, request.layout, kv)

    def _fastest(
        self, choice: Choice[KernelSpec], candidates: Sequence[Contribution[KernelSpec]], request: KernelQuery
    ) -> Choice[KernelSpec]:
        """The choice that the measurements make of ``choice``; the same where there is none."""
        found = self._measured(request)
        if found is None:
            return choice
        fitting = [name for name, gate in self.candidates(request).items() if not gate and name in found.us]
        if len(fitting) < 2:
            return choice
        best, second = sorted(fitting, key=lambda name: found.us[name])[:2]
        why = f"measured {found.us[best]:.4g} us, {second} {found.us[second]:.4g}, on {found.date}"
        if best == choice.winner.name:
            return dataclasses.replace(choice, why=why)
        former = Loser(choice.winner.name, f"measured {found.us.get(choice.winner.name, float('inf')):.4g} us")
        losers = (former, *(loser for loser in choice.losers if loser.name != best))
        winner = next(c for c in candidates if c.name == best)
        return dataclasses.replace(choice, winner=winner, why=why, losers=losers)

    def build(self, name: str, operation: str) -> Callable[..., Any]:
        """The candidate ``plugin:name`` of an operation, chosen or not. Raises ``PluginError`` where it cannot be loaded."""
        return self._build(next(c for c in self._by_mode[operation] if c.name == name))

    def explain(self, request: KernelQuery) -> list[tuple[str, str]]:
        """Each candidate as ``plugin:name`` with the gate or rank that refused it; the one that would be taken comes first, with an empty text."""
        try:
            choice = self.choose(request)
        except PluginError:
            return [
                (name, gate or "fits, but the choice is refused") for name, gate in self.candidates(request).items()
            ]
        return [(choice.winner.name, ""), *((loser.name, loser.reason) for loser in choice.losers)]

    def _key(self, request: KernelQuery) -> _Key:
        """A request by its class: shapes are one where no candidate's limits tell them apart, unless one was measured itself."""
        shape: Hashable = tuple(sorted(request.shape.items()))
        if self._measured(request) is None:
            limits = self._limits.get(f"{request.family}.{request.mode}", ())
            shape = tuple(
                None if (size := request.shape.get(name)) is None else low <= size <= high for name, low, high in limits
            )
        return (request.family, request.mode, request.dtype, request.layout, request.features, shape, request.objective)

    def _gate(self, spec: KernelSpec, request: KernelQuery, *, with_objective: bool) -> str:
        """The first thing that keeps ``spec`` from serving ``request``, or an empty string."""
        if spec.capability is not None:
            low, high = spec.capability
            if not self.capability or not low <= self.capability <= high:
                here = _dotted(self.capability) or "none"
                return f"capability {_dotted(low)} to {_dotted(high)}, the device has {here}"
        if spec.dtypes and request.dtype not in spec.dtypes:
            return f"takes {', '.join(spec.dtypes)}, not {request.dtype}"
        if spec.layouts and request.layout and request.layout not in spec.layouts:
            return f"takes layout {', '.join(spec.layouts)}, not {request.layout}"
        lacking = sorted(request.features - spec.features)
        if lacking:
            return f"lacks {', '.join(lacking)}"
        for trait, low_size, high_size in spec.traits:
            size = request.shape.get(trait)
            if size is None:
                return f"takes {trait} {low_size} to {high_size}, and the caller does not fix {trait}"
            if not low_size <= size <= high_size:
                return f"takes {trait} {low_size} to {high_size}, not {size}"
        return self._objective_gate(spec, self.objective or request.objective) if with_objective else ""

    def _objective_gate(self, spec: KernelSpec, objective: str) -> str:
        """What a spec says of objectives decides; one that says nothing is judged by what it is."""
        if objective in spec.objectives:
            return ""
        if spec.objectives:
            return f"meant for {', '.join(spec.objectives)}, not {objective}"
        if objective == "portability" and spec.platforms:
            return f"runs on {', '.join(spec.platforms)} alone, and portability takes what runs on any platform"
        if objective == "debug" and spec.priority > Priority.REFERENCE:
            return f"priority {spec.priority.name}, and debug takes references"
        return ""

    def _load(self, request: KernelQuery) -> Callable[..., Any]:
        """Import and build the choice. An automatic one that cannot be loaded is turned off, and the next is taken with a warning."""
        operation = f"{request.family}.{request.mode}"
        failed: list[tuple[str, PluginError]] = []
        while True:
            try:
                choice = self.choose(request)
            except PluginError as error:
                if not failed:
                    raise
                text = f"{failed[0][1]}\n{error}"
                if isinstance(error, NothingFitsError):
                    raise NothingFitsError(text, broken=error.broken, refused=error.refused) from failed[0][1]
                raise PluginError(text) from failed[0][1]
            try:
                kernel = self._build(choice.winner)
            except PluginError as error:
                if operation in self.overrides:
                    raise
                failed.append((choice.winner.name, error))
                self._turn_off(operation, choice.winner, str(error).splitlines()[0])
                continue
            for name, cause in failed:
                _log.warning("kernel %s: %s is used instead of %s: %s", operation, choice.winner.name, name, cause)
            if choice.warning and not failed:
                _log.warning("%s", choice.warning)
            return kernel

    def _build(self, winner: Contribution[KernelSpec]) -> Callable[..., Any]:
        spec = winner.spec
        built_key = f"{winner.plugin}|{spec.target}"
        if built_key not in self._built:
            target: Callable[..., Any] = load_target(spec.target)
            if spec.factory:
                if self._context_factory is None:
                    raise PluginError(
                        f"kernel {winner.name} is built by a factory, and this registry has no context for it"
                    )
                try:
                    target = target(self._context_factory(winner.plugin))
                except ConfigError:  # a setting that the user must put right; another kernel would hide it
                    raise
                except Exception as error:
                    raise PluginError(
                        f"{type(error).__name__}: {error}\nkernel {winner.name} cannot be built"
                    ) from error
            self._built[built_key] = target
        return self._built[built_key]

    def _turn_off(self, operation: str, loser: Contribution[KernelSpec], cause: str) -> None:
        kept = self._by_mode[operation]
        kept[kept.index(loser)] = replace(loser, off=f"cannot be loaded: {cause}")
