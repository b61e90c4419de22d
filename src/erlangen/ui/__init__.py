"""A local page about a folder of runs: what they guarantee, how they compare, how a live one goes, what a plan would cost."""

from erlangen.ui.server import Server

__all__ = ["Server"]
