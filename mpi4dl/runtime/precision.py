"""Dynamic loss scaling for fp16 (Micikevicius et al., ICLR 2018), by the norm of the gradient that all ranks know.

PyTorch's GradScaler looks at the gradients of one rank: where stages differ, ranks would skip different steps.
"""

INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000  # steps


class LossScaler:
    """`scale` is what the loss is multiplied by: halved after a step that overflows, doubled after many that do not."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.scale = INITIAL_SCALE if enabled else 1.0
        self._finite_steps = 0

    def update(self, finite: bool) -> None:
        """After a step whose gradient was finite, or was not."""
        if not self.enabled:
            return
        self._finite_steps = self._finite_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self._finite_steps == GROWTH_INTERVAL:
            self.scale *= 2
            self._finite_steps = 0
