"""REP, representation-aligned DP-SGD: clip and noise in the coordinates in which the network was initialised.

    g̃_i = M⁻¹ g_i,   clip ‖g̃_i‖ ≤ C,   release  M(Σ g̃_i + N(0, σ²C²I)) / B,   M = diag(m)      (Algorithm 1)

m holds the scales of a generalised He initialisation, read off the *structure* of the network: group, representations,
kernel basis, layer widths. It is fixed before training and depends on no record, so that M is post-processing:
sensitivity C in whitened coordinates, noise multiplier σ, one release is Gaussian(σ). SHUFFLE is the control: the same
numbers m, handed to the wrong coefficients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList

from erlangen.mechanisms.balanced import balanced_scales, with_equal_signal
from erlangen.mechanisms.base import Context, Mechanism, known_options, register_mechanism
from erlangen.mechanisms.gaussian import GaussianMechanism
from erlangen.mechanisms.geometry import Diagonal
from erlangen.spelling import hint
from erlangen.streams import Stream

#: name → the method by which an equivariant layer gives this metric; other layers have the He scale in both
METRICS = {"escnn": "init_std", "paper": "paper_metric"}

Metric = dict[str, Tensor]
OPTIONS = ("metric", "power", "input_shape")


def initial_scales(module: nn.Module, metric: str = "escnn") -> Metric:
    """m of every trainable parameter, before normalisation.

    Equivariant layers give their own (``init_std()`` or ``paper_metric()``). Elsewhere the He scale: 1/√fan_in for the
    weights of linear maps and convolutions, 1 for biases, embeddings and the affine part of norms.
    """
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; choose one of balanced, {', '.join(sorted(METRICS))}, or give tensors by name")
    scales: Metric = {}
    for name, owner, local, parameter in _places(module):
        own = getattr(owner, METRICS[metric], None)
        if _of_escnn(owner, local) and metric != "escnn":
            raise ValueError(f"metric {metric!r} of {name!r} is not known for escnn's layers; use 'escnn' or give tensors by name")
        given = own()[local] if callable(own) else _he_scale(owner, local, parameter)
        scales[name] = torch.as_tensor(given).to(parameter).expand(parameter.shape).clone()
    return scales


def _places(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """(full name, layer, name in the layer, parameter) of every trainable parameter, shared ones once.

    What a parametrization computes a weight from counts as that weight of its layer.
    """
    wanted = {name for name, p in module.named_parameters() if p.requires_grad}
    modules = dict(module.named_modules())
    for path, owner in modules.items():
        for local, parameter in owner.named_parameters(recurse=False):
            name = f"{path}.{local}" if path else local
            if name not in wanted:
                continue
            if isinstance(owner, ParametrizationList):
                layer, _, weight = path.rpartition(".")
                yield name, modules[layer.rpartition(".")[0]], weight, parameter
            else:
                yield name, owner, local, parameter


def _of_escnn(owner: nn.Module, local: str) -> bool:
    """Whether these are the coefficients of one of escnn's own steerable kernels."""
    return local == "weights" and type(owner).__module__.startswith("escnn.") and hasattr(owner, "basisexpansion")


def _he_scale(owner: nn.Module, local: str, parameter: Tensor) -> float | Tensor:
    if _of_escnn(owner, local):
        from escnn.nn.init import _generalized_he_init_variances  # despite its name, standard deviations

        return _generalized_he_init_variances(owner.basisexpansion)
    if parameter.ndim < 2 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm)):
        return 1.0
    if isinstance(owner, _ConvTransposeNd):  # [in, out/groups, *kernel]
        return (parameter.shape[0] // owner.groups * math.prod(parameter.shape[2:])) ** -0.5
    return math.prod(parameter.shape[1:]) ** -0.5


def finite_power(power: float) -> float:
    if not math.isfinite(power):
        raise ValueError(f"power is {power}; M^p needs a finite exponent")
    return power


def normalised(scales: Mapping[str, Tensor], power: float = 1.0) -> Metric:
    """m^power with geometric mean 1, so that C compares with ISO: M → cM with C → C/c is the same mechanism."""
    finite_power(power)
    logs = {name: power * t.double().log() for name, t in scales.items()}
    count = sum(t.numel() for t in logs.values())
    centre = sum(float(t.sum()) for t in logs.values()) / max(count, 1)
    return {name: (t - centre).exp().to(scales[name]) for name, t in logs.items()}


def structural_metric(module: nn.Module, metric: str = "escnn") -> Metric:
    """`initial_scales`, after proof that they do not depend on the values of parameters, buffers and other tensors.

    A network that was trained before holds private information in its weights; a metric read off them would leak it.
    So the scales are computed again from a copy with other weights, and must be the same to the last bit.
    """
    scales = initial_scales(module, metric)
    again = initial_scales(_with_other_values(module), metric)
    changed = [name for name, m in scales.items() if not torch.equal(m, again[name])]
    if changed:
        raise ValueError(
            f"the metric of {changed[0]!r} changes with the weights of the network, so it may depend on private data; "
            "compute it from the structure of the layer alone"
        )
    return scales


def _with_other_values(module: nn.Module) -> nn.Module:
    """A copy in which every tensor that a layer keeps, be it a plain attribute, has other values.

    Whole numbers of our own layers and of escnn's are indices, part of the structure; of others they may count records.
    """
    twin = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in twin.modules():
            known = type(layer).__module__.startswith(("erlangen.", "escnn."))
            kept = [*layer._parameters.values(), *layer._buffers.values(), *vars(layer).values()]
            for t in (t for t in kept if isinstance(t, Tensor)):
                if t.is_floating_point() or t.is_complex():
                    t.copy_(torch.randn(t.shape, generator=generator).to(t))
                elif not known:
                    t.copy_(torch.randint(0, 2, t.shape, generator=generator).to(t) if t.dtype == torch.bool else t + 1)
    return twin


def custom_metric(module: nn.Module, given: Mapping[str, Any]) -> Metric:
    """A metric from the caller, by parameter name; whoever gives it vouches that it was not made from private data."""
    if not isinstance(given, Mapping):
        raise ValueError(f"metric is a {type(given).__name__}; give a name, or tensors by parameter name: {{'0.weight': …}}")
    metric: Metric = {}
    places = {name: parameter for name, _, _, parameter in _places(module)}
    if strange := sorted(set(given) - set(places)):
        meant = hint(strange[0], list(places))
        raise ValueError(f"the metric has an entry {strange[0]!r}, which is no trainable parameter.{meant}")
    for name, parameter in places.items():
        if name not in given:
            raise ValueError(f"the metric has no entry for parameter {name!r}; give one positive number per coordinate")
        try:
            metric[name] = torch.as_tensor(given[name]).to(parameter).expand(parameter.shape).clone()
        except RuntimeError as error:
            shape = tuple(torch.as_tensor(given[name]).shape)
            raise ValueError(f"the metric of {name!r} has shape {shape}, the parameter {tuple(parameter.shape)}") from error
        if not bool(torch.isfinite(metric[name]).all()) or bool((metric[name] <= 0).any()):
            raise ValueError(f"the metric of {name!r} holds {float(metric[name].min())}; entries must be positive")
    return metric


def convolution_weights(module: nn.Module) -> list[str]:
    """The parameters that SHUFFLE permutes: kernels, or the coefficients of steerable kernels."""
    is_kernel = lambda owner: isinstance(owner, _ConvNd) or hasattr(owner, "coefficient_gradient")  # noqa: E731
    return [
        name for name, owner, local, _ in _places(module)
        if (local == "weight" and is_kernel(owner)) or _of_escnn(owner, local)
    ]  # fmt: skip


def shuffled(metric: Mapping[str, Tensor], names: list[str], seed: int = 0, scope: str = "global") -> Metric:
    """The metric with its entries at ``names`` permuted once: over all of them, or within each ``layer``."""
    if scope not in ("global", "layer"):
        raise ValueError(f"scope is {scope!r}; choose 'global' or 'layer'")
    if not names:
        raise ValueError("there is no convolution whose metric could be shuffled; use mechanism 'rep'")
    generator = Stream("shuffle", seed).at(0)
    result = dict(metric)
    for group in [names] if scope == "global" else [[name] for name in names]:
        flat = torch.cat([metric[name].flatten() for name in group])
        mixed = flat[torch.randperm(flat.numel(), generator=generator).to(flat.device)]
        for name, part in zip(group, mixed.split([metric[n].numel() for n in group]), strict=True):
            result[name] = part.view(metric[name].shape).clone()
    return result


class Aligned(GaussianMechanism):
    """The Gaussian mechanism in the diagonal geometry M; sensitivity C, event Gaussian(σ)."""

    def __init__(self, context: Context, metric: Metric, facts: Mapping[str, Any], name: str) -> None:
        super().__init__(context.noise_multiplier, context.clipping, Diagonal(metric), context.noise, name)
        self.facts = dict(facts)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), **self.facts}


def aligned_metric(
    module: nn.Module, options: Mapping[str, Any], input_shape: tuple[int, ...] | None = None
) -> tuple[Metric, dict[str, Any]]:
    """M from the options ``metric`` and ``power``, and plain facts about it."""
    chosen, power = options.get("metric", "escnn"), finite_power(float(options.get("power", 1.0)))
    custom = not isinstance(chosen, str)
    if chosen == "balanced":
        shape = options.get("input_shape", input_shape)
        if not isinstance(shape, (tuple, list)):
            raise ValueError(
                f"input_shape is {shape!r}; metric 'balanced' needs the shape of one record: "
                "mechanism_options={'input_shape': (3, 32, 32), …}"
            )
        scales = balanced_scales(module, tuple(shape), structural_metric(module))
        return with_equal_signal(scales, power), {"metric": chosen, "power": power}
    scales = custom_metric(module, chosen) if custom else structural_metric(module, chosen)
    return normalised(scales, power), {"metric": "given by the caller" if custom else chosen, "power": power}


@register_mechanism("rep")
def rep(context: Context) -> Mechanism:
    """Options: metric ('escnn', 'paper', 'balanced', or tensors by parameter name), power (M^p), input_shape (for 'balanced')."""
    known_options("rep", context.options, OPTIONS)
    return Aligned(context, *aligned_metric(context.module, context.options, context.input_shape), "rep")


@register_mechanism("shuffle")
def shuffle(context: Context) -> Mechanism:
    """REP with the convolutions' entries of M permuted. Options: those of 'rep', seed, scope ('global' or 'layer').

    The initial weights are those of the unshuffled M: the network is built before the mechanism and does not know.
    """
    known_options("shuffle", context.options, (*OPTIONS, "seed", "scope"))
    metric, facts = aligned_metric(context.module, context.options, context.input_shape)
    seed, scope = int(context.options.get("seed", 0)), context.options.get("scope", "global")
    mixed = shuffled(metric, convolution_weights(context.module), seed, scope)
    return Aligned(context, mixed, {**facts, "shuffle_scope": scope, "shuffle_seed": seed}, "shuffle")
