"""A prior without a record: features that a network learns from made-up images before it sees private ones.

Where noise rules (few records, a small ε), much of a private training goes into learning what edges and textures are. No privacy
has to be paid for that: any image has them, also one that nobody took.
"""

from erlangen.prior.images import made_up_images
from erlangen.prior.learn import PriorOptions, learn_prior, save_prior

__all__ = ["PriorOptions", "learn_prior", "made_up_images", "save_prior"]
