"""PrivacyEngine: the door most users come through.

    engine = erlangen.PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)

After that an ordinary loop (`zero_grad`, `loss.backward()`, `step()`) is differentially private. The module is the
user's own module, the optimizer the user's own optimizer; only the data loader is another one, because batches have to
be drawn by Poisson sampling for the accounting to be true.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from erlangen import accounting, saved
from erlangen.gradients.problems import fix, known_problems
from erlangen.mechanisms.base import Mechanism
from erlangen.mechanisms.clipping.base import ClippingRule
from erlangen.prepare import prepare
from erlangen.private import PrivateTraining
from erlangen.workers import Workers

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_OPACUS_MODES = (None, "hooks", "functorch", "ew")


class PrivacyEngine:
    """Makes training private and says what it cost.

    ``secure`` draws noise and batches from the operating system's cryptographic generator; ``seed`` makes a run
    reproducible, and therefore not fit for release. ``accountant`` is the method `get_epsilon` reports: "pld" or "rdp".

    In an initialised process group (torchrun) all processes train one model: the loader's ``batch_size`` is each
    process's share of the expected batch, as with DDP. ``distributed=False`` lets every process train its own.
    """

    def __init__(
        self,
        *,
        accountant: str = "pld",
        secure: bool = False,
        seed: int | None = None,
        run_id: str = "",
        secure_mode: bool = False,
        distributed: bool = True,
    ) -> None:
        method = {"prv": "pld"}.get(accountant, accountant)  # Opacus's name for the same numerical accounting
        if method not in ("pld", "rdp"):
            raise ValueError(f"accountant is {accountant!r}; choose 'pld' or 'rdp'")
        if (secure or secure_mode) and seed is not None:
            raise ValueError("secure=True and seed= exclude each other: seeded noise can be drawn again by anyone")
        self.method, self.secure, self.seed, self.run_id = method, secure or secure_mode, seed, run_id
        self._accountant = accounting.Accountant()
        self.training: PrivateTraining | None = None
        self.distributed, self._made = distributed, 0
        #: whether some training records with the accountant
        self._recorded = False

    @property
    def accountant(self) -> accounting.Accountant:
        """What was released. One with a history (`from_opacus`) may take its place before anything is private."""
        return self._accountant

    @accountant.setter
    def accountant(self, accountant: accounting.Accountant) -> None:
        """Trainings record with the one that they began with: `get_epsilon` of another would not count them."""
        if not isinstance(accountant, accounting.Accountant):
            raise TypeError(f"accountant is a {type(accountant).__name__}; give an erlangen.accounting.Accountant")
        if self._recorded:
            raise RuntimeError(
                f"this engine's trainings are recorded by the accountant that it has ({self._accountant.steps} releases), and with "
                "another one get_epsilon would leave them out. Set engine.accountant before make_private; to go on from a saved "
                "history, engine.accountant.load_state_dict(state) or engine.load_checkpoint(path=…)"
            )
        self._accountant = accountant

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float | None = None,
        max_grad_norm: float | Sequence[float] | None = None,
        poisson_sampling: bool = True,
        loss_reduction: str = "mean",
        mechanism: str | Mechanism = "iso",
        mechanism_options: Mapping[str, Any] | None = None,
        clipping: str | ClippingRule = "flat",
        clipping_options: Mapping[str, Any] | None = None,
        max_physical_batch: int | str | None = None,
        unit: str | Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        batch_first: bool = True,
        strategy: str = "auto",
        criterion: Callable[..., Any] | None = None,
        denoiser: Callable[..., Any] | None = None,
        check: bool = True,
        grad_sample_mode: str | None = None,
        noise_generator: Any = None,
    ) -> tuple[nn.Module, Optimizer, DataLoader]:
        """Returns the same module, the same optimizer, and a loader that samples privately. Nothing changes on error.

        Args:
            noise_multiplier: σ, the noise per unit of sensitivity; 0 is allowed and reports ε = ∞.
            max_grad_norm: the clipping bound C (one bound per parameter for ``clipping="per-layer"``, if you like).
            loss_reduction: how *your* loss combines rows, "mean" or "sum"; ``criterion=`` lets it be checked.
            mechanism: a registered name or a `Mechanism` object.
            max_physical_batch: rows held in memory at once, or "auto"; results do not depend on it.
            unit: the unit of privacy if it is not the record: one label per record, the name of an attribute or key, or both, a
                name and its labels (``{"patient": labels}``).
            strategy: how layers compute norms: "auto", "materialise" or "norms-first".
            denoiser: post-processing of the private gradient (free): ``denoiser(gradients, variances) -> gradients``.
            check: run the two-sample independence probe on made-up inputs of the data's shape.
            grad_sample_mode: accepted for scripts written for Opacus; rules and fallback are chosen per layer.
            noise_generator: refused, with what takes its place.
        """
        if noise_generator is not None:
            raise ValueError(
                "noise_generator is given: noise has streams of its own here. Leave it out; PrivacyEngine(seed=…) makes a training "
                "reproducible (and not fit for release), PrivacyEngine(secure=True) draws from the system's secure generator"
            )
        if grad_sample_mode not in _OPACUS_MODES:
            raise ValueError(
                f"grad_sample_mode={grad_sample_mode!r} is not needed: norms-first layers are chosen automatically. Drop it, "
                "and keep your own criterion (strategy='norms-first' forces it everywhere)"
            )
        if isinstance(mechanism, str) and noise_multiplier is None:
            raise ValueError("noise_multiplier is missing: give σ, or use make_private_with_epsilon")
        self._made += 1  # a second training of a seeded engine draws from streams of its own
        run_id = self.run_id if self._made == 1 else f"{self.run_id}#{self._made}"
        workers = everybody = Workers.current()
        if not self.distributed and not everybody.alone:  # models of their own never share noise
            workers, run_id = Workers(), f"{run_id}@{everybody.rank}"
        self.training = prepare(
            module, optimizer, data_loader, self.accountant,
            noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, poisson_sampling=poisson_sampling,
            loss_reduction=loss_reduction, mechanism=mechanism, mechanism_options=mechanism_options or {},
            clipping=clipping, clipping_options=clipping_options or {}, max_physical_batch=max_physical_batch, unit=unit,
            batch_first=batch_first, strategy=strategy, criterion=criterion, denoiser=denoiser, check=check,
            seed=self.seed, run_id=run_id, secure=self.secure,
            workers=workers,
        )  # fmt: skip
        self._recorded = True
        return module, optimizer, self.training.loader

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        **options: Any,
    ) -> tuple[nn.Module, Optimizer, DataLoader]:
        """As `make_private`, with the least σ for which ``epochs`` epochs, and what this engine spent before, cost at most ε, δ.

        Steps beyond these epochs cost more than ε; the first of them is a warning.
        """
        if isinstance(epochs, bool) or not isinstance(epochs, Integral) or epochs < 1:
            raise ValueError(f"epochs is {epochs!r}; give a whole number, at least one")
        if "noise_multiplier" in options:
            raise ValueError("noise_multiplier and target_epsilon exclude each other: leave the noise multiplier out")
        if isinstance(options.get("mechanism", "iso"), str):  # a `Mechanism` has a σ, until it is calibrated
            options["noise_multiplier"] = 1.0
        result = self.make_private(module=module, optimizer=optimizer, data_loader=data_loader, **options)
        assert self.training is not None
        try:
            steps = epochs * self.training.sampler.steps_per_epoch
            self.training.calibrate(target_epsilon, target_delta, steps, self.method, self.accountant.history)
            self.training.plan(steps, target_epsilon, target_delta)
        except Exception:
            self.remove()
            raise
        return result

    def get_epsilon(self, delta: float, method: str | None = None) -> float:
        """ε spent so far at this δ; ∞, with a warning that says why, where trainings of this engine protect different units."""
        if why := self.accountant.mixed:
            warnings.warn(f"ε = ∞: {why}", stacklevel=2)
        return self.accountant.epsilon(delta, method or self.method)  # type: ignore[arg-type]

    def event(self) -> DpEvent:
        """The event of one step, amplification included."""
        return self._active().event()

    @property
    def noise_multiplier(self) -> float:
        """σ of the training, given or calibrated."""
        return self._active().mechanism.noise_multiplier

    @property
    def stepped(self) -> bool:
        """Whether the last `optimizer.step()` moved the weights: not where ``max_physical_batch`` has cut the batch and parts of it
        are still to come. Whatever counts steps (schedulers, averages of weights) asks this."""
        return self._active().stepped

    def save_checkpoint(
        self,
        *,
        path: str | os.PathLike[str],
        module: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        checkpoint_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Write weights, optimizer, spent budget and the places of noise and sampler to one file without pickles.

        ``module`` is the one that was made private; ``optimizer`` is left out of the file if it is not given. Values of
        ``checkpoint_dict`` (tensors, numbers, text) are kept beside them.
        """
        training = self._active()
        saved.save(path, training, module or training.module, optimizer, self.accountant, checkpoint_dict or {})

    def load_checkpoint(
        self, *, path: str | os.PathLike[str], module: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> dict[str, Any]:
        """After `make_private` with the same options: go on where `save_checkpoint` was called. Returns its ``checkpoint_dict``."""
        training = self._active()
        return saved.load(path, training, module or training.module, optimizer, self.accountant)

    def remove(self) -> None:
        """Give module and optimizer back as they were. What was spent stays spent."""
        if self.training is not None:
            self.training.remove()
            self.training = None

    def _active(self) -> PrivateTraining:
        if self.training is None:
            raise RuntimeError("nothing is private yet: call make_private first")
        return self.training

    @staticmethod
    def validate(module: nn.Module, strict: bool = False) -> list[str]:
        """Known reasons why this module cannot train privately; with ``strict`` they are raised."""
        problems = known_problems(module)
        if problems and strict:
            raise ValueError("; ".join(problems))
        return problems

    @staticmethod
    def is_compatible(module: nn.Module) -> bool:
        return not known_problems(module)

    @staticmethod
    def fix(module: nn.Module, public_statistics: bool = False) -> nn.Module:
        """Replace what cannot train privately (BatchNorm → GroupNorm, or constants of public data); returns the module."""
        return fix(module, public_statistics)

    get_compatible_module = fix
