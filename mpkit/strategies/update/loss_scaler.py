"""Loss scaling: fp16 gradients may be so small that they vanish, so the loss is multiplied by a large number first.

Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2; growth and backoff as in torch.amp.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossScaler"]


@dataclass
class LossScaler:
    """The loss scale: halved after an overflow, doubled after a while without one.

    Attributes:
        enabled: whether to scale; if not, the scale stays 1.
        scale: what the loss is multiplied by.
        good: steps without an overflow since the scale last changed.
        growth_interval: number of such steps after which the scale is doubled.

    >>> scaler = LossScaler(enabled=True, growth_interval=2)
    >>> scaler.update(finite=False); scaler.scale
    32768.0
    >>> scaler.update(finite=True); scaler.update(finite=True); scaler.scale
    65536.0
    """

    enabled: bool
    scale: float = 2.0**16
    good: int = 0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not self.enabled:
            self.scale = 1.0

    def update(self, finite: bool) -> None:
        """Adjust the scale after a step, whose gradients were all finite or not."""
        if not self.enabled:
            return
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self.good == self.growth_interval:
            self.scale, self.good = self.scale * 2.0, 0
