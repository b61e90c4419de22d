"""A hint names what is near, and says nothing where nothing is."""

from __future__ import annotations

import pytest

from erlangen.spelling import hint, refuse_unknown


def test_a_near_name_is_named_and_a_far_one_is_not():
    known = ["epsilon", "max_grad_norm", "auto-s", "evaluations"]
    assert hint("epsilno", known) == " Did you mean 'epsilon'?"
    assert hint("max-grad-norm", known) == " Did you mean 'max_grad_norm'?"
    assert hint("AUTO_S", known) == " Did you mean 'auto-s'?"
    assert hint("colour", known) == ""
    assert hint("", known) == hint("epsilon", []) == ""


def test_two_names_at_most():
    assert hint("tal", ["tall", "tale", "tals"]).count("'") == 4


def test_options_that_would_do_nothing_are_refused_with_those_there_are():
    refuse_unknown("loss 'hinge'", ["margin"], ["margin", "kind"])
    with pytest.raises(ValueError, match=r"loss 'hinge' has no option \['margn'\]; it takes margin, kind. Did you mean 'margin'\?"):
        refuse_unknown("loss 'hinge'", ["kind", "margn"], ["margin", "kind"])
    with pytest.raises(ValueError, match="it takes none"):
        refuse_unknown("iso", ["power"], [])
