"""``config.json`` with attribute access. Torch-free and without ``transformers``, whose import costs more than everything else at start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ConfigView"]


class ConfigView:
    """Read-only attributes over a parsed ``config.json``; nested objects stay dicts. ``transformers`` config objects can stand in its place.

    An absent key raises ``AttributeError``, so ``getattr(config, name, default)`` works; a JSON ``null`` is ``None``.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"config.json has no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a model's config is read-only")

    def __reduce__(self) -> tuple[type[ConfigView], tuple[dict[str, Any]]]:
        return ConfigView, (self._values,)

    def __repr__(self) -> str:
        return f"ConfigView({self._values!r})"

    def to_dict(self) -> dict[str, Any]:
        """A copy of the values."""
        return dict(self._values)
