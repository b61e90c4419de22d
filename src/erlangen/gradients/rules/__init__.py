"""One file per layer family. Importing this package registers them all."""

from erlangen.gradients.rules import attention, conv, embedding, interop, linear, norm, recurrent, standardised

__all__ = ["attention", "conv", "embedding", "interop", "linear", "norm", "recurrent", "standardised"]
