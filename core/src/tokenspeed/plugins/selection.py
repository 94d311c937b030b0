"""One way to choose, for every kind of contribution.

Order: the user's flag; the model's stated need; specificity (models only); the platform's order; a plugin that ``--plugins`` names; priority; name. A
candidate that cannot run is never chosen, and every loser keeps its reasons. Automatic choice looks at ``automatic`` contributions, and at the others only
when none of those fits. A name that a first-party plugin has means that plugin's: one that a third party has too is written in full, ``plugin:name``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tokenspeed.errors import ConfigError, NothingFitsError, PluginError, UnusableChoiceError
from tokenspeed.plugins.discovery import BUILTIN
from tokenspeed.plugins.names import did_you_mean
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.requirements import missing_requirements
from tokenspeed.plugins.specs import Spec

__all__ = ["Choice", "Loser", "Need", "check_api", "load_target", "owners", "probe", "refusals", "select"]

_NOT_NAMED = "taken only when named by a flag or in --plugins"

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True)
class Loser:
    """A candidate that was not chosen, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Choice(Generic[S]):
    """The outcome for one slot: ``why`` the winner won; ``warning`` is set where a better one was passed over because it is broken."""

    slot: str
    winner: Contribution[S]
    why: str
    losers: tuple[Loser, ...] = ()
    warning: str = ""

    @property
    def spec(self) -> S:
        """The winner's spec."""
        return self.winner.spec


@dataclass(frozen=True)
class Need:
    """A name that something other than the user asks for: ``by`` says who, for example ``model llama``."""

    name: str
    by: str


@dataclass(frozen=True)
class _Verdict:
    """Why a candidate cannot run. ``unfit``: not made for this; ``broken``: made for this, but something of its own is missing."""

    unfit: tuple[str, ...]
    broken: tuple[str, ...]

    @property
    def reasons(self) -> str:
        return "; ".join((*self.unfit, *self.broken))


def check_api(spec: Spec) -> str:
    """A sentence that says what to upgrade when ``spec`` was written for another version of its contract, or an empty string."""
    if spec.api == spec.API:
        return ""
    what = "the plugin" if spec.api < spec.API else "tokenspeed-core"
    return f"written for version {spec.api} of the {spec.KIND.replace('_', ' ')} contract, this core speaks {spec.API}: upgrade {what}"


def load_target(target: str) -> Any:
    """Import what a spec names: ``"package.module:attribute"`` (the attribute may be dotted).

    Raises:
        PluginError: the module cannot be imported or has no such attribute; the cause comes first.
    """
    module_name, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may call sys.exit() while it is imported
        raise PluginError(f"{type(error).__name__}: {error}\n{target} cannot be loaded") from error
    return value


def _default_names(spec: Spec) -> tuple[str, ...]:
    return (spec.name, *getattr(spec, "aliases", ()))


def select(
    slot: str,
    candidates: Sequence[Contribution[S]],
    *,
    flag: str | None = None,
    flag_name: str = "",
    need: Need | None = None,
    preferences: Sequence[str] = (),
    platform: str | None = None,
    active: Collection[str] | None = None,
    fits: Callable[[S], str] = lambda _: "",
    names: Callable[[S], Sequence[str]] = _default_names,
    specificity: Callable[[S], int] = lambda _: 0,
    requirements: Callable[[tuple[str, ...]], Sequence[str]] = missing_requirements,
    excluded: Sequence[tuple[str, str]] = (),
    nothing_fits: str = "",
) -> Choice[S]:
    """Choose one of ``candidates`` for ``slot`` (a phrase for messages, for example ``attention backend (decode)``).

    Args:
        flag: what the user asked for with ``flag_name``: a name, an alias, or ``plugin:name``; never replaced by anything else.
        need: what must be taken when there is no flag.
        preferences: names in the platform's order.
        platform: name of the chosen platform; ``None`` skips the check.
        active: names of active plugins, for ``Spec.needs``; ``None`` skips the check.
        fits: what a candidate lacks for this use, or an empty string.
        names: the names a user may type for a spec.
        specificity: higher wins before anything but a flag or need; a tie at the top is an error, unless ``--plugins`` names one of the plugins.
        requirements: checks ``Spec.requires``; callers that choose often pass one that remembers.
        excluded: (plugin, cause) of broken plugins, to be named when nothing fits.
        nothing_fits: what to do about it, for the same message.

    Raises:
        ConfigError: ``flag`` names nothing that is installed.
        PluginError: nothing fits (``NothingFitsError``), the named one cannot run (``UnusableChoiceError`` where ``flag`` names it), or two plugins own
            the name.
    """
    verdicts = {c.name: _verdict(c, platform, active, fits, requirements) for c in candidates}
    if flag is not None:
        winner = _by_name(slot, candidates, flag, flag_name, names, excluded)
        why = f"{flag_name} {flag}"
    elif need is not None:
        own = [c for c in candidates if c.automatic and need.name in _spellings(c, names)]
        winner = _by_name(slot, own or candidates, need.name, f"{need.by} needs", names, excluded)
        why = f"{need.by} needs it"
    else:
        return _automatic(slot, candidates, verdicts, preferences, specificity, names, excluded, nothing_fits)
    if verdicts[winner.name].reasons:
        error = PluginError if flag is None else UnusableChoiceError
        raise error(f"{slot} {winner.name} ({why}) cannot be used: {verdicts[winner.name].reasons}")
    asked = flag if flag is not None else need.name if need is not None else ""
    losers = tuple(
        Loser(c.name, verdicts[c.name].reasons or _not_asked_for(c, asked, names))
        for c in candidates
        if c is not winner
    )
    return Choice(slot, winner, why, losers)


def _not_asked_for(c: Contribution[S], asked: str, names: Callable[[S], Sequence[str]]) -> str:
    if asked in names(c.spec):
        return f"{asked} is the first-party one's name; this one's is {c.plugin}:{asked}"
    return "another was asked for"


def refusals(
    candidates: Sequence[Contribution[S]],
    *,
    platform: str | None = None,
    active: Collection[str] | None = None,
    fits: Callable[[S], str] = lambda _: "",
    requirements: Callable[[tuple[str, ...]], Sequence[str]] = missing_requirements,
) -> dict[str, str]:
    """Why each candidate cannot run, by qualified name; an empty string where it can."""
    return {c.name: _verdict(c, platform, active, fits, requirements).reasons for c in candidates}


def _verdict(
    c: Contribution[S],
    platform: str | None,
    active: Collection[str] | None,
    fits: Callable[[S], str],
    requirements: Callable[[tuple[str, ...]], Sequence[str]],
) -> _Verdict:
    unfit = []
    away = platform is not None and c.spec.platforms and platform not in c.spec.platforms
    if away:
        unfit.append(f"runs on {', '.join(c.spec.platforms)}, not on {platform}")
    lacks = fits(c.spec)
    if lacks:
        unfit.append(lacks)
    broken = [c.off] if c.off else []
    if active is not None:
        broken += [f"needs plugin {name}, which is not active" for name in c.spec.needs if name not in active]
    broken += requirements(c.spec.requires)
    if not away and not broken and (lacking := probe(c.spec)):
        broken.append(lacking)
    return _Verdict(tuple(unfit), tuple(broken))


def probe(spec: Spec) -> str:
    """What ``spec.probe`` says that this machine lacks; an empty string for nothing, or without one."""
    if not spec.probe:
        return ""
    try:
        return str(load_target(spec.probe)())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"what it needs cannot be found out: {type(error).__name__}: {error}".partition("\n")[0]


def _spellings(c: Contribution[S], names: Callable[[S], Sequence[str]]) -> set[str]:
    return {spelling for name in names(c.spec) for spelling in (name, f"{c.plugin}:{name}")}


def owners(
    candidates: Sequence[Contribution[S]], name: str, names: Callable[[S], Sequence[str]] = _default_names
) -> list[Contribution[S]]:
    """Those that ``name`` may mean: whose full name it is, else first-party ones that have it, else all that have it."""
    having = [c for c in candidates if name in _spellings(c, names)]
    return [c for c in having if c.first_party or name not in names(c.spec)] or having


def _by_name(
    slot: str,
    candidates: Sequence[Contribution[S]],
    name: str,
    asked_by: str,
    names: Callable[[S], Sequence[str]],
    excluded: Sequence[tuple[str, str]],
) -> Contribution[S]:
    having = owners(candidates, name, names)
    if len(having) == 1:
        return having[0]
    if having:
        raise PluginError(
            f"{asked_by} {name}: more than one plugin owns that {slot}: {', '.join(c.name for c in having)}; "
            f"write one of them in full, or remove a plugin with --plugins=-NAME"
        )
    known = sorted({spelling for c in candidates for spelling in names(c.spec)})
    broken = "".join(f"\nplugin {plugin} is broken and may have offered it: {cause}" for plugin, cause in excluded)
    raise ConfigError(
        f"{asked_by} {name or repr(name)}: no such {slot}{did_you_mean(name, known)}; installed and active: {', '.join(known) or 'none'}{broken}"
    )


def _automatic(
    slot: str,
    candidates: Sequence[Contribution[S]],
    verdicts: dict[str, _Verdict],
    preferences: Sequence[str],
    specificity: Callable[[S], int],
    names: Callable[[S], Sequence[str]],
    excluded: Sequence[tuple[str, str]],
    nothing_fits: str,
) -> Choice[S]:
    place = {c.name: i for i, name in reversed(list(enumerate(preferences))) for c in owners(candidates, name, names)}

    def rank(c: Contribution[S]) -> tuple[int, int, bool, int, str]:
        return (-specificity(c.spec), place.get(c.name, len(preferences)), not c.named, -c.priority, c.spec.name)

    allowed = [c for c in candidates if not c.spec.opt_in or c.named]
    running = [c for c in allowed if not verdicts[c.name].reasons]
    ordered = sorted((c for c in running if c.automatic), key=rank) or sorted(running, key=rank)
    if not ordered:
        failing = [c for c in allowed if c.automatic and verdicts[c.name].broken and not verdicts[c.name].unfit]
        refused = [(c.name, verdicts[c.name].reasons or _NOT_NAMED) for c in candidates]
        raise NothingFitsError(
            _nothing_fits(slot, refused, excluded, nothing_fits),
            refused=refused,
            broken="; ".join(f"{c.name}: {'; '.join(verdicts[c.name].broken)}" for c in failing),
        )
    winner = ordered[0]
    _refuse_tie(slot, winner, ordered, specificity, place)

    losers = []
    for c in candidates:
        if c is winner:
            continue
        if verdicts[c.name].reasons:
            reason = verdicts[c.name].reasons
        elif c not in allowed:
            reason = _NOT_NAMED
        elif not c.automatic and winner.automatic:
            reason = "its plugin is not first-party and not named in --plugins"
        else:
            reason = _outranked(winner, c, specificity, place)
        losers.append(Loser(c.name, reason))
    better = [
        c
        for c in allowed
        if c.automatic
        and verdicts[c.name].broken
        and not verdicts[c.name].unfit
        and (rank(c) < rank(winner) or not winner.automatic)
    ]
    warning = ""
    if better:
        first = min(better, key=rank)
        warning = f"{slot}: {winner.name} is used instead of {first.name}, which cannot run: {'; '.join(verdicts[first.name].broken)}"
    return Choice(slot, winner, _won(winner, ordered, specificity, place), tuple(losers), warning)


def _refuse_tie(
    slot: str,
    winner: Contribution[S],
    ordered: Sequence[Contribution[S]],
    specificity: Callable[[S], int],
    place: Mapping[str, int],
) -> None:
    """Two plugins with one name, or two specs that match a model equally well: the user must say which, and has where ``--plugins`` names one of them."""

    def contests(c: Contribution[S]) -> bool:
        equal = specificity(c.spec) == specificity(winner.spec) and place.get(c.name) == place.get(winner.name)
        return equal and c.named == winner.named and (specificity(c.spec) > 0 or c.spec.name == winner.spec.name)

    tied = sorted((c for c in ordered if contests(c)), key=lambda c: (c.plugin != BUILTIN, c.name))
    if len(tied) > 1:
        last = tied[-1].plugin
        ways = [f"remove one with --plugins=-{last}"]
        if not winner.named:
            ways.insert(0, f"put one first with --plugins +{last}")
        if not specificity(winner.spec):
            ways.insert(0, "name one in full with its flag")
        raise PluginError(f"{slot}: {' and '.join(c.name for c in tied)} claim the same place; {', or '.join(ways)}")


def _won(
    winner: Contribution[S],
    ordered: Sequence[Contribution[S]],
    specificity: Callable[[S], int],
    place: Mapping[str, int],
) -> str:
    if len(ordered) == 1:
        return "the only one that fits" if winner.automatic else "nothing first-party fits"
    second = ordered[1]
    if specificity(second.spec) < specificity(winner.spec):
        return "the most specific match"
    if winner.name in place:
        return "first in the platform's order"
    if winner.named and not second.named:
        return "named in --plugins"
    return f"highest priority ({winner.priority.name})" if second.priority < winner.priority else "first by name"


def _outranked(
    winner: Contribution[S], c: Contribution[S], specificity: Callable[[S], int], place: Mapping[str, int]
) -> str:
    if specificity(c.spec) < specificity(winner.spec):
        return "matches less specifically"
    if winner.name in place:
        return "stands later in the platform's order" if c.name in place else "not in the platform's order"
    if winner.named and not c.named:
        return f"--plugins names {winner.plugin}"
    if c.priority < winner.priority:
        return f"priority {c.priority.name}, below {winner.priority.name}"
    return "same priority, later by name"


def _nothing_fits(
    slot: str, refused: Sequence[tuple[str, str]], excluded: Sequence[tuple[str, str]], advice: str
) -> str:
    lines = [f"{cause}\nplugin {plugin} is broken and may have offered a {slot}" for plugin, cause in excluded]
    lines.append(f"no {slot} fits" + (f": {advice}" if advice else ""))
    lines += [f"  {name}: {reason}" for name, reason in refused]
    return "\n".join(lines)
