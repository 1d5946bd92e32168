"""The arithmetic of the training step: `fp32`, `bf16-mixed` or `fp16-mixed`, by autocast and gradient scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from .failures import ProgramFailed, nearest

AUTOCAST = {"fp32": None, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


class Precision:
    """Weights stay in fp32; with a mixed precision the products of matrices are done in the shorter type."""

    def __init__(self, name: str, device: torch.device) -> None:
        if name not in AUTOCAST:
            raise ProgramFailed(
                "configuration",
                f'train.precision "{name}" is not known; expected one of {", ".join(AUTOCAST)}',
                hint=nearest(name, AUTOCAST),
            )
        self._device, self._dtype = device.type, AUTOCAST[name]
        # fp16 has no numbers between 0 and 6e-8: the loss is scaled up so that small gradients do not vanish, and a
        # step whose gradients overflow is left out. Disabled, it hands everything through.
        self.scaler = torch.amp.GradScaler(self._device, enabled=self._dtype is torch.float16)

    def autocast(self) -> AbstractContextManager[object]:
        """Forward passes and losses run in it."""
        return nullcontext() if self._dtype is None else torch.autocast(self._device, dtype=self._dtype)
