"""The thread pool and the plugin's face: instruction sets, threads, sharing, idling, many callers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import psutil
import pytest
import torch
from tokenspeed_plugin_kernels_cpu import runtime as factories
from tokenspeed_plugin_kernels_cpu.plugin import tokenspeed_kernels, tokenspeed_options
from tokenspeed_plugin_kernels_cpu.runtime import Runtime, supported_isas

from tokenspeed.interfaces.kernel import KernelContext


def context(**options: object) -> KernelContext:
    return KernelContext(device=torch.device("cpu"), threads=2, shared={}, options=options)


def test_portable_is_always_there_and_the_best_is_taken() -> None:
    assert supported_isas()[-1] == "portable"
    assert Runtime(1).isa == supported_isas()[0]


def test_unknown_isas_and_thread_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"isa 'avx9' cannot run here; choose of: .*portable"):
        Runtime(1, "avx9")
    for count in (0, -1, 5000):
        with pytest.raises(ValueError, match="num_threads must be 1 to 1024"):
            Runtime(count)


def test_factories_share_one_runtime_per_rank() -> None:
    """All kernels of a context sit on one pool; options reach it; another context has another."""
    first = context(isa="portable", threads=3)
    for spec in tokenspeed_kernels():
        assert callable(getattr(factories, spec.target.partition(":")[2])(first))
    assert len(first.shared) == 1
    shared = factories.runtime_of(first)
    assert (shared.isa, shared.num_threads) == ("portable", 3)
    assert factories.runtime_of(context()) is not shared
    assert factories.runtime_of(context()).num_threads == 2


def test_torch_is_left_with_one_thread() -> None:
    """OpenMP's workers spin after each of torch's operations: on the processors that the runtime's threads need."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert factories.runtime_of(context()).num_threads == 2
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_the_isa_option_offers_what_the_runtime_knows() -> None:
    options = {option.name: option for option in tokenspeed_options()}
    assert set(supported_isas()) <= set(options["isa"].choices)


def test_registering_imports_no_torch() -> None:
    code = "import sys, tokenspeed_plugin_kernels_cpu.plugin as p; p.tokenspeed_kernels(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    x, weight = torch.randn(37, 576), torch.randn(500, 576)
    expected = Runtime(1).linear(x, weight)
    runtime = Runtime(threads)
    for _ in range(5):
        assert torch.equal(runtime.linear(x, weight), expected)


def test_many_callers_at_once(runtime: Runtime) -> None:
    """Threads that call one runtime together, with jobs of all sizes, each get their own right result."""
    shapes = [(1, 700, 64), (64, 300, 128), (3, 40, 32), (20, 2000, 96)]
    inputs = [(torch.randn(m, k), torch.randn(n, k)) for m, n, k in shapes]
    expected = [runtime.linear(x, w) for x, w in inputs]
    wrong: list[int] = []

    def call(which: int) -> None:
        for i in range(60):
            job = (which + i) % len(inputs)
            if not torch.equal(runtime.linear(*inputs[job]), expected[job]):
                wrong.append(job)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_jobs_follow_each_other_at_any_pace(runtime: Runtime) -> None:
    """Jobs that meet spinning, parking and parked workers: none is lost, none hangs."""
    x, weight = torch.randn(8, 64), torch.randn(640, 64)
    expected = runtime.linear(x, weight)
    for i in range(300):
        if i % 10 == 0:
            time.sleep(0.00002 * (i % 70))
        assert torch.equal(runtime.linear(x, weight), expected)


def test_idle_workers_take_no_processor_time() -> None:
    runtime = Runtime(8)
    runtime.linear(torch.randn(64, 64), torch.randn(2000, 64))
    end = time.monotonic() + 30
    while processor_time_of(0.3) > 0.03:  # it may take a while until each has been given a processor to go to sleep on
        assert time.monotonic() < end


def processor_time_of(seconds: float) -> float:
    """What this process takes while this thread does nothing for so long."""
    before = time.process_time()
    time.sleep(seconds)
    return time.process_time() - before


def test_errors_inside_workers_reach_the_caller(runtime: Runtime) -> None:
    """A bad position far into a long call is an exception, and the pool works on."""
    q, k, table = torch.randn(2000, 64), torch.randn(2000, 64), torch.randn(10, 64)
    positions = torch.zeros(2000, dtype=torch.int64)
    positions[1777] = 10
    with pytest.raises(IndexError, match="position lies outside cos_sin"):
        runtime.rotate(q, k, positions, table, 64)
    runtime.rotate(q, k, positions.clamp(max=9), table, 64)


def test_a_runtime_ends_with_its_last_kernel() -> None:
    """Kernels keep the pool alive; without them its threads end."""
    own = context(threads=4)
    x, weight = torch.ones(1, 4), torch.ones(2, 4)
    before = threads()
    kernel = factories.make_gemm_linear(own)
    runtime = weakref.ref(factories.runtime_of(own))
    own.shared.clear()
    assert kernel(x, weight).tolist() == [[4.0, 4.0]]
    its = threads() - before
    assert len(its) == 3  # and the one that calls
    del kernel
    assert runtime() is None
    end = time.monotonic() + 60
    while its & threads():
        assert time.monotonic() < end
        time.sleep(0.01)


def threads() -> set[int]:
    """Those of this process that the system knows of; Python does not know the pool's."""
    return {thread.id for thread in psutil.Process().threads()}


def test_what_is_no_tensor_is_named(runtime: Runtime) -> None:
    with pytest.raises(TypeError, match="weight must be a tensor, not list"):
        runtime.linear(torch.ones(1, 2), [[1.0, 2.0]])  # type: ignore[arg-type]


def test_the_stub_says_what_the_extension_has() -> None:
    """Methods and parameter names of ``_native.pyi`` are those of the compiled class."""
    stub = ast.parse((Path(factories.__file__).parent / "_native.pyi").read_text())
    declared = next(node for node in stub.body if isinstance(node, ast.ClassDef) and node.name == "Runtime")
    methods = {f.name: [a.arg for a in f.args.args] for f in declared.body if isinstance(f, ast.FunctionDef)}
    native = {name for name in vars(Runtime) if not name.startswith("_")} | {"__init__"}
    assert set(methods) == native
    for name, parameters in methods.items():
        member = getattr(Runtime, name)
        if not isinstance(member, property):
            signature = member.__doc__.splitlines()[0]
            assert re.findall(r"(\w+): ", signature.partition("->")[0]) == parameters, signature
