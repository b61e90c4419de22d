"""A hint names what is near, and says nothing where nothing is."""

from __future__ import annotations

from erlangen.spelling import hint


def test_a_near_name_is_named_and_a_far_one_is_not():
    known = ["epsilon", "max_grad_norm", "auto-s", "evaluations"]
    assert hint("epsilno", known) == " Did you mean 'epsilon'?"
    assert hint("max-grad-norm", known) == " Did you mean 'max_grad_norm'?"
    assert hint("AUTO_S", known) == " Did you mean 'auto-s'?"
    assert hint("colour", known) == ""
    assert hint("", known) == hint("epsilon", []) == ""


def test_two_names_at_most():
    assert hint("tal", ["tall", "tale", "tals"]).count("'") == 4
