"""Conformance suite of attention backends: every kind of step, compared with the reference backend.

::

    class TestMine(AttentionBackendSuite):
        spec = AttentionBackendSpec(name="mine", target="my_package.backend:MyAttention", supports=AttentionSupport(...))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from tokenspeed.builtin.attention.torch_backend import TorchAttention
from tokenspeed.builtin.kernels.cache import write, write_latent
from tokenspeed.interfaces.attention import AttentionBackend, AttentionLayer, LatentUp
from tokenspeed.interfaces.batch import ForwardBatch
from tokenspeed.plugins.selection import load_target
from tokenspeed.plugins.specs import AttentionBackendSpec, KernelSpec
from tokenspeed.testing.harness import attention_context, kernel_registry
from tokenspeed.testing.paged import PagedCache, Session
from tokenspeed.types import CacheGroup, KVLayout

__all__ = ["AttentionBackendSuite"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_SIZES = (16, 64, 128)


class AttentionBackendSuite:
    """Subclass it, name the ``spec``, and pytest collects the inherited tests.

    Attributes:
        spec: the backend. What its ``supports`` declares is what is tested.
        kernels: kernels of plugins that it may choose among, besides the references.
        device, platform, capability: where it runs.
        tolerance: largest difference by element type.
        heads: (query heads, KV heads).
        latents: (query heads, rank, rotated elements), for backends of kind ``mla``.
    """

    spec: ClassVar[AttentionBackendSpec]
    kernels: ClassVar[tuple[KernelSpec, ...]] = ()
    device: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    capability: ClassVar[tuple[int, ...]] = ()
    tolerance: ClassVar[dict[str, float]] = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 3e-3}
    heads: ClassVar[tuple[tuple[int, int], ...]] = ((6, 2), (4, 4))
    latents: ClassVar[tuple[tuple[int, int, int], ...]] = ((5, 32, 16), (16, 512, 64))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise with what the spec supports: layouts by page sizes, then each element type, then head counts and sizes."""
        if "setup" in metafunc.fixturenames:
            supports = self.spec.supports
            sizes = supports.page_sizes[:3] or (4, 16)
            dims = [d for d in _SIZES if not supports.head_dims or d in supports.head_dims] or list(
                supports.head_dims[:1]
            )
            dtypes = supports.dtypes or ("fp32", "bf16")
            first = (self.heads[0], dims[-1])
            chosen = [(lay, size, dtypes[0], "", *first) for lay in supports.layouts for size in sizes]
            chosen += [(supports.layouts[0], sizes[-1], dtype, "", *first) for dtype in dtypes[1:]]
            chosen += [(supports.layouts[0], sizes[0], dtypes[0], "", h, dim) for h in self.heads for dim in dims]
            if not supports.kv_dtypes or "fp8" in supports.kv_dtypes:
                chosen += [(lay, sizes[0], dtypes[0], "fp8", *first) for lay in supports.layouts]
            unique: list[tuple[Any, ...]] = list(dict.fromkeys(chosen)) if {"mha", "gqa"} & set(supports.kinds) else []
            ids = [
                f"{lay}-page {size}-{dtype}{kv and f' over {kv}'}-{h[0]}/{h[1]} heads of {dim}"
                for lay, size, dtype, kv, h, dim in unique
            ]
            if "mla" in supports.kinds:
                for lay, size, dtype, kv, (heads, rank, rope) in self._latent_setups(supports.layouts, sizes, dtypes):
                    unique.append((lay, size, dtype, kv, (heads, 1), rank + rope, rank))
                    ids.append(
                        f"{lay}-page {size}-{dtype}{kv and f' over {kv}'}-{heads} heads, latents of {rank}+{rope}"
                    )
            metafunc.parametrize("setup", unique, ids=ids, indirect=True)

    @classmethod
    def _latent_setups(
        cls, layouts: Sequence[str], sizes: Sequence[int], dtypes: Sequence[str]
    ) -> list[tuple[str, int, str, str, tuple[int, int, int]]]:
        """(layout, page size, element type, that of the pages where it is another, latents)."""
        narrow, support = cls.latents[0], cls.spec.supports.kv_dtypes
        chosen = [(lay, size, dtypes[0], "", narrow) for lay in layouts for size in sizes]
        chosen += [(layouts[0], sizes[0], dtype, "", narrow) for dtype in dtypes[1:]]
        chosen += [(layouts[0], sizes[0], dtypes[0], "", latents) for latents in cls.latents[1:]]
        if not support or "fp8" in support:
            chosen.append((layouts[0], sizes[0], dtypes[0], "fp8", narrow))
        return chosen

    @pytest.fixture
    def setup(self, request: pytest.FixtureRequest) -> _Bench:
        """A backend under test beside the reference, over one cache."""
        layout, page_size, dtype, kv_dtype, heads, dim, *rank = request.param
        return _Bench(self, KVLayout(layout), page_size, dtype, kv_dtype or dtype, heads, dim, *rank)

    def test_prompts(self, setup: _Bench) -> None:
        """Fresh prompts of unequal length: causal within each row, nothing from its neighbours."""
        setup.check(extend=[(Session(), n) for n in (1, 7, 16, 33)])

    def test_chunks_over_a_prefix(self, setup: _Bench) -> None:
        """Later chunks read what earlier ones stored."""
        sessions = [Session() for _ in range(3)]
        setup.check(extend=list(zip(sessions, (5, 16, 17), strict=True)))
        setup.check(extend=list(zip(sessions, (9, 1, 30), strict=True)))

    def test_decode(self, setup: _Bench) -> None:
        """One token a row, lengths on both sides of a page border."""
        sessions = setup.grown(1, 3, 4, 15, 16, 17, 50)
        for _ in range(3):
            setup.check(decode=[(session, 1) for session in sessions])

    def test_decode_of_several_tokens(self, setup: _Bench) -> None:
        """Rows of width 3 (speculation): each query token reads up to itself."""
        sessions = setup.grown(2, 13, 31)
        setup.check(decode=[(session, 3) for session in sessions])

    def test_mixed_step(self, setup: _Bench) -> None:
        """Prefill chunks and decodes in one step."""
        running = setup.grown(4, 20, 33)
        setup.check(extend=[(Session(), 10), (running[2], 6)], decode=[(session, 1) for session in running[:2]])

    def test_shared_pages(self, setup: _Bench) -> None:
        """Rows that share pages of a prefix, told through nested intervals in a step with a prefill chunk before them."""
        size = setup.page_size
        (root,) = setup.grown(3 * size)
        rows = [setup.cache.share(root, 3 * size), setup.cache.share(root, 3 * size), setup.cache.share(root, 2 * size)]
        setup.check(extend=[(row, 2) for row in rows])
        # Row 0 is the chunk; rows 1 to 3 share two pages, of which rows 1 and 2 share a third.
        setup.check(extend=[(Session(), 5)], decode=[(row, 1) for row in rows], intervals=[(1, 4, 0, 2), (1, 3, 2, 1)])

    def test_scale_of_latents(self, setup: _Bench) -> None:
        """Stored latents are multiplied by the layer's scale."""
        if not setup.latent:
            pytest.skip("the other kinds have no scale")
        setup.layers = [AttentionLayer(index=0, scale=0.2, kv_scale=0.5)]
        sessions = setup.grown(3, 18)
        setup.check(extend=[(Session(), 19)], decode=[(session, 1) for session in sessions])

    def test_queries_of_heads(self, setup: _Bench) -> None:
        """Prompts whose queries are not absorbed, fresh ones and others behind a prefix."""
        if not setup.latent:
            pytest.skip("the other kinds absorb nothing")
        sessions = setup.grown(3, 18)
        setup.check_heads([(Session(), 19), (Session(), 1), (Session(), 40)], nope=32, v_dim=16)
        setup.check_heads([(sessions[1], 9), (Session(), 19), (sessions[0], 1)], nope=32, v_dim=16)

    def test_window(self, setup: _Bench) -> None:
        """A layer with a sliding window beside one without."""
        if "window" not in self.spec.supports.kinds or setup.latent:
            pytest.skip("the spec does not list the kind window, or this is another kind")
        setup.layers = [AttentionLayer(index=0, scale=0.2, window=5), AttentionLayer(index=1, scale=0.2)]
        sessions = setup.grown(3, 18, 40)
        setup.check(extend=[(Session(), 19)], decode=[(session, 1) for session in sessions])

    @pytest.mark.parametrize("reach", [(0, 3), (1, 1), (2, 0)], ids=lambda reach: f"{reach[0]} pages and {reach[1]}")
    def test_pages_behind_a_window_are_not_read(self, setup: _Bench, reach: tuple[int, int]) -> None:
        """They were given back, and another request may write anything there; of what is not a number no mask makes nothing, since 0 x NaN is NaN."""
        if "window" not in self.spec.supports.kinds or setup.latent:
            pytest.skip("the spec does not list the kind window, or this is another kind")
        size = setup.page_size
        bench = setup.with_window(reach[0] * size + reach[1])
        sessions = bench.grown(3, size, 2 * size + 1, 4 * size - 1, 5 * size)
        bench.give_back(sessions)
        bench.check(extend=[(session, count) for session, count in zip(sessions, (9, 1, 30, 2, 17), strict=True)])
        bench.give_back(sessions)
        bench.check(decode=[(session, 1) for session in sessions])
        bench.check(decode=[(session, 3) for session in sessions])
        bench.give_back(sessions)
        bench.check(extend=[(sessions[4], 20), (Session(), 7)], decode=[(session, 1) for session in sessions[:4]])

    def test_rows_that_share_a_prefix_have_windows_of_their_own(self, setup: _Bench) -> None:
        """Intervals speak of full groups: here the first row has given back what the others still read, and the second has other pages."""
        if "window" not in self.spec.supports.kinds or setup.latent:
            pytest.skip("the spec does not list the kind window, or this is another kind")
        size = setup.page_size
        bench = setup.with_window(2 * size + 3)
        pages = -(-512 // size)  # backends may find less not worth a pass of its own
        (root,) = bench.grown(pages * size)
        ahead, *rows = (bench.cache.share(root, pages * size) for _ in range(3))
        bench.step(extend=[(ahead, size + 1)])
        twin, *_ = bench.grown(pages * size)
        twin.pages[: pages - 1] = root.pages[: pages - 1]
        every = [ahead, twin, *rows]
        bench.give_back(every)
        bench.check(decode=[(row, 1) for row in every], intervals=[(0, len(every), 0, pages)])

    def test_sinks(self, setup: _Bench) -> None:
        """Attention sinks take part in the softmax and add no value."""
        if not self.spec.supports.sinks:
            pytest.skip("the spec does not declare sinks")
        if setup.latent:
            pytest.skip("layers of latents have no sinks")
        sinks = torch.linspace(-1, 2, setup.q_heads, device=self.device)
        setup.layers = [AttentionLayer(index=0, scale=0.2, sinks=sinks)]
        sessions = setup.grown(3, 18)
        setup.check(extend=[(Session(), 19)], decode=[(session, 1) for session in sessions])


class _Bench:
    """The backend under test and the reference, over one cache that both read."""

    def __init__(
        self,
        suite: AttentionBackendSuite,
        layout: KVLayout,
        page_size: int,
        dtype: str,
        kv_dtype: str,
        heads: tuple[int, int],
        dim: int,
        rank: int = 0,
        window: int = 0,
    ) -> None:
        device = torch.device(suite.device)
        self.latent = rank > 0
        kind = "mla" if self.latent else "window" if window else "full"
        shape: dict[str, Any] = {"kv_heads": heads[1], "head_dim": dim, "v_head_dim": rank or dim}
        group = CacheGroup(kind=kind, layers=(0, 1), window=window, **shape)
        registry = kernel_registry(
            *suite.kernels, platform=suite.platform, capability=suite.capability, device=suite.device
        )
        self._made_of = (suite, layout, page_size, dtype, kv_dtype, heads, dim)
        self.page_size, self.q_heads, self.group, self.dtype = page_size, heads[0], group, _DTYPES[dtype]
        self.tolerance = suite.tolerance[dtype]
        self.cache = PagedCache(
            [group], page_size=page_size, num_pages=320, layout=layout, dtype=_DTYPES[kv_dtype], device=device
        )
        context = attention_context(
            group,
            heads[0],
            page_size=page_size,
            layout=layout,
            dtype=self.dtype,
            kv_dtype=_DTYPES[kv_dtype],
            device=device,
            kernels=registry,
        )
        self.backend: AttentionBackend = load_target(suite.spec.target)(context)
        self.reference = TorchAttention(context)
        self.layers = [
            AttentionLayer(index=index, scale=scale, window=window) for index, scale in enumerate((dim**-0.5, 0.3))
        ]
        self._foreign = -1
        self.random = torch.Generator().manual_seed(3)

    def with_window(self, window: int) -> _Bench:
        """The same over pages of a window group."""
        return _Bench(*self._made_of, window=window)

    def give_back(self, sessions: Sequence[Session]) -> None:
        """Let tables name, for what no later token of ``sessions`` reads, a page that holds what is not a number."""
        if self._foreign < 0:
            self._foreign = self.cache.foreign()
        for session in sessions:
            behind = max(0, session.length - self.group.window + 1) // self.page_size
            session.pages[:behind] = [self._foreign] * behind

    def step(self, extend: list[tuple[Session, int]]) -> None:
        """Append tokens without computing anything."""
        self._store(self.cache.batch(extend=[(session, [0] * count) for session, count in extend]))

    def grown(self, *lengths: int) -> list[Session]:
        """Sessions that already hold so many tokens."""
        sessions = [Session() for _ in lengths]
        self._store(self.cache.batch(extend=[(s, [0] * n) for s, n in zip(sessions, lengths, strict=True)]))
        return sessions

    def check(
        self,
        *,
        extend: list[tuple[Session, int]] | None = None,
        decode: list[tuple[Session, int]] | None = None,
        intervals: list[tuple[int, int, int, int]] | None = None,
    ) -> None:
        """Run one step of so many new tokens a row through both, layer by layer, and compare."""
        batch = self.cache.batch(
            extend=[(session, [0] * count) for session, count in extend or ()],
            decode=[(session, [0] * count) for session, count in decode or ()],
            prefix_intervals=intervals or (),
        )
        self._store(batch)
        self.backend.init_forward_metadata(batch)
        self.reference.init_forward_metadata(batch)
        for layer in self.layers:
            kv = self.cache.layer(layer.index)
            q = self._randn(batch.num_tokens, self.q_heads, self.group.head_dim)
            cut = batch.num_extend_tokens
            for phase, part in (("forward_extend", q[:cut]), ("forward_decode", q[cut:])):
                if part.shape[0]:
                    got = getattr(self.backend, phase)(part.contiguous(), kv, layer, batch)
                    expected = getattr(self.reference, phase)(part.contiguous(), kv, layer, batch)
                    assert got.shape == expected.shape
                    assert got.dtype == self.dtype
                    close: Any = torch.testing.assert_close
                    close(got, expected, rtol=self.tolerance, atol=self.tolerance, msg=lambda m, p=phase: f"{p}: {m}")

    def check_heads(self, extend: list[tuple[Session, int]], *, nope: int, v_dim: int) -> None:
        """One step of prompts through ``forward_extend_heads`` of both."""
        batch = self.cache.batch(extend=[(session, [0] * count) for session, count in extend])
        self._store(batch)
        rank = self.group.v_head_dim
        up = LatentUp(
            keys=self._randn(self.q_heads, nope, rank) * rank**-0.5,
            values=self._randn(self.q_heads, v_dim, rank) * rank**-0.5,
        )
        layer = AttentionLayer(index=0, scale=0.2, kv_scale=0.5, latent=up)
        q = self._randn(batch.num_tokens, self.q_heads, nope + self.group.head_dim - rank)
        self.backend.init_forward_metadata(batch)
        got = self.backend.forward_extend_heads(q, self.cache.layer(0), layer, batch)
        expected = self.reference.forward_extend_heads(q, self.cache.layer(0), layer, batch)
        assert got.dtype == self.dtype
        torch.testing.assert_close(got, expected, rtol=2 * self.tolerance, atol=2 * self.tolerance)

    def _store(self, batch: ForwardBatch) -> None:
        """What the layer does before a backend is called: keys and values of the step, into the pages."""
        for index in self.group.layers:
            kv = self.cache.layer(index)
            if self.latent:
                row = self._randn(batch.num_tokens, self.group.head_dim)
                rank = self.group.v_head_dim
                write_latent(row[:, :rank], row[:, rank:], kv.k, batch.slot_mapping[0], self.cache.layout.value)
                continue
            shape = (batch.num_tokens, self.group.kv_heads, self.group.head_dim)
            write(self._randn(*shape), self._randn(*shape), kv.k, kv.v, batch.slot_mapping[0], self.cache.layout.value)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(device=self.cache.device, dtype=self.dtype)
