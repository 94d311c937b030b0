"""Requests with a grammar from their arrival to their last token: they wait, they run, they end; and nothing of it touches the others."""

from __future__ import annotations

import re
import types

import pytest

from tokenspeed.engine.grammars import Grammars
from tokenspeed.messages import AbortRequest, ControlRequest, Grammar, SamplingParams, StopRequest

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])
STOP = 256
PROMPTS = [[(i * 37 + j * 11) % 900 for j in range(3 + 5 * (i % 8))] for i in range(16)]
WORD = Grammar("regex", "[a-z]+")
GRAMMARS = [
    None,
    WORD,
    Grammar("regex", "(ab|cd[0-9]*)+x?"),
    Grammar("choice", '["yes", "no", "perhaps not today"]'),
    Grammar("json_object"),
]


def params_of(i: int, **more) -> dict:
    """Greedy and random rows, with filters and penalties, by turns; a high temperature, as the stand-in's logits fall off by 1 a token."""
    if i % 4 == 0:
        return {"temperature": 0.0, "seed": i, "max_new_tokens": 20, **more}
    filters = {"top_k": 40} if i % 4 == 2 else {"presence_penalty": 2.0} if i % 4 == 3 else {}
    return {"temperature": 90.0, "seed": 1000 + i, "max_new_tokens": 20, **filters, **more}


def pattern(grammar: Grammar) -> str:
    texts = {"choice": "yes|no|perhaps not today", "json_object": r'\{("[a-z]+":[0-9]+(,"[a-z]+":[0-9]+)*)?\}'}
    return texts.get(grammar.kind, grammar.value)


@OVERLAP
@pytest.mark.parametrize("budget", [8, 64])
def test_sixteen_rows_with_and_without_grammars_say_what_each_says_alone(
    make_rig, make_compiler, constrained, overlap, budget
):
    """Prompts are longer than a chunk of 8 tokens; grammars are there 0 to 3 steps after their requests."""
    rig = make_rig(
        overlap=overlap, budget=budget, pages=300, max_num_seqs=16, end_ids=[STOP], compiler=make_compiler(3)
    )
    for rid, prompt in enumerate(PROMPTS):
        rig.add(rid, prompt, grammar=GRAMMARS[rid % 5], **params_of(rid))
    rig.run()
    stopped = 0
    for rid, prompt in enumerate(PROMPTS):
        grammar = GRAMMARS[rid % 5]
        tokens = rig.tokens(rid)
        assert tokens == constrained(prompt, grammar, SamplingParams(**params_of(rid))), rid
        if grammar is not None and rig.last(rid).finish == "stop":
            stopped += 1
            assert tokens[-1] == STOP
            assert re.fullmatch(pattern(grammar), bytes(tokens[:-1]).decode())
    assert stopped > 4


@OVERLAP
def test_matchers_survive_retractions(make_rig, make_compiler, constrained, overlap):
    rig = make_rig(overlap=overlap, pages=40, max_model_len=150, end_ids=[STOP], compiler=make_compiler())
    for rid in range(100, 140):  # short answers teach admission to expect short ones
        rig.add(rid, [rid, rid + 1, rid + 2], max_new_tokens=2)
        rig.run()
    words = Grammar("regex", "([a-z][a-z][a-z] )*")
    every = {rid: params_of(rid, max_new_tokens=60, logit_bias=((STOP, -1000.0),)) for rid in range(12)}
    for rid, params in every.items():
        rig.add(rid, PROMPTS[rid], grammar=words, **params)
    rig.run()
    for rid, params in every.items():
        assert rig.tokens(rid) == constrained(PROMPTS[rid], words, SamplingParams(**params)), rid
        assert re.fullmatch("([a-z]{3} )+[a-z]{0,3}", bytes(rig.tokens(rid)).decode())
    assert sum(rig.last(rid).stats.preemptions for rid in every) > 0


@OVERLAP
def test_a_choice_ends_by_itself_with_a_stop_token(make_rig, make_compiler, overlap):
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=make_compiler())
    grammar = Grammar("choice", '["left", "right"]')
    for rid, more in enumerate([{}, {"min_tokens": 30}, {"ignore_eos": True}, {"logit_bias": ((STOP, -100.0),)}]):
        rig.add(rid, PROMPTS[rid], grammar=grammar, max_new_tokens=50, **more)
    rig.run()
    for rid in range(4):
        assert bytes(rig.tokens(rid)[:-1]) in (b"left", b"right")
        assert (rig.tokens(rid)[-1], rig.last(rid).finish, rig.last(rid).stop_reason) == (STOP, "stop", None)


@OVERLAP
def test_ends_stand_where_the_grammar_and_the_request_allow_them(make_rig, make_compiler, overlap):
    """The stand-in would stop at once: its favourites lie far above the letters, and the stop token is the nearest of what is allowed."""
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=make_compiler())
    prompts = [p for p in ([n, n + 1, n + 2] for n in range(900)) if p]
    rig.add(0, prompts[0], grammar=WORD, max_new_tokens=12)
    rig.add(1, prompts[0], grammar=WORD, max_new_tokens=12, min_tokens=7)
    rig.add(2, prompts[0], grammar=WORD, max_new_tokens=12, ignore_eos=True)
    rig.add(3, prompts[0], grammar=WORD, max_new_tokens=12, ignore_eos=True, stop_token_ids=(900,))
    rig.run()
    assert rig.last(0).finish == "stop"
    assert re.fullmatch(b"[a-z]+", bytes(rig.tokens(0)[:-1]))
    assert len(rig.tokens(1)) > 7
    assert re.fullmatch(b"[a-z]{7,}", bytes(rig.tokens(1)[:7]))
    assert (len(rig.tokens(2)), rig.last(2).finish) == (12, "length")
    # A stop id of the request's own, which is no text of the grammar, is allowed where the grammar may end.
    assert (rig.tokens(3)[-1], rig.last(3).finish, rig.last(3).stop_reason) == (900, "stop", 900)
    assert re.fullmatch(b"[a-z]+", bytes(rig.tokens(3)[:-1]))


@OVERLAP
def test_a_grammar_begins_behind_the_end_of_reasoning(make_rig, make_compiler, expected, overlap):
    free = expected(PROMPTS[3], 6)
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=make_compiler())
    grammar = Grammar("choice", '["yes", "no"]', reasoning_end=(free[4], free[5]))
    rig.add(0, PROMPTS[3], grammar=grammar, max_new_tokens=30)
    rig.run()
    assert rig.tokens(0)[:6] == free
    assert bytes(rig.tokens(0)[6:-1]) in (b"yes", b"no")
    assert rig.last(0).finish == "stop"


@OVERLAP
def test_log_probabilities_are_those_of_the_unmasked_logits(make_rig, make_compiler, expected, overlap):
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=make_compiler())
    rig.add(0, PROMPTS[2], grammar=WORD, max_new_tokens=1, logprobs=1)
    rig.run()
    (entry,) = rig.outputs[0][0].logprobs
    assert entry.top_ids == expected(PROMPTS[2], 1)  # which no grammar allows
    assert entry.rank > 1


@OVERLAP
@pytest.mark.parametrize("masked", [False, True])
def test_not_a_number_ends_one_constrained_row_alone(make_rig, make_compiler, constrained, overlap, masked):
    """Where it stands on a token that the grammar does not allow, nothing is lost."""
    params = params_of(0)
    grammar = WORD if masked else Grammar("regex", "[\x03a-z]+")  # it is the logit of token 3
    whole = constrained(PROMPTS[0], grammar, SamplingParams(**params))
    other = constrained(PROMPTS[1], None, SamplingParams(**params))
    assert whole[0] not in other
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=make_compiler(), poison=whole[0])
    rig.add(0, PROMPTS[0], grammar=grammar, **params)
    rig.add(1, PROMPTS[1], **params)
    rig.run()
    assert rig.tokens(1) == other
    assert rig.tokens(0) == (whole if masked else whole[:1])
    assert (rig.last(0).finish == "error") == (not masked)


@OVERLAP
def test_a_grammar_that_comes_to_a_dead_end_fails_its_request_alone(make_rig, make_compiler, expected, overlap):
    """No token of the vocabulary begins with a byte that the grammar asks for next."""
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=make_compiler())
    rig.add(0, PROMPTS[0], grammar=Grammar("regex", "ab[]"))
    rig.add(1, PROMPTS[1])
    rig.run()
    assert (rig.last(0).finish, bytes(rig.tokens(0))) == ("error", b"ab")
    assert "allows no token" in rig.last(0).error
    assert rig.tokens(1) == expected(PROMPTS[1], 8)


@OVERLAP
def test_a_matcher_that_breaks_fails_its_request_alone(make_rig, make_compiler, expected, overlap, monkeypatch):
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=make_compiler())
    monkeypatch.setattr("tokenspeed.testing.tiny_grammar._Compiled.mask", lambda *_: 1 / 0)
    rig.add(0, PROMPTS[0], grammar=WORD)
    rig.add(1, PROMPTS[1])
    rig.run()
    assert "ZeroDivisionError" in rig.last(0).error
    assert rig.tokens(1) == expected(PROMPTS[1], 8)


@OVERLAP
def test_a_request_that_waits_for_its_grammar_ends_at_once_when_told_to(make_rig, make_compiler, expected, overlap):
    compiler = make_compiler(1000)
    rig = make_rig(overlap=overlap, end_ids=[STOP], compiler=compiler)
    for rid in range(3):
        rig.add(rid, PROMPTS[rid], grammar=WORD)
    rig.add(3, PROMPTS[3])
    rig.turn()
    assert rig.gauges.now().grammar_waiting == 3
    assert rig.loop.busy
    rig.send(AbortRequest(0))
    rig.send(StopRequest(1))
    rig.turn()
    assert (rig.last(0).finish, rig.last(1).finish) == ("abort", "stop")
    assert rig.last(0).stats.output_tokens == 0
    assert rig.last(0).stats.grammar_ms > 0
    assert compiler.jobs
    rig.send(AbortRequest(2))
    rig.run()
    assert not compiler.jobs  # nobody waits for it any more
    assert rig.tokens(3) == expected(PROMPTS[3], 8)
    stats = rig.gauges.now()
    assert (stats.grammar_waiting, stats.aborted, stats.finished, stats.pages_active) == (0, 2, 2, 0)


def test_a_shutdown_ends_what_waits_for_its_grammar_and_the_compiler(make_rig, make_compiler):
    compiler = make_compiler(1000)
    rig = make_rig(end_ids=[STOP], compiler=compiler)
    rig.add(0, PROMPTS[0], grammar=WORD)
    rig.send(ControlRequest(1, "shutdown"))
    rig.loop.run()
    rig.turn()
    assert rig.last(0).finish == "abort"
    assert compiler.closed


def test_a_grammar_is_compiled_once_and_waited_for_in_its_stats(make_rig, make_compiler):
    compiler = make_compiler(4)
    rig = make_rig(end_ids=[STOP], compiler=compiler)
    for rid in range(3):
        rig.add(rid, PROMPTS[rid], grammar=WORD)
    rig.run()
    rig.add(3, PROMPTS[3], grammar=WORD)
    rig.run()
    assert compiler.compiled == 1
    assert rig.last(0).stats.grammar_ms > 0
    assert rig.last(0).stats.queue_ms >= rig.last(0).stats.grammar_ms
    assert rig.last(3).stats.grammar_ms == 0
    stats = rig.gauges.now()
    assert (stats.grammar_compiles, stats.grammar_compile_seconds, stats.grammar_hits) == (1, 0.25, 1)
    assert stats.grammar_failures == 0


def test_grammars_are_kept_within_a_bound_of_bytes(make_rig, make_compiler):
    compiler = make_compiler()
    rig = make_rig(end_ids=[STOP], compiler=compiler, grammar_bytes=600)
    for turn, text in enumerate(["a+", "b+", "a+", "c+", "a+", "b+"]):  # two of them fit
        rig.add(turn, [1, 2], grammar=Grammar("regex", text))
        rig.run()
    assert compiler.compiled == 4
    assert rig.gauges.now().grammar_hits == 2


def test_a_grammar_that_fails_is_refused_with_its_reason_and_not_compiled_again(make_rig, make_compiler, expected):
    compiler = make_compiler(2)
    rig = make_rig(end_ids=[STOP], compiler=compiler)
    rig.add(0, PROMPTS[0], grammar=Grammar("regex", "(a"))
    rig.add(1, PROMPTS[1])
    rig.run()
    rig.add(2, PROMPTS[0], grammar=Grammar("regex", "(a"))
    rig.run()
    for rid in (0, 2):
        end = rig.last(rid)
        assert (end.finish, end.param, end.stats, end.status) == ("error", "grammar", None, 0)
        assert "is not closed" in end.error
    assert compiler.compiled == 1
    assert rig.tokens(1) == expected(PROMPTS[1], 8)
    assert (rig.gauges.now().grammar_failures, rig.gauges.now().failed) == (2, 2)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("regexp", "a"), "kinds are json_object, json_schema, regex"),
        (Grammar("regex", "a" * 1001), "1000 are allowed"),
        (Grammar("regex", "a", reasoning_end=(5000,)), "reasoning_end holds token id 5000"),
        (Grammar("ebnf", "a"), "are not compiled"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused(make_rig, make_compiler, grammar, says):
    rig = make_rig(end_ids=[STOP], compiler=make_compiler())
    rig.add(0, PROMPTS[0], grammar=grammar)
    rig.run()
    assert rig.last(0).finish == "error"
    assert says in rig.last(0).error
    assert not rig.loop.busy


def test_without_a_backend_or_a_stop_token_grammars_are_refused_by_name(make_rig, make_compiler, expected):
    rig = make_rig()
    rig.add(0, PROMPTS[0], grammar=WORD)
    rig.add(1, PROMPTS[1])
    rig.run()
    assert "tokenspeed-plugin-grammar-xgrammar" in rig.last(0).error
    assert rig.tokens(1) == expected(PROMPTS[1], 8)
    rig = make_rig(compiler=make_compiler())
    rig.add(0, PROMPTS[0], grammar=WORD)
    rig.run()
    assert "no token that ends a text" in rig.last(0).error


def test_a_request_waits_for_its_grammar_for_a_bounded_time(make_compiler):
    """The longest first, each by its own time; a grammar that nobody waits for any more is not compiled."""
    now, compiler = [0.0], make_compiler(1000)
    grammars = Grammars(compiler, stop_ids=(STOP,), wait_s=10.0, clock=lambda: now[0])
    requests = [types.SimpleNamespace(id=number, grammar=None) for number in range(3)]
    for number, request in enumerate(requests):
        now[0] = float(number)
        assert not grammars.ask(request, WORD if number < 2 else Grammar("regex", "b"))
    now[0] = 9.9
    assert grammars.collect() == []
    now[0] = 11.5
    over = grammars.collect()
    assert [(request.id, error.status) for request, error in over] == [(0, 503), (1, 503)]
    assert "waited 10 s" in over[0][1].message
    assert [job[2].value for job in compiler.jobs] == ["b"]
    assert (grammars.waiting, grammars.busy) == (1, True)
    assert grammars.leave(requests[2])
    assert not grammars.leave(requests[2])
    assert not compiler.jobs
    assert not grammars.busy


def test_small_grammars_are_kept_within_a_bound_of_what_they_take(make_compiler):
    grammars = Grammars(make_compiler(), stop_ids=(STOP,), max_bytes=4000)
    for number in range(100):
        grammars.ask(types.SimpleNamespace(id=number, grammar=None), Grammar("regex", f"{number}"))
        grammars.collect()
    assert 4 <= len(grammars._kept) <= 15
