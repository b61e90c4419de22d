"""Record canaries, for training without per-sample gradients (Clipless): what enters the network is a record, not a gradient.

There an attacker cannot hand the mechanism a gradient; how far a record can move the sum is exactly what is certified. So
canaries are inputs and labels. Those that a coin puts in go through the session's own network, loss, recorder and `accumulate`
after the other rows of the step; their gradients at the weights of the step, which the attacker knows, are the directions along
which the release is read.

- *Release canaries*, made strong by gradient ascent at the first weights, flip a coin at every step. Each is read along the part
  of its gradient that is orthogonal (in units of the noise) to those before it, so that their scores share no noise.
- *Run canaries* flip one coin before the run and are Poisson-sampled after it. Their gradients overlap, so their scores are not
  independent of each other: they are counted by the one-run bound, which does not ask for that, and by nothing else.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from erlangen.audit.canaries import Seen, flat, likelihood_ratio
from erlangen.audit.steps import reach
from erlangen.gradients.rows import RowMap
from erlangen.mechanisms.noise import NoiseSource
from erlangen.sampling import PoissonSampler
from erlangen.streams import Stream

#: run canaries and release canaries; each costs a backward pass at every step
MOST, STRONG = 100, 10
CLIMB = 10


class Overheard(NoiseSource):
    """The mechanism's own noise; what it is asked to hide is written down for the auditor."""

    def __init__(self, inner: NoiseSource) -> None:
        self.inner, self.values = inner, list[Tensor]()
        self.secure, self.description = inner.secure, inner.description

    def next_release(self) -> None:
        self.values = []
        self.inner.next_release()

    def perturb(self, value: Tensor, std: float | Tensor) -> Tensor:
        self.values.append(value.detach().cpu().double().flatten())
        return self.inner.perturb(value, std)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


class RecordTap:
    """Installed on a session: adds canary records to each logical batch before its noise, and scores what comes out."""

    independent, white = False, True

    def __init__(self, session: Any, release: int, run: int, seed: int = 0) -> None:
        self.session, self.mechanism = session, session.training.mechanism
        self.dimension = sum(s.numel() for s in self.mechanism.shapes.values())
        self.release, self.run = max(1, min(release, STRONG, self.dimension)), min(run, MOST)
        self.plain = copy.deepcopy(session.model)  # a copy of a private module is a plain one
        self.rate = session.sampler.sample_rate
        g = torch.Generator().manual_seed(seed)
        shape, classes = session.dataset.input_shape, session.dataset.classes
        self.x = torch.randn(self.release + self.run, *shape, generator=g).to(session.x)
        self.y = torch.randint(0, classes, (self.release + self.run,), generator=g).to(session.y)
        self._strengthen()
        self.run_in = torch.rand(self.run, generator=g) < 0.5
        self._coins = Stream("audit coins", seed)
        self._sampler = PoissonSampler(
            max(self.run, 1), max(self.rate * max(self.run, 1), 1e-9), seed, "audit canaries"
        )
        self._step, self.strongest = 0, 0.0
        self._release_scores: list[Tensor] = []
        self._release_in: list[Tensor] = []
        self._run_scores = torch.zeros(self.run, dtype=torch.float64)
        self._finish, self._noise = self.mechanism.finish, self.mechanism.noise
        self.mechanism.finish, self.mechanism.noise = self.finish, Overheard(self._noise)

    def remove(self) -> None:
        del self.mechanism.finish
        self.mechanism.noise = self._noise

    # -- one step -------------------------------------------------------------------------------------------------

    def finish(self, expected_batch: float) -> dict[str, Tensor]:
        coins = torch.rand(self.release, generator=self._coins.at(self._step)) < 0.5
        drawn = torch.zeros(self.run, dtype=torch.bool)
        drawn[self._sampler.draw() if self.run else []] = True
        present = torch.cat([coins, drawn & self.run_in])
        self.plain.load_state_dict(self.session.model.state_dict())
        own = torch.stack([self._gradient(k) for k in range(self.release + self.run)])
        self._insert(present)
        released = self._finish(expected_batch)
        self._score(flat(released) * expected_batch, own, present)
        self._release_in.append(coins)
        self._step += 1
        return released

    def _insert(self, present: Tensor) -> None:
        """Through the session's own forward pass, loss, recorder and sum."""
        rows = present.nonzero().flatten().to(self.x.device)
        if not len(rows):
            return
        session, tape = self.session, self.session.training.tape
        tape.clear()
        tape.rows = RowMap.regular(len(rows))
        with torch.enable_grad():
            (session.criterion(session.model(self.x[rows]), self.y[rows]) * len(rows)).backward()  # its tape adds up
        self.mechanism.accumulate(tape.gradients())

    def _score(self, y: Tensor, own: Tensor, present: Tensor) -> None:
        """Scores in units of the stated noise: N(0, 1) without a canary and N(‖g/s‖, 1) with it, if all is as stated."""
        overheard = self.mechanism.noise
        assert isinstance(overheard, Overheard)
        hidden = torch.cat(overheard.values)[: self.dimension]
        stds = [torch.as_tensor(self.mechanism.noise_std(n), dtype=torch.float64).cpu() for n in self.mechanism.shapes]
        noise = torch.cat([s.expand(shape).reshape(-1) for s, shape in zip(stds, self.mechanism.shapes.values())])
        noise = noise.clamp(min=1e-12)
        white, pure = own / noise, (y - hidden) / noise  # pure: what was added, if noise was all that was added
        strong, coins = white[: self.release], present[: self.release]
        directions, lengths = torch.linalg.qr(strong.T)
        self._release_scores.append((pure @ directions + coins * lengths.diagonal()) * lengths.diagonal().sign())
        weak, there = white[self.release :], present[self.release :]
        norms = weak.norm(dim=1).clamp(min=1e-12)
        self._run_scores += likelihood_ratio((pure + there.double() @ weak) @ weak.T / norms, norms, self.rate)
        self.strongest = max(self.strongest, float(strong.norm(dim=1).max()) * self.mechanism.noise_multiplier)

    def _gradient(self, k: int) -> Tensor:
        with torch.enable_grad():
            named = {n: p for n, p in self.plain.named_parameters() if n in self.mechanism.shapes}
            loss = self.session.criterion(self.plain(self.x[k : k + 1]), self.y[k : k + 1])
            return flat(dict(zip(named, torch.autograd.grad(loss, list(named.values())))))

    # -- before the run -------------------------------------------------------------------------------------------

    def _strengthen(self) -> None:
        """Inputs on the sphere that the network accepts, release canaries moved uphill in the length of their gradients."""
        radius = reach(self.plain)
        flat = self.x.flatten(1)
        self.x = (flat * (radius / flat.norm(dim=1, keepdim=True))).view_as(self.x)
        for k in range(self.release):
            self.x[k : k + 1] = self._uphill(self.x[k : k + 1].clone(), self.y[k : k + 1], radius)

    def _uphill(self, x: Tensor, y: Tensor, radius: float) -> Tensor:
        trained = [p for p in self.plain.parameters() if p.requires_grad]
        for _ in range(CLIMB):
            x = x.detach().requires_grad_()
            loss = self.session.criterion(self.plain(x), y)
            lengths = [g.square().sum() for g in torch.autograd.grad(loss, trained, create_graph=True)]
            slope = torch.autograd.grad(torch.stack(lengths).sum(), x, allow_unused=True)[0]
            if slope is None or not bool(slope.isfinite().all()) or not bool(slope.norm() > 0):
                break
            x = 0.5 * x.detach() + slope * (radius / slope.norm())
            x = x * (radius / x.norm())
        return x.detach()

    def seen(self) -> Seen:
        return Seen(
            torch.cat(self._release_scores).numpy(), torch.cat(self._release_in).numpy(), self._run_scores.numpy(),
            self.run_in.numpy(),
        )  # fmt: skip

    @property
    def facts(self) -> dict[str, Any]:
        return {"canary": "records", "largest_share_of_sensitivity": self.strongest}


__all__ = ["RecordTap"]
