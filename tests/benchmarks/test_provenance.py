"""Figures say what made them: commit and versions."""

from __future__ import annotations

import re

import torch

from tests.scripts import script

provenance = script("provenance")


def test_a_figure_names_its_commit_and_versions(monkeypatch):
    monkeypatch.delenv("ERLANGEN_COMMIT", raising=False)
    cpu = provenance.provenance()
    assert set(cpu) == {"commit", "torch"}
    assert cpu["torch"] == torch.__version__
    assert cpu["commit"] is None or re.fullmatch(r"[0-9a-f]{7,}\+?", cpu["commit"])
    gpu = provenance.provenance("cuda")
    assert {"triton", "cuda", "cudnn", "driver"} <= set(gpu)
    assert gpu["cuda"] == torch.version.cuda


def test_a_copy_without_a_repository_is_told_its_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.delenv("ERLANGEN_COMMIT", raising=False)
    assert provenance.commit() is None
    monkeypatch.setenv("ERLANGEN_COMMIT", "b73500e")
    assert provenance.provenance()["commit"] == "b73500e"


def test_what_is_not_there_is_none():
    assert provenance._said("no-such-program") is None
    assert provenance._said("false") is None
    assert provenance._version("no-such-package") is None
