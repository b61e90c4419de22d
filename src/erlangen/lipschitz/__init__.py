"""Lipschitz networks: bounded layers and losses, bound propagation, certified norms, projection, adversarial search.

network = Sequential(
    BoundedInput((1, 28, 28), 20.0), SpectralConv2d(1, 16, 3), MaxMin(), Flatten(), SpectralDense(12544, 10))
print(backpropagate_bounds(network, CrossEntropy(10.0).constant(10)))
"""

from erlangen.lipschitz.activations import FullSort, GroupSort, Householder, MaxMin, ReLU
from erlangen.lipschitz.backward_clip import AdaptiveBackwardClip, BackwardClip
from erlangen.lipschitz.base import Activation, Constrained, LipschitzLayer
from erlangen.lipschitz.bounds import Sensitivities, backpropagate_bounds, lipschitz_constant, output
from erlangen.lipschitz.compose import Residual, Sequential
from erlangen.lipschitz.conv import OrthogonalConv2d, SpectralConv2d
from erlangen.lipschitz.dense import FrobeniusDense, OrthogonalDense, SpectralDense
from erlangen.lipschitz.inputs import BoundedInput
from erlangen.lipschitz.losses import MAE, CrossEntropy, HingeKR, KCosine, LipschitzLoss, MulticlassHinge, loss_constant
from erlangen.lipschitz.pooling import AvgPool2d, GlobalAvgPool, L2NormPool2d, MaxPool2d, TokenMean
from erlangen.lipschitz.projection import Projector
from erlangen.lipschitz.radius import certified_radius, is_certifiable
from erlangen.lipschitz.search import SensitivityError, SensitivityReport, check_layer, check_loss, check_sensitivity
from erlangen.lipschitz.shape import Bias, Flatten, InvertibleDownsampling, LayerCentering, Permute, Tokens

__all__ = [
    "MAE",
    "Activation",
    "AdaptiveBackwardClip",
    "AvgPool2d",
    "BackwardClip",
    "Bias",
    "BoundedInput",
    "Constrained",
    "CrossEntropy",
    "Flatten",
    "FrobeniusDense",
    "FullSort",
    "GlobalAvgPool",
    "GroupSort",
    "HingeKR",
    "Householder",
    "InvertibleDownsampling",
    "KCosine",
    "L2NormPool2d",
    "LayerCentering",
    "LipschitzLayer",
    "LipschitzLoss",
    "MaxMin",
    "MaxPool2d",
    "MulticlassHinge",
    "OrthogonalConv2d",
    "OrthogonalDense",
    "Permute",
    "Projector",
    "ReLU",
    "Residual",
    "Sensitivities",
    "SensitivityError",
    "SensitivityReport",
    "Sequential",
    "SpectralConv2d",
    "SpectralDense",
    "TokenMean",
    "Tokens",
    "backpropagate_bounds",
    "certified_radius",
    "check_layer",
    "check_loss",
    "check_sensitivity",
    "is_certifiable",
    "lipschitz_constant",
    "loss_constant",
    "output",
]
