"""`erlangen train --shard`: nobody holds the network, and the run is that of one process."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from erlangen.accounting import certificate_check
from erlangen.accounting.ledger import read_ledger
from erlangen.mechanisms import StreamNoise
from erlangen.sampling import physical
from erlangen.training import run, shards
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.session import Session
from erlangen.workers import LostWorker, Workers
from tests.processes import GATHERS, Only, over_nccl, together
from tests.training.test_distributed import CNN, NOISY, SMALL, flat, lost, patients, same_run, session_of, whole_run  # noqa: F401

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHARDED = dataclasses.replace(SMALL, shard=True)
CASES = {
    "views in parts": {"views": 2, "augment": "shift", "max_physical_batch": 4},
    "per-layer": {"clipping": "per-layer"},
    "auto-s": {"clipping": "auto-s"},
    "psac": {"clipping": "psac", "pad": True},
    "noise": {"noise_multiplier": 0.7, "optimizer": "adam", "lr": 0.01},
    "adam-bc": {"noise_multiplier": 0.7, "optimizer": "adam-bc", "lr": 0.01, "ema": 0.0},
    "rarely anybody": {"batch": 1, "noise_multiplier": 0.5},
    "rep": {"mechanism": "rep", "noise_multiplier": 0.7, **CNN},
    "shuffle": {"mechanism": "shuffle", "optimizer": "adam-bc", "lr": 0.01, "noise_multiplier": 0.7, **CNN},
    "steerable": {"model": "c8-tiny", "model_options": {}, "steps": 2},
    "standardised": {"model": "resnet20", "model_options": {}, "steps": 2},
}
QUICK = ("views in parts", "psac", "noise", "rarely anybody", "rep")


def trained(workers: Workers, configs: list[TrainConfig], least: int = 0) -> list[tuple]:
    """Released and last weights (whole on the first worker), test metrics, and how much of everything is held here."""
    shards.LEAST = least
    out = []
    for config in configs:
        session = session_of(workers, config)
        for _ in range(config.steps):
            session.step()
        kept, state, metrics = session.weights(), session.state_dict(), session.evaluate()
        out.append((torch.cat([flat(kept), flat(state["model"])]) if workers.first else None, metrics, held(session)))
    return out


def held(session) -> dict[str, tuple[int, int]]:
    """Coordinates of each kind in this worker's memory, and how many of them a split by rows may round up to."""

    def here(tensors) -> tuple[int, int]:
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return sum(t.numel() for t in local), sum(t.numel() // max(1, len(t)) for t in local if t.ndim)

    moments = (t for state in session.optimizer.state.values() for t in state.values() if torch.is_tensor(t) and t.ndim)
    return {
        "parameters": here(session.model.parameters()),
        "moments": here(moments),
        "average": here(session.ema.average[n] for n, _ in session.model.named_parameters()) if session.ema else (0, 0),
        "sum": here(session.training.mechanism._sum.values()),
    }


def check_same(count: int, cases: dict[str, dict], least: int = 0) -> None:
    configs = [dataclasses.replace(SHARDED, **options) for options in cases.values()]
    alone, ranks = trained(Workers(), configs), together(count, trained, configs, least, timeout=120.0)
    for k, name in enumerate(cases):
        close = 1e-4 if cases[name].get("optimizer") == "adam-bc" else 1e-6  # it divides by small differences
        one, several = alone[k][0], ranks[0][k][0]
        assert float((one - several).abs().max()) <= close * max(1.0, float(one.abs().max())), name
        for rank in ranks:
            assert rank[k][1] == pytest.approx(alone[k][1], rel=1e-5, abs=1e-5), f"{name}: evaluation"
            for kind, (total, row) in alone[k][2].items():
                assert rank[k][2][kind][0] <= total / count + row, f"{name}: {kind}"
        for kind, (total, _) in alone[k][2].items():
            assert sum(rank[k][2][kind][0] for rank in ranks) == total, f"{name}: {kind} held twice or by nobody"


@GATHERS
def test_two_shards_train_what_one_process_trains():
    check_same(2, {name: CASES[name] for name in QUICK})


@GATHERS
@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_every_rule_and_layer_on_more_shards(count, patients):  # noqa: F811
    grouped = {"data": str(patients), "unit": "who", "batch": 6, "max_physical_batch": 8, "noise_multiplier": 0.3}
    check_same(count, CASES | {"patients": grouped})


@GATHERS
def test_layers_too_small_to_be_gathered_alone_are_gathered_together():
    check_same(2, {"cnn": CNN}, least=shards.LEAST)


def cut(workers: Workers, config: TrainConfig, room: int) -> tuple[int, list[int], torch.Tensor | None]:
    """What fits, the rows of the parts of one step, and the weights after it. The others have ten times the first one's room."""
    physical.ON_CPU = room if workers.first else 10 * room
    session = session_of(workers, config)
    seen: list[int] = []
    announce = session._announce
    session._announce = lambda rows, *rest: (seen.append(len(rows)), announce(rows, *rest))[1]  # type: ignore[method-assign]
    session.step()
    weights = session.weights()
    return session.most_rows, seen, flat(weights) if workers.first else None


@GATHERS
def test_a_batch_that_does_not_fit_is_cut_in_shards_too():
    """A network that is split because it does not fit is the last to have room for all records at once."""
    config = dataclasses.replace(SHARDED, **CNN)
    each = physical.ON_CPU / Session(dataclasses.replace(config, shard=False)).most_rows
    whole, parts = (together(2, cut, config, room) for room in (physical.ON_CPU, int(4.1 * each)))
    assert all(len(sizes) == 1 for _, sizes, _ in whole)
    assert len({most for most, _, _ in parts}) == 1
    assert len({len(sizes) for _, sizes, _ in parts}) == 1
    assert all(len(sizes) > 1 and max(sizes) <= most <= 4 for most, sizes, _ in parts)
    assert torch.allclose(whole[0][2], parts[0][2], atol=1e-6)


def alive(workers: Workers, config: TrainConfig) -> int:
    """Bytes of all tensors between two steps, without the records."""
    session = session_of(workers, config)
    for _ in range(2):
        session.step()
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    stored = [(t.to_local() if hasattr(t, "to_local") else t).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in stored}.values()) - session.x.nbytes - session.y.nbytes


@GATHERS
def test_nothing_of_the_size_of_the_network_stays_with_one_process():
    config = dataclasses.replace(SHARDED, model_options={"width": 4096}, batch=16, optimizer="adam", lr=0.01)
    (alone,), apart = together(1, alive, config), together(2, alive, config)
    assert alone > 5 * 4 * 307_210, "parameters, gradient, two moments and the average"
    assert max(apart) < 0.52 * alone


def on_one_device(workers: Workers, device: str) -> list[torch.Tensor]:
    """A part of the noise's stream is the device's, so that all of it is drawn where it is used."""
    if device == "cuda":
        over_nccl()
    shards.LEAST = 0
    out = []
    for precision in ("float32", "auto"):
        for group in (workers, Only()):
            config = dataclasses.replace(SHARDED, **CNN, device=device, precision=precision, noise_multiplier=0.7)
            session = Session(config, workers=group)
            for _ in range(3):
                session.step()
            session.evaluate()
            out.append(flat(session.weights()).cpu())
    return out


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=GATHERS), pytest.param("cuda", marks=GPU)])
def test_shards_live_on_the_device(device):
    whole, parts, half, half_parts = together(1, on_one_device, device, spawn=device == "cuda")[0]
    assert float((whole - parts).abs().max()) <= (1e-6 if device == "cpu" else 1e-5), "a GPU's kernels sum in an order of layouts"
    assert float((half - half_parts).abs().max()) <= 1e-2, "16-bit products, in another layout of the filters"


# --- the noise ------------------------------------------------------------------------------------------------------


def noise_of_a_run(workers: Workers, secure: bool, shared: bool = False) -> torch.Tensor | None:
    """What steps on empty batches add to the gradient's sum, gathered: [steps, d] on the first worker."""
    config = dataclasses.replace(
        SHARDED, model="logistic", model_options={}, batch=1e-6, lr=1e-6, momentum=0.0, ema=0.0, noise_multiplier=1.5,
        max_grad_norm=2.0, steps=40, seed=None, secure=secure,
    )  # fmt: skip
    session = session_of(workers, config)
    if shared:  # the broken twin: one stream for what everybody holds
        session.training.mechanism.noise = StreamNoise(0)
        session.training.mechanism.noise.seeded = False
    seen = [session.weights()]
    for _ in range(config.steps):
        session.step()
        seen.append(session.weights())
    walk = torch.stack([flat(w) for w in seen]).double() if workers.first else None
    return None if walk is None else walk.diff(dim=0)


def check_noise(seen: torch.Tensor, std: float) -> None:
    """Variance std² on every coordinate; white over coordinates of both shards, and over steps."""
    z = seen / std
    steps, d = z.shape
    assert float(z.square().mean()) == pytest.approx(1.0, abs=6 * (2 / z.numel()) ** 0.5)
    assert float(z.square().mean(0).max()) < 1 + 8 * (2 / steps) ** 0.5
    for lag in range(1, d // 2 + 10):  # whoever holds the coordinates
        together = z[:, lag:] * z[:, :-lag]
        assert abs(float(together.mean())) < 6 / together.numel() ** 0.5, f"coordinates {lag} apart"
    assert abs(float((z[1:] * z[:-1]).mean())) < 6 / z.numel() ** 0.5


@GATHERS
@pytest.mark.parametrize("secure", [False, True])
def test_the_noise_of_all_shards_is_that_of_one_process(secure):
    check_noise(together(2, noise_of_a_run, secure)[0], 1.5 * 2.0)


@GATHERS
def test_shards_that_share_a_stream_are_caught():
    with pytest.raises(AssertionError):
        check_noise(together(2, noise_of_a_run, False, True)[0], 1.5 * 2.0)


# --- runs -----------------------------------------------------------------------------------------------------------

RUN = dataclasses.replace(NOISY, optimizer="adam", lr=0.01)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run.train(RUN, folder)
    return folder


@GATHERS
def test_a_sharded_run_leaves_the_folder_of_one_process(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    together(2, whole_run, str(folder), dataclasses.replace(RUN, shard=True))
    same_run(uninterrupted, folder)
    one, several = (read_ledger(f / "ledger.jsonl") for f in (uninterrupted, folder))
    assert several.pairs() == one.pairs()
    assert not certificate_check.verify(folder / "certificate.json")
    told, said = (json.loads((f / "certificate.json").read_text()) for f in (uninterrupted, folder))
    others = {"created", "ledger", "config", "weights"}  # these differ by rounding, as `same_run` bounds it
    assert {key for key in told if told[key] != said[key]} <= others
    names = lambda f: sorted(p.name for p in f.iterdir() if not p.name.endswith(".lock"))  # noqa: E731
    assert names(folder) == names(uninterrupted)
    for name in ("checkpoint.safetensors", "public.safetensors"):
        left, right = (load_file(f / name) for f in (uninterrupted, folder))
        assert {k: v.shape for k, v in left.items()} == {k: v.shape for k, v in right.items()}


def stopped(count: int, folder: Path, config: TrainConfig) -> None:
    errors = together(count, whole_run, str(folder), config, "asks to stop", 3, failing=True)
    assert all(isinstance(e, run.Interrupted) for e in errors), errors


@GATHERS
def test_a_sharded_run_goes_on_in_one_process_and_in_more_shards(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    stopped(2, folder, dataclasses.replace(RUN, shard=True))
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    said: list[str] = []
    run.resume(folder, say=said.append)
    assert any("shard does nothing here" in text for text in said)
    same_run(uninterrupted, folder)
    together(3, whole_run, str(copy), RUN)
    same_run(uninterrupted, copy)
    assert read_ledger(copy / "ledger.jsonl").steps == 6


def resumed_in_shards(workers: Workers, folder: str) -> bool:
    from erlangen.training import distributed

    if workers.first:
        session = distributed.resume(folder, say=lambda text: None, shard=True).session
    else:
        session = distributed.follow(workers)
    return session.shards is not None


@GATHERS
def test_a_run_of_one_process_goes_on_in_shards(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    stopped(1, folder, RUN)
    assert together(2, resumed_in_shards, str(folder)) == [True, True]
    same_run(uninterrupted, folder)
    assert together(2, resumed_in_shards, str(folder)) == [True, True], "complete: nothing to do, and nobody waits"


@GATHERS
@pytest.mark.slow
def test_a_lost_shard_ends_the_run_cleanly(tmp_path):
    errors = lost(3, tmp_path / "run", "dies", 3, config=dataclasses.replace(RUN, shard=True))
    assert all(isinstance(e, LostWorker) and "--resume" in str(e) for e in errors), errors
    assert 3 <= read_ledger(tmp_path / "run" / "ledger.jsonl").steps <= 4


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"mechanism": "geodp"}, {"mechanism": "clipless"}, {"mechanism": "spectral"}, {"clipping": "adaptive"}, {"graph": True},
        {"sampling": "importance"}, {"selective": True}, {"denoise": "james-stein"}, {"non_private": True},
    ],
)  # fmt: skip
def test_what_cannot_be_sharded_is_named_with_its_cure(options):
    (name, value), = options.items()
    with pytest.raises(ConfigError, match=f"{name} is {value!r}, which --shard cannot do; .* or leave --shard out"):
        TrainConfig(shard=True, **options)


def computed_weights(workers: Workers) -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 2)))
    shards.split(model, workers, torch.device("cpu"))


def test_computed_weights_are_refused():
    for error in together(2, computed_weights, failing=True):
        assert "at '1' computes a weight from parameters" in str(error)


def test_the_first_worker_cannot_ask_for_anything_else():
    with pytest.raises(ValueError, match="known are evaluate"):
        shards.Shards.attend(_Asked("rm"))  # type: ignore[arg-type]


class _Asked:
    """Shards whose first worker asks for this."""

    def __init__(self, order: str) -> None:
        self.workers, self.session, self._order = self, None, order

    def tell(self, message: bytes) -> bytes:
        return self._order.encode()


@GATHERS
@pytest.mark.slow
def test_torchrun_shards_from_the_command_line(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "erlangen", "train", "--shard"]
    options = ["--model", "mlp", "--epsilon", "3", "--steps", "6", "--batch", "64", "--out", str(tmp_path / "r"), "--json"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["steps"] == 6
    weights = load_file(tmp_path / "r" / "weights.safetensors")
    assert all(np.isfinite(t.numpy()).all() for t in weights.values())
