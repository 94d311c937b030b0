"""One way to choose: flag, need, specificity, platform's order, priority, name; every loser keeps its reason; nothing explicit is ever replaced."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.errors import ConfigError, NothingFitsError, PluginError
from tokenspeed.plugins.registry import Contribution
from tokenspeed.plugins.selection import Choice, Need, load_target, refusals, select
from tokenspeed.plugins.specs import Priority, ToolParserSpec

REFERENCE, PORTABLE, PERFORMANT = Priority.REFERENCE, Priority.PORTABLE, Priority.PERFORMANT


def parser(
    name: str,
    plugin: str = "ours",
    *,
    automatic: bool = True,
    named: bool = False,
    off: str = "",
    first_party: bool = True,
    **spec: Any,
) -> Any:
    spec.setdefault("target", "nowhere:X")
    own = ToolParserSpec(name=name, **spec)
    return Contribution(plugin, own, automatic=automatic, named=named, off=off, first_party=first_party)


def choose(*candidates: Any, **arguments: Any) -> Choice[ToolParserSpec]:
    return select("tool parser", candidates, **arguments)


def reasons(choice: Choice[Any]) -> dict[str, str]:
    return {loser.name: loser.reason for loser in choice.losers}


def test_priority_then_name_decide() -> None:
    choice = choose(parser("b", priority=PERFORMANT), parser("a", priority=PERFORMANT), parser("c", priority=PORTABLE))
    assert choice.winner.name == "ours:a"
    assert reasons(choice) == {
        "ours:b": "same priority, later by name",
        "ours:c": "priority PORTABLE, below PERFORMANT",
    }


def test_the_platform_ranks_what_it_lists_and_the_rest_follows_by_priority() -> None:
    candidates = [parser("a", priority=PERFORMANT), parser("b"), parser("c", priority=REFERENCE)]
    choice = choose(*candidates, preferences=("c", "b"))
    assert choice.winner.name == "ours:c"
    assert choice.why == "first in the platform's order"
    assert reasons(choice) == {
        "ours:a": "not in the platform's order",
        "ours:b": "stands later in the platform's order",
    }
    assert choose(*candidates, preferences=("ghost",)).winner.name == "ours:a"


def test_a_named_plugin_ranks_as_plugin() -> None:
    choice = choose(parser("a", priority=Priority.SPECIALIZED), parser("b", "theirs", priority=REFERENCE, named=True))
    assert choice.winner.name == "theirs:b"
    assert choice.why == "named in --plugins"
    assert reasons(choice) == {"ours:a": "--plugins names theirs"}
    choice = choose(parser("a", priority=Priority.PLUGIN), parser("b", "theirs", priority=REFERENCE, named=True))
    assert choice.winner.name == "theirs:b"


def test_installing_a_plugin_changes_nothing() -> None:
    before = choose(parser("a", priority=REFERENCE))
    after = choose(parser("a", priority=REFERENCE), parser("b", "theirs", priority=PERFORMANT, automatic=False))
    assert after.winner == before.winner
    assert reasons(after) == {"theirs:b": "its plugin is not first-party and not named in --plugins"}


def test_any_plugin_is_used_where_nothing_first_party_fits() -> None:
    choice = choose(parser("a", platforms=("cuda",)), parser("b", "theirs", automatic=False), platform="cpu")
    assert choice.winner.name == "theirs:b"
    assert choice.why == "nothing first-party fits"


def test_a_flag_takes_any_installed_plugin_by_name_alias_or_in_full() -> None:
    candidates = [parser("a", priority=PERFORMANT), parser("b", "theirs", automatic=False, aliases=("bee",))]
    for flag in ("b", "bee", "theirs:b", "theirs:bee"):
        choice = choose(*candidates, flag=flag, flag_name="--tool-call-parser")
        assert choice.winner.name == "theirs:b"
        assert choice.why == f"--tool-call-parser {flag}"


def test_an_explicit_choice_is_never_replaced_and_fails_with_every_reason() -> None:
    candidates = [
        parser("a"),
        parser(
            "b",
            platforms=("cuda",),
            requires=("a-package-nobody-has>=2",),
            needs=("helper",),
            off="written for version 9",
        ),
    ]
    with pytest.raises(PluginError) as error:
        choose(*candidates, flag="b", flag_name="--x", platform="cpu", active=["ours"])
    for phrase in (
        "not on cpu",
        "a-package-nobody-has>=2 (not installed)",
        "needs plugin helper",
        "written for version 9",
    ):
        assert phrase in str(error.value)


def test_plug_04_an_unknown_name_names_the_nearest_and_what_is_known() -> None:
    with pytest.raises(ConfigError) as error:
        choose(
            parser("hermes"),
            parser("qwen"),
            flag="hermse",
            flag_name="--tool-call-parser",
            excluded=[("sick", "ImportError: x")],
        )
    assert "did you mean 'hermes'?" in str(error.value)
    assert "hermes, qwen" in str(error.value)
    assert "plugin sick is broken" in str(error.value)


@pytest.mark.parametrize("aliased", [False, True], ids=["name", "alias"])
def test_plug_06_two_plugins_that_own_a_name_are_both_listed_in_full(aliased: bool) -> None:
    second = parser("other", "p2", aliases=("hermes",)) if aliased else parser("hermes", "p2")
    candidates = [parser("hermes", "p1"), second]
    with pytest.raises(PluginError) as error:
        choose(*candidates, flag="hermes", flag_name="--tool-call-parser")
    assert "p1:hermes" in str(error.value)
    assert second.name in str(error.value)
    assert choose(*candidates, flag="p1:hermes", flag_name="--x").winner.plugin == "p1"


def theirs(name: str, plugin: str = "theirs", **more: Any) -> Any:
    return parser(name, plugin, first_party=False, **{"automatic": False} | more)


@pytest.mark.parametrize("more", [{}, {"named": True, "automatic": True}], ids=["installed", "named"])
@pytest.mark.parametrize("name", ["hermes", "qwen"], ids=["name", "alias"])
def test_plug_06_a_name_of_a_first_party_plugin_stays_its_own(name: str, more: dict[str, Any]) -> None:
    ours = parser("hermes", aliases=("qwen",))
    for other in (theirs(name, **more), theirs("other", aliases=(name,), **more)):
        choice = choose(ours, other, flag=name, flag_name="--tool-call-parser")
        assert choice.winner.name == "ours:hermes"
        assert reasons(choice) == {
            other.name: f"{name} is the first-party one's name; this one's is theirs:{name}",
        }
        assert choose(ours, other, flag=f"theirs:{name}", flag_name="--x").winner is other
        assert choose(ours, other, need=Need(name, "model m")).winner.name == "ours:hermes"


def test_plug_06_two_third_parties_that_own_a_name_are_both_listed_in_full() -> None:
    with pytest.raises(PluginError) as error:
        choose(parser("x"), theirs("own", "p1"), theirs("o", "p2", aliases=("own",)), flag="own", flag_name="--x")
    assert "p1:own, p2:o" in str(error.value)


def test_a_platform_s_order_means_the_first_party_owner_of_a_name() -> None:
    candidates = [parser("sdpa", priority=REFERENCE), theirs("sdpa", named=True, automatic=True), parser("z")]
    choice = choose(*candidates, preferences=("sdpa",))
    assert choice.winner.name == "ours:sdpa"
    assert reasons(choice)["theirs:sdpa"] == "not in the platform's order"


def test_plug_06_an_automatic_choice_between_two_owners_of_a_name_is_refused() -> None:
    candidates = [parser("hermes", "p1", priority=PERFORMANT), parser("hermes", "p2"), parser("z", "p3")]
    with pytest.raises(PluginError, match="p1:hermes and p2:hermes claim the same place; name one in full"):
        choose(*candidates)
    named = [parser("hermes", "p1", named=True), parser("hermes", "p2", named=True)]
    with pytest.raises(PluginError, match="p1:hermes and p2:hermes claim the same place"):
        choose(*named)


def test_plug_06_of_two_owners_of_a_name_the_one_that_plugins_names_is_taken() -> None:
    candidates = [parser("hermes", "p1", priority=PERFORMANT), parser("hermes", "p2", named=True), parser("z", "p3")]
    assert choose(*candidates).winner.name == "p2:hermes"


def test_a_need_prefers_the_owner_that_automatic_choice_may_take() -> None:
    candidates = [parser("a", priority=PERFORMANT), parser("b"), parser("b", "theirs", automatic=False)]
    choice = choose(*candidates, need=Need("b", "model m"))
    assert choice.winner.name == "ours:b"
    assert choice.why == "model m needs it"
    assert choose(*candidates, need=Need("b", "model m"), flag="a", flag_name="--x").winner.name == "ours:a"


def test_opt_in_is_taken_only_when_named() -> None:
    with pytest.raises(PluginError, match="taken only when named"):
        choose(parser("a", opt_in=True))
    assert choose(parser("a", opt_in=True, named=True)).winner.name == "ours:a"
    assert choose(parser("a", opt_in=True), flag="a", flag_name="--x").winner.name == "ours:a"


def test_the_more_specific_match_wins_and_a_tie_is_an_error() -> None:
    def by_priority(spec: ToolParserSpec) -> int:
        return 2 if spec.description == "specific" else 1

    broad, narrow = parser("a", priority=PERFORMANT), parser("b", description="specific", priority=REFERENCE)
    choice = choose(broad, narrow, specificity=by_priority)
    assert choice.winner.name == "ours:b"
    assert choice.why == "the most specific match"
    assert reasons(choice) == {"ours:a": "matches less specifically"}
    with pytest.raises(PluginError, match=r"ours:b and theirs:c claim the same place; put one first with --plugins"):
        choose(broad, narrow, parser("c", "theirs", description="specific"), specificity=by_priority)
    choice = choose(
        broad, narrow, theirs("c", description="specific", named=True, automatic=True), specificity=by_priority
    )
    assert choice.winner.name == "theirs:c"
    assert reasons(choice)["ours:b"] == "--plugins names theirs"
    assert choose(narrow, theirs("d", named=True, automatic=True), specificity=by_priority).winner is narrow


def test_nothing_fits_lists_every_reason_broken_plugins_first() -> None:
    with pytest.raises(NothingFitsError) as error:
        choose(
            parser("a", platforms=("cuda",)),
            platform="cpu",
            excluded=[("sick", "ImportError: x")],
            nothing_fits="install one",
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "ImportError: x"
    assert "no tool parser fits: install one" in lines
    assert lines[-1] == "  ours:a: runs on cuda, not on cpu"
    assert error.value.refused == (("ours:a", "runs on cuda, not on cpu"),)


def test_a_better_candidate_that_is_broken_is_passed_over_with_a_warning_that_names_both() -> None:
    choice = choose(parser("a", priority=PERFORMANT, requires=("a-package-nobody-has",)), parser("b"))
    assert choice.winner.name == "ours:b"
    assert "ours:b" in choice.warning
    assert "ours:a" in choice.warning
    assert "a-package-nobody-has" in choice.warning


@pytest.mark.parametrize(
    "other",
    [
        parser("a", priority=PERFORMANT, platforms=("cuda",), requires=("a-package-nobody-has",)),
        parser("a", priority=REFERENCE, requires=("a-package-nobody-has",)),
        parser("a", "theirs", priority=PERFORMANT, automatic=False, requires=("a-package-nobody-has",)),
    ],
    ids=["made for another platform", "would not have won", "not considered"],
)
def test_no_warning_for_what_would_not_have_been_chosen(other: Any) -> None:
    assert choose(other, parser("b"), platform="cpu").warning == ""


def test_refusals_tell_what_each_lacks() -> None:
    found = refusals([parser("a"), parser("b")], fits=lambda spec: "too small" if spec.name == "b" else "")
    assert found == {"ours:a": "", "ours:b": "too small"}


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("module_nobody_has:X", "ModuleNotFoundError"),
        ("tokenspeed.errors:Nothing", "AttributeError"),
        ("leaving:X", "SystemExit"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_a_plugin_error_cause_first(folder: Any, target: str, cause: str) -> None:
    folder.write_module("leaving", "import sys; sys.exit(3)")
    with pytest.raises(PluginError) as error:
        load_target(target)
    assert str(error.value).startswith(cause)
    assert target in str(error.value)


def test_a_dotted_attribute_is_followed() -> None:
    assert load_target("tokenspeed.plugins.specs:Priority.PORTABLE") is PORTABLE


@given(st.permutations(range(6)), st.integers(0, 5))
def test_the_order_of_candidates_never_matters(order: list[int], listed: int) -> None:
    """Entry points come in the order of the file system; a choice that followed it would differ between hosts."""
    candidates = [
        parser(f"n{i}", f"p{i % 3}", priority=list(Priority)[i % 4], named=i == 2, automatic=i != 4) for i in range(6)
    ]
    expected = select("x", candidates, preferences=(f"n{listed}",))
    choice = select("x", [candidates[i] for i in order], preferences=(f"n{listed}",))
    assert choice.winner == expected.winner
    assert choice.why == expected.why
    assert set(choice.losers) == set(expected.losers)
