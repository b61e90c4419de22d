"""How far a step's private gradient is from the true one. NOT PRIVATE: for runs with ``non_private=true`` alone.

The true gradient is the mean of the batch's gradients, each clipped at C, as in GeoDP; the private one is what the
optimizer got. Looked at once per evaluation, in the step before it. The numbers stand under ``non_private`` in the
metrics, and the summary and the certificate name them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from erlangen.gradients.tape import PerSampleGradients
from erlangen.mechanisms.clipping import Flat
from erlangen.mechanisms.diagnostics import efficiency, flatten, gradient_error
from erlangen.mechanisms.gaussian import finite
from erlangen.training.moments import is_evaluation

if TYPE_CHECKING:
    from erlangen.training.session import Session

#: errors of direction, magnitude and gradient and the cosine (Definition 4 of GeoDP), and the items of its Theorem 1
NAMES = ("direction_mse", "magnitude_mse", "gradient_mse", "cosine", "item_a", "item_b")


class StepDiagnostics:
    """Adds up the clipped gradients of a step that is looked at, and compares them with what was released.

    Theorem 1's item B needs the weights at which the loss is least: give them as ``optimum``, by parameter, if you know them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.rule = Flat(session.config.max_grad_norm)
        self.optimum: Mapping[str, Tensor] | None = None
        self._sum: dict[str, Tensor] = {}
        self._start: dict[str, Tensor] = {}

    @property
    def due(self) -> bool:
        """Whether an evaluation follows this step."""
        return is_evaluation(self.session.config, self.session.step_count + 1)

    def see(self, gradients: PerSampleGradients) -> None:
        """One physical batch, before it is clipped by the mechanism."""
        if not self.due or not gradients.owners or not gradients.names:
            return
        names = list(gradients.names)
        kept, norms = finite(gradients, gradients.norms_squared(lambda _: None), [names])
        weights = self.rule.weights(norms)[0]
        if kept.valid is not None:
            weights = torch.where(kept.valid, weights, 0.0)
        for name, total in kept.weighted_sum(dict.fromkeys(names, weights)).items():
            self._sum[name] = self._sum[name] + total if name in self._sum else total

    def before(self) -> None:
        """Keep the weights from which the step starts."""
        if self.due and self.optimum is not None:
            self._start = {n: p.detach().clone() for n, p in self._parameters().items()}

    def after(self) -> dict[str, float]:
        """What the step's private gradient was, beside the true one; nothing where no evaluation follows."""
        if not self.due:
            return {}
        session, parameters = self.session, self._parameters()
        mean = {n: self._sum.get(n, torch.zeros_like(p)) / session.config.batch for n, p in parameters.items()}
        private = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in parameters.items()}
        clean, noisy = flatten(mean).double(), flatten(private).double()
        error = gradient_error(noisy, clean)
        rate = float(session.optimizer.param_groups[0]["lr"])
        found = {name: getattr(error, name) for name in NAMES[:4]}
        found["item_a"] = efficiency(noisy, noisy, clean, noisy, rate).item_a  # it does not depend on the weights
        if self.optimum is not None:
            goal = flatten({n: self.optimum[n].to(p) for n, p in parameters.items()})
            found["item_b"] = efficiency(flatten(self._start), goal, clean, noisy, rate).item_b
        self._sum = {}
        return found

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self.session.training.tape.parameters)


__all__ = ["NAMES", "StepDiagnostics"]
