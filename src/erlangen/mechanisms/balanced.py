"""The diagonal metric with the least noise for a network's own gradients, found without a record.

Where nearly every gradient is clipped, noise of energy σ²C²·Σm_k² is added to a signal that is shortened by √Σ(g_k/m_k)². So the
noise beside the signal is (Σ m_k²)·(Σ E g_k²/m_k²), and by Cauchy and Schwarz

    (Σ m_k²)·(Σ s_k²/m_k²) ≥ (Σ s_k)²,   with equality for m_k ∝ √s_k,   s_k² = E g_k².

m = 1 (ISO) and m = s (whitening) both have d·Σs_k², the same; half the way between the two is the best that a diagonal can be.
s is measured, one number for every parameter, on *made-up* inputs at *fresh* weights: neither records nor trained weights take
part, so that the metric is as public as the structure of the network.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from erlangen.streams import seed_layers

#: backward passes, and made-up inputs in each
PASSES, ROWS = 8, 8
#: no parameter is taken to have gradients smaller than this share of the root mean square over all of them
LEAST = 0.01
#: scales lie on a grid of so many steps an octave, so that machines that round otherwise agree
GRID = 8


def balanced_scales(module: nn.Module, input_shape: tuple[int, ...], start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """√s of every trainable parameter. ``start`` has the scales with which weights are drawn where a layer cannot do it itself."""
    _refuse_buffers(module)
    net, energy = fresh(module, start), dict.fromkeys((n for n, p in module.named_parameters() if p.requires_grad), 0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(PASSES):
        net.zero_grad()
        try:
            ends = [t for t in tree_leaves(net(made_up(ROWS, input_shape, generator))) if isinstance(t, Tensor) and t.requires_grad]
        except Exception as error:
            raise ValueError(
                f"metric 'balanced' runs the network on made-up inputs of shape {tuple(input_shape)}, and that failed: {error}. "
                "Give input_shape as one record has it, or a metric by tensors"
            ) from error
        # what comes back to different rows is independent and centred: in the square of the sum their products vanish on average
        torch.autograd.backward(ends, [torch.randn(t.shape, generator=generator) for t in ends])
        for name, p in net.named_parameters():
            if name in energy and p.grad is not None:
                energy[name] += float(p.grad.square().mean())
    sizes = {name: p.numel() for name, p in module.named_parameters() if name in energy}
    mean = sum(energy[n] * sizes[n] for n in energy) / max(sum(sizes.values()), 1)
    if not mean > 0:
        raise ValueError("no gradient reaches a parameter from made-up inputs, so there is nothing to balance; use metric 'escnn'")
    s = {name: max(value, LEAST**2 * mean) ** 0.5 for name, value in energy.items()}
    steps = {name: torch.tensor(value).double().log2().mul(GRID / 2).round().div(GRID) for name, value in s.items()}
    return {n: steps[n].exp2().to(p).expand(p.shape).clone() for n, p in module.named_parameters() if n in s}


def with_equal_signal(scales: Mapping[str, Tensor], power: float = 1.0) -> dict[str, Tensor]:
    """m^power, of such a size that at the same C a gradient is shortened as in ISO: Σ s²/m² = Σ s². Then the noise is Σ m² < d."""
    m = {name: t.double() ** power for name, t in scales.items()}
    left = sum(float((t.double() ** 4 / m[name] ** 2).sum()) for name, t in scales.items())  # s is the square of what is given
    factor = (left / sum(float((t.double() ** 4).sum()) for t in scales.values())) ** 0.5
    return {name: (factor * m[name]).to(t) for name, t in scales.items()}


def made_up(rows: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Normal numbers; images are drawn at a quarter of their size and stretched, for neighbouring pixels are alike."""
    if len(shape) != 3 or min(shape[1:]) < 8:
        return torch.randn(rows, *shape, generator=generator)
    coarse = torch.randn(rows, shape[0], shape[1] // 4, shape[2] // 4, generator=generator)
    return nn.functional.interpolate(coarse, size=shape[1:], mode="bilinear")


def fresh(module: nn.Module, start: Mapping[str, Tensor]) -> nn.Module:
    """A copy on the CPU with weights drawn anew, after the old ones were erased: one that is kept cannot be missed."""
    net = copy.deepcopy(module).cpu().float().eval().requires_grad_()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        seed_layers(0)
        for p in net.parameters():
            p.fill_(torch.nan)
        for layer in net.modules():
            renew = getattr(layer, "reset_parameters", None)
            if callable(renew) and next(layer.parameters(recurse=False), None) is not None:
                renew()
        for name, p in net.named_parameters():
            if not bool(p.isfinite().all()):
                drawn = torch.randn(p.shape) * start[name].cpu().float() if name in start else torch.randn(p.shape)
                p.copy_(drawn if p.ndim > 1 else torch.full(p.shape, float(not name.endswith("bias"))))
    return net


def _refuse_buffers(module: nn.Module) -> None:
    """Constants of our own layers are known; what others keep may have been learnt."""
    for path, layer in module.named_modules():
        for name, buffer in layer.named_buffers(recurse=False):
            if buffer.is_floating_point() and not type(layer).__module__.startswith("erlangen."):
                raise ValueError(
                    f"metric 'balanced' runs the network, whose buffer {f'{path}.{name}'.lstrip('.')!r} may hold what was learnt "
                    "from private data; keep constants as plain numbers, or give the metric by tensors"
                )
