"""``nn.Module`` with a short way to ``forward``."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["Layer"]


class Layer(nn.Module):
    """A module whose call goes straight to ``forward`` unless hooks are registered on it.

    A decode step calls some 300 modules; torch's own dispatch costs more than a microsecond each, which shows at batch size 1. Global module hooks
    (``register_module_forward_hook``) are not seen.
    """

    def __call__(self, *args: Any) -> Any:
        if self._forward_hooks or self._forward_pre_hooks:
            return super().__call__(*args)
        return self.forward(*args)
