"""Conformance suite of kernels: the same calls as the torch reference, the same results.

::

    class TestMyNorm(KernelSuite):
        spec = KernelSpec(name="mine", family="norm", mode="rms_norm", target="my_package.norm:rms_norm", dtypes=("fp32", "bf16"))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from tokenspeed.interfaces.kernel import KernelRequest
from tokenspeed.plugins.selection import load_target
from tokenspeed.plugins.specs import KernelSpec
from tokenspeed.testing.harness import kernel_registry
from tokenspeed.testing.kernel_cases import KernelCase, kernel_cases

__all__ = ["KernelSuite"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Which arguments are pages, and one step of e4m3: the reference may have rounded to either side.
_PAGES = {
    "cache.write": (2, 3),
    "cache.write_latent": (2,),
    "rope.qkv_rope_write": (6, 7),
    "attention.decode": (1, 2),
    "attention.extend": (1, 2),
}
_FP8_STEP = 2.0**-3


class KernelSuite:
    """Subclass it, name the ``spec``, and pytest collects the inherited tests.

    The reference runs in fp32 on the inputs rounded to the element type under test.

    Attributes:
        spec: the kernel.
        device: where it runs; ``platform`` and ``capability`` are what the registry is told of it.
        tolerance: largest relative and absolute difference by element type.
    """

    spec: ClassVar[KernelSpec]
    device: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    capability: ClassVar[tuple[int, ...]] = ()
    threads: ClassVar[int] = 1
    tolerance: ClassVar[dict[str, float]] = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}

    @classmethod
    def cases(cls) -> list[KernelCase]:
        """The shared cases that the spec's features, layouts and traits admit."""
        spec = cls.spec
        limits = {name: (low, high) for name, low, high in spec.traits}
        return [
            case
            for case in kernel_cases(spec.family, spec.mode)
            if case.features <= spec.features
            and (not case.layout or not spec.layouts or case.layout in spec.layouts)
            and all(low <= case.shape.get(name, low) <= high for name, (low, high) in limits.items())
        ]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrise with the admitted cases and the spec's element types."""
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases(), ids=lambda case: case.name)
        if "dtype" in metafunc.fixturenames:
            metafunc.parametrize("dtype", self._dtypes())

    @pytest.fixture(scope="class")
    @classmethod
    def kernel(cls) -> Callable[..., Any]:
        """The kernel as the registry builds it."""
        spec = cls.spec
        registry = kernel_registry(
            *([] if spec.target.startswith("tokenspeed.builtin.") else [spec]),
            platform=cls.platform,
            capability=cls.capability,
            threads=cls.threads,
            device=cls.device,
        )
        case = cls.cases()[0]
        request = KernelRequest(
            family=spec.family,
            mode=spec.mode,
            dtype=cls._dtypes()[0],
            layout=case.layout,
            features=spec.features,
            shape=case.shape,
            objective=(spec.objectives or ("latency",))[0],
        )
        winner = registry.explain(request)[0]
        assert winner == (winner[0], ""), f"the registry refuses the kernel: {winner[1]}"
        assert winner[0].endswith(f":{spec.name}"), f"the registry prefers {winner[0]} to the kernel under test"
        return registry.select(request)

    def test_has_cases(self) -> None:
        """The spec admits at least one shared case: a suite that runs nothing proves nothing."""
        assert self.cases()

    def test_equals_the_reference(self, kernel: Callable[..., Any], case: KernelCase, dtype: str) -> None:
        """Outputs, and what is written in place, are those of the torch reference."""
        arguments = self._arguments(case, dtype)
        expected_arguments = [_widened(argument) for argument in arguments]
        expected = _reference(self.spec)(*expected_arguments, **case.kwargs)
        got_arguments = [self._moved(argument) for argument in arguments]
        got = kernel(*got_arguments, **{name: self._moved(value) for name, value in case.kwargs.items()})
        self._compare(got, expected, dtype)
        for index in case.written - {0} if self.spec.mode == "qkv_rope_write" else case.written:
            self._compare(got_arguments[index], expected_arguments[index], dtype)

    def test_leaves_its_inputs_alone(self, kernel: Callable[..., Any], case: KernelCase) -> None:
        """Only the arguments that the contract says are written change."""
        arguments = [self._moved(argument) for argument in self._arguments(case, self._dtypes()[0])]
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        kernel(*arguments, **{name: self._moved(value) for name, value in case.kwargs.items()})
        for index, (old, new) in enumerate(zip(before, arguments, strict=True)):
            if isinstance(old, torch.Tensor) and index not in case.written:
                assert torch.equal(_bits(old), _bits(new))

    def test_repeats_itself(self, kernel: Callable[..., Any], case: KernelCase) -> None:
        """The same inputs give the same bits."""
        results = []
        for _ in range(2):
            arguments = [self._moved(argument) for argument in self._arguments(case, self._dtypes()[0])]
            got = kernel(*arguments, **{name: self._moved(value) for name, value in case.kwargs.items()})
            results.append([*_tensors(got), *(arguments[index] for index in sorted(case.written))])
        for first, second in zip(*results, strict=True):
            assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))

    def test_pages_of_fp8_are_those_of_the_reference(self, kernel: Callable[..., Any], case: KernelCase) -> None:
        """A kernel with the feature ``kv_fp8`` reads and writes pages of e4m3; what does not fit saturates."""
        if "kv_fp8" not in self.spec.features:
            pytest.skip("the spec does not list the feature kv_fp8")
        pages = _PAGES[f"{self.spec.family}.{self.spec.mode}"]
        arguments = self._arguments(case, self._dtypes()[0])
        if case.written and self.spec.mode in ("write", "write_latent"):
            arguments[0][0] *= 1000.0
        for index in pages:
            arguments[index] = arguments[index].to(torch.float8_e4m3fn)
        expected_arguments = [a.clone() if i in pages else _widened(a) for i, a in enumerate(arguments)]
        expected = _reference(self.spec)(*expected_arguments, **case.kwargs)
        got_arguments = [self._moved(argument) for argument in arguments]
        got = kernel(*got_arguments, **{name: self._moved(value) for name, value in case.kwargs.items()})
        self._compare(got, expected, self._dtypes()[0])
        for index in pages:
            left, right = got_arguments[index].float().cpu(), expected_arguments[index].float()
            torch.testing.assert_close(left, right, rtol=_FP8_STEP, atol=2.0**-9, equal_nan=True)

    @classmethod
    def _dtypes(cls) -> tuple[str, ...]:
        return cls.spec.dtypes or ("fp32", "bf16")

    def _arguments(self, case: KernelCase, dtype: str) -> list[Any]:
        made = case.make(torch.Generator().manual_seed(5))
        return [
            a.to(_DTYPES[dtype])
            if isinstance(a, torch.Tensor) and a.is_floating_point() and index not in case.keep
            else a
            for index, a in enumerate(made)
        ]

    def _moved(self, value: Any) -> Any:
        return _copied(value, self.device) if isinstance(value, torch.Tensor) else value

    def _compare(self, got: Any, expected: Any, dtype: str) -> None:
        tolerance = self.tolerance[dtype]
        pairs = list(zip(_tensors(got), _tensors(expected), strict=True))
        for left, right in pairs:
            assert left.shape == right.shape
            torch.testing.assert_close(
                left.float().cpu(), right.float(), rtol=tolerance, atol=tolerance, equal_nan=True
            )


def _reference(spec: KernelSpec) -> Callable[..., Any]:
    kernel: Callable[..., Any] = load_target(f"tokenspeed.builtin.kernels.{spec.family}:{spec.mode}")
    return kernel


def _tensors(result: Any) -> list[torch.Tensor]:
    if result is None:
        return []
    return list(result) if isinstance(result, tuple) else [result]


def _copied(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides, so that a case of strided rows stays one."""
    base = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return base.copy_(tensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.float().clone() if value.is_floating_point() else value.clone()
