"""Which records make a batch: Poisson sampling for real, virtual batches, units of privacy."""

from erlangen.sampling.loader import PrivateLoader
from erlangen.sampling.physical import find_physical_batch
from erlangen.sampling.samplers import PoissonSampler, Sampler, ShuffledBatches, register_sampler, samplers
from erlangen.sampling.units import Units

__all__ = [
    "PoissonSampler",
    "PrivateLoader",
    "Sampler",
    "ShuffledBatches",
    "Units",
    "find_physical_batch",
    "register_sampler",
    "samplers",
]
