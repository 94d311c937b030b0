"""The process that compiles grammars: whatever becomes of it is one request's error, and the next grammar is compiled."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from tokenspeed.engine import grammar_compiler, grammar_worker
from tokenspeed.engine.grammar_compiler import Compiled, GrammarCompiler
from tokenspeed.engine.grammar_worker import WorkerStart
from tokenspeed.errors import GrammarError
from tokenspeed.interfaces.grammar import GrammarRequest

START = WorkerStart(
    target="tokenspeed.testing.tiny_grammar:TinyGrammarBackend",
    vocabulary=[bytes((byte,)) for byte in range(256)],
    vocab_size=300,
    stop_token_ids=(256,),
    special_token_ids={"<|end|>": 256},
    options={},
    value_bytes=1000,
    compiled_bytes=2000,
    compile_s=0.25,
)


class Bench:
    def __init__(self, **bounds: int) -> None:
        self.ended: list[Compiled] = []
        self.prepared: list[tuple[bytes, bytes]] = []
        self.compiler = GrammarCompiler(START, prepare=lambda key, data: self.prepared.append((key, data)), **bounds)

    def compile(self, value: str, kind: str = "regex") -> Compiled:
        self.compiler.submit(value.encode(), GrammarRequest(kind=kind, value=value))
        return self.next()

    def next(self) -> Compiled:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            self.ended += self.compiler.results()
            if self.ended:
                return self.ended.pop(0)
            self.compiler.wait(1)
        raise AssertionError("no result came")

    def kill(self) -> Compiled:
        """End the grammar that is compiled now, and the process with it: its result."""
        while not self.ended:
            if (pid := self.compiler.pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.compiler.wait(0.2)
            self.ended += self.compiler.results()
        return self.next()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """However busy the machine is, what takes no processor time is given up in the one test alone that is about this."""
    monkeypatch.setattr(grammar_compiler, "_PATIENCE", 1000.0)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.compiler.close()


def test_a_grammar_comes_back_as_bytes_that_were_prepared_in_the_thread(bench):
    assert bench.compiler.pid is None  # started with the first grammar
    result = bench.compile("a+")
    assert (result.key, result.error) == (b"a+", None)
    assert bench.prepared == [(b"a+", result.data)]
    pid = bench.compiler.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == max(5, os.getpriority(os.PRIO_PROCESS, 0))
    assert os.getsid(pid) == os.getsid(0)  # priorities count within a session where Linux groups by it
    assert os.getpgid(pid) != os.getpgid(0)  # a terminal's signals stay away
    assert bench.compile("b+").error is None
    assert bench.compiler.pid == pid


def started(compiler: GrammarCompiler) -> int:
    until(lambda: compiler.pid is not None)
    return compiler.pid


def test_a_process_that_begins_before_the_first_grammar_compiles_it(bench):
    bench.compiler.begin()
    started(bench.compiler)
    assert bench.compiler.results() == []
    assert bench.compile("a+").error is None  # whether the start had come to its end or not
    bench.compiler.begin()  # there is one
    assert bench.compile("b+").error is None
    # Of the thread that compiles.
    assert os.getpriority(os.PRIO_PROCESS, bench.compiler.pid) == max(5, os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities are those of processes")
def test_a_backend_made_at_leisure_takes_the_lowest_priority_and_leaves_the_process_its_own(monkeypatch):
    def priority(_: object) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority(None)
    monkeypatch.setattr(grammar_worker, "backend_from", priority)
    assert grammar_worker._backend_at_leisure(START) == 19
    assert priority(None) == before


def test_a_beginning_that_dies_is_logged_and_the_first_grammar_begins_again(bench, caplog):
    whole, bench.compiler._command = bench.compiler._command, [sys.executable, "-c", "raise SystemExit(3)"]
    bench.compiler.begin()
    until(lambda: caplog.records)
    assert "ended with status 3" in caplog.records[0].getMessage()
    bench.compiler._command = whole
    assert bench.compile("a+").error is None


def test_a_grammar_does_not_wait_for_a_beginning_that_does_not_get_on(bench):
    """At the lowest priority a busy machine never lets it come to its end."""
    whole, bench.compiler._command = bench.compiler._command, [sys.executable, "-c", "import time; time.sleep(600)"]
    bench.compiler.begin()
    stuck = started(bench.compiler)
    bench.compiler._command = whole
    assert bench.compile("a+").error is None
    assert bench.compiler.pid != stuck
    with pytest.raises(ProcessLookupError):
        os.kill(stuck, 0)


def test_closing_ends_a_beginning(bench):
    bench.compiler._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    bench.compiler.begin()
    pid = started(bench.compiler)
    bench.compiler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_grammar_that_is_refused_breaks_or_grows_too_large_is_an_error_of_its_own(bench):
    for value, says in (
        ("(a", "is not closed"),
        (r"\!raise", "something in a library broke"),
        (r"\!huge", "2000 are allowed"),
    ):
        result = bench.compile(value)
        assert says in result.error.message
        assert (result.lasting, result.error.status, result.data) == (True, 400, b"")
    assert bench.compile("a+").error is None


def test_a_grammar_that_takes_too_long_is_an_error_of_its_own(bench):
    bench.compile("a+")
    first = bench.compiler.pid
    result = bench.compile(r"\!spin")
    assert "longer than 0.25 s" in result.error.message
    assert (result.lasting, result.error.status) == (True, 400)
    assert bench.compile("a+").error is None
    assert bench.compiler.pid != first


def test_a_process_that_gets_no_processor_is_not_the_grammars_fault(bench, monkeypatch):
    """It is given a multiple of the grammar's processor time, and replaced then."""
    bench.compile("a+")
    first = bench.compiler.pid
    monkeypatch.setattr(grammar_compiler, "_PATIENCE", 6.0)
    result = bench.compile(r"\!sleep")
    monkeypatch.setattr(grammar_compiler, "_PATIENCE", 1000.0)
    assert "does not get on" in result.error.message
    assert (result.lasting, result.error.status) == (False, 503)
    assert bench.compile("a+").error is None
    assert bench.compiler.pid != first


def test_a_process_that_is_stopped_is_not_the_grammars_fault(bench):
    bench.compile("a+")
    os.kill(bench.compiler.pid, signal.SIGSTOP)
    result = bench.compile("b+")
    assert "is stopped" in result.error.message
    assert (result.lasting, result.error.status) == (False, 503)
    assert bench.compile("b+").error is None


def test_a_process_that_dies_is_replaced(bench):
    result = bench.compile(r"\!die")
    assert "killed by signal 9" in result.error.message
    assert (result.lasting, result.error.status) == (False, 503)
    assert bench.compile("a+").error is None


def test_a_process_that_cannot_start_says_so_and_the_next_tries_again():
    made = Bench()
    made.compiler = GrammarCompiler(
        msgspec.structs.replace(START, target="no.such:Backend"), prepare=made.prepared.append
    )
    for _ in range(2):
        result = made.compile("a+")
        assert "ended with status 1" in result.error.message
        assert result.error.status == 503
    made.compiler.close()


@pytest.mark.parametrize("bound", [{"max_queue": 8}, {"max_chars": 80}])
def test_the_queue_is_bounded_and_what_nobody_waits_for_is_left_out(bound):
    made = Bench(**bound)
    made.compile("a+")
    made.compiler.submit(b"slow", GrammarRequest(kind="regex", value=r"\!sleep"))
    until(lambda: not made.compiler._jobs)
    request = GrammarRequest(kind="regex", value="a" * 10)
    queued: list[bytes] = []

    def fill() -> None:
        for number in range(100):
            made.compiler.submit(b"%d" % number, request)
            queued.append(b"%d" % number)

    with pytest.raises(GrammarError, match="try again later") as caught:
        fill()
    assert caught.value.status == 503
    assert len(queued) == 8
    for key in queued:
        made.compiler.withdraw(key)
    made.compiler.submit(b"last", request)
    assert made.kill().key == b"slow"
    assert made.next().key == b"last"
    made.compiler.close()


def test_who_queues_long_grammars_does_not_hold_up_short_ones(bench, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "_CHARS_A_SECOND", 1)  # however long it takes to queue these few
    bench.compile("a+")
    bench.compiler.submit(b"slow", GrammarRequest(kind="regex", value=r"\!sleep"))
    until(lambda: not bench.compiler._jobs)
    for number in range(4):
        bench.compiler.submit(b"long %d" % number, GrammarRequest(kind="regex", value="a?" * 400))
    bench.compiler.submit(b"short", GrammarRequest(kind="regex", value="a"))
    assert bench.kill().key == b"slow"
    assert [bench.next().key for _ in range(5)] == [b"short", b"long 0", b"long 1", b"long 2", b"long 3"]


def test_closing_ends_the_process_in_the_middle_of_a_grammar(bench):
    bench.compile("a+")
    pid = bench.compiler.pid
    bench.compiler.submit(b"slow", GrammarRequest(kind="regex", value=r"\!sleep"))
    until(lambda: not bench.compiler._jobs)
    bench.compiler.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_that_cannot_be_started_is_not_the_grammars_fault(bench):
    bench.compiler._command = ["/no/such/program"]
    result = bench.compile("a")
    assert (result.error.status, result.lasting) == (503, False)
    assert "cannot be started" in result.error.message


def test_a_process_that_answers_nonsense_is_replaced(bench):
    script = "import struct, sys; sys.stdout.buffer.write(struct.pack('<Q', 3) + b'\\xc1ab'); sys.stdout.flush(); sys.stdin.read()"
    whole, bench.compiler._command = bench.compiler._command, [sys.executable, "-c", script]
    result = bench.compile("a")
    assert (result.error.status, result.lasting) == (503, False)
    assert "no answer" in result.error.message
    assert bench.compiler.pid is None
    bench.compiler._command = whole
    assert bench.compile("a").error is None


def test_a_hard_limit_on_processor_time_is_kept_to():
    """As ``ulimit -t`` leaves it: below what one compilation may take."""
    script = (
        "import resource; from tokenspeed.engine.grammar_worker import _limit_seconds; "
        "resource.setrlimit(resource.RLIMIT_CPU, (30, 30)); _limit_seconds(600); print(resource.getrlimit(resource.RLIMIT_CPU))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "(30, 30)"
