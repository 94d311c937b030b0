"""The kernel contract's text and the references say the same."""

from __future__ import annotations

import inspect
import re

import pytest

from tokenspeed.builtin.kernels.catalog import REFERENCE_KERNELS
from tokenspeed.interfaces import kernel as contract
from tokenspeed.plugins import KernelSpec
from tokenspeed.plugins.selection import load_target


def read_contract() -> dict[tuple[str, str], list[str]]:
    """Argument names by family and mode, as the module's text gives them: a line with the family alone, then indented signatures."""
    found = {}
    text = inspect.getdoc(contract) or ""
    for block in re.split(rf"\n(?=(?:{'|'.join(contract.FAMILIES)})\n)", text)[1:]:
        family = block.splitlines()[0]
        for mode, arguments in re.findall(r"\n    ``(\w+)\(([^)]*)\)", block):
            found[family, mode] = [re.split("=", argument)[0].strip() for argument in arguments.split(",")]
    return found


DOCUMENTED = read_contract()


def test_every_documented_mode_has_a_reference_and_the_other_way_round() -> None:
    assert set(DOCUMENTED) == {(spec.family, spec.mode) for spec in REFERENCE_KERNELS}


@pytest.mark.parametrize("spec", REFERENCE_KERNELS, ids=lambda spec: f"{spec.family}.{spec.mode}")
def test_a_reference_takes_the_documented_arguments_in_their_order(spec: KernelSpec) -> None:
    assert list(inspect.signature(load_target(spec.target)).parameters) == DOCUMENTED[spec.family, spec.mode]
