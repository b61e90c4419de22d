"""Several processes train as one: same batches, one noise, one ledger, equal weights; losses end cleanly."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from erlangen import joint
from erlangen.accounting import Accountant, certificate_check
from erlangen.accounting.ledger import LedgerError, read_ledger
from erlangen.gradients.rows import RowMap
from erlangen.gradients.tape import Tape
from erlangen.mechanisms import GaussianMechanism, SecureNoise, StreamNoise, mechanisms
from erlangen.private import PrivateTraining
from erlangen.sampling import PoissonSampler
from erlangen.training import distributed, run
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.session import Session
from erlangen.workers import LostWorker, Workers
from tests.processes import Only, over_nccl, together

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = TrainConfig(
    model="mlp", model_options={"width": 8}, epsilon=None, noise_multiplier=0.0, steps=4, batch=24, seed=0, evaluations=2, lr=0.5
)
CNN = {"model": "cnn", "model_options": {"width": 4}}
CASES = {
    "flat": {"views": 2, "augment": "shift", "max_physical_batch": 4},
    "noise": {"noise_multiplier": 1.0, "clipping": "adaptive", "optimizer": "adam-bc", "lr": 0.01, "ema": 0.9},
    "rarely anybody": {"batch": 1, "noise_multiplier": 0.5, "denoise": "james-stein"},
    "per-layer": {"clipping": "per-layer"},
    "padded": {"pad": True, "views": 2, "augment": "shift"},
    "rep": {"mechanism": "rep", "noise_multiplier": 0.7, **CNN},
    "shuffle": {"mechanism": "shuffle", "noise_multiplier": 0.7, **CNN},
    "spectral": {"mechanism": "spectral", "mechanism_options": {"ratio": 0.5}, "noise_multiplier": 0.7, **CNN},
    "gredp": {"mechanism": "gredp", "noise_multiplier": 0.7, **CNN},
    "geodp": {"mechanism": "geodp", "noise_multiplier": 0.7},
    "geodp shrink": {"mechanism": "geodp", "mechanism_options": {"form": "shrink"}, "noise_multiplier": 0.7},
    "geodp angles": {"mechanism": "geodp", "mechanism_options": {"form": "angles"}, "noise_multiplier": 0.7},
    "clipless": {
        "mechanism": "clipless", "mechanism_options": {"loss": "cross-entropy"}, "model": "lipschitz-lenet", "model_options": {},
        "noise_multiplier": 0.7,
    },
}  # fmt: skip


def flat(module_or_weights) -> torch.Tensor:
    weights = module_or_weights if isinstance(module_or_weights, dict) else dict(module_or_weights.named_parameters())
    return torch.cat([t.detach().flatten() for t in weights.values()])


def session_of(workers: Workers, config: TrainConfig) -> Session:
    """As `distributed` makes it: the others learn the configuration from the first."""
    if not workers.first:
        config = TrainConfig.from_dict(workers.decide(dict)["config"])
    return Session(config, workers=workers)


def trained(workers: Workers, configs: list[TrainConfig]) -> list[torch.Tensor]:
    out = []
    for config in configs:
        session = session_of(workers, config)
        for _ in range(config.steps):
            session.step()
        out.append(torch.cat([flat(session.weights()), flat(session.model)]))
    return out


@pytest.fixture(scope="module")
def patients(tmp_path_factory) -> Path:
    """One hospital with three patients of many images and others of one."""
    g = np.random.default_rng(0)
    labels = np.array([0] * 9 + [1] * 7 + [2] * 5 + list(range(3, 20)))
    x = g.normal(size=(len(labels), 1, 6, 6)).astype(np.float32)
    path = tmp_path_factory.mktemp("data") / "patients.npz"
    np.savez(path, x_train=x, y_train=(x.mean((1, 2, 3)) > 0).astype(int), x_test=x[:4], y_test=np.array([0, 1, 0, 1]), who=labels)
    return path


def check_same(count: int, cases: dict[str, dict]) -> None:
    """Equal within 1e-6, with noise too: the first worker's stream is that of a single process."""
    configs = [dataclasses.replace(SMALL, **options) for options in cases.values()]
    alone = trained(Workers(), configs)
    for ranks in together(count, trained, configs, timeout=120.0):
        for name, a, b in zip(cases, alone, ranks, strict=True):
            close = 1e-4 if "optimizer" in cases[name] else 1e-6  # Adam divides by small numbers
            assert float((a - b).abs().max()) <= close * max(1.0, float(a.abs().max())), name


QUICK = ("flat", "noise", "rarely anybody", "padded", "geodp shrink")


def test_four_workers_do_what_one_does(patients):
    grouped = {"data": str(patients), "unit": "who", "batch": 6, "pad": True, "max_physical_batch": 8}
    check_same(4, {name: CASES[name] for name in QUICK} | {"patients": grouped})


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_every_mechanism_of_the_registry(patients, count):
    grouped = {"data": str(patients), "unit": "who", "batch": 6, "noise_multiplier": 0.3}
    check_same(count, {name: CASES[name] for name in CASES if name not in QUICK} | {"patients": grouped})
    assert {case.get("mechanism", "iso") for case in CASES.values()} == set(mechanisms())


def on_one_device(workers: Workers, device: str, configs: list[TrainConfig]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every message of a step by the device's own back end, to oneself, and without any."""
    if device == "cuda":
        over_nccl()
    there = [dataclasses.replace(config, device=device) for config in configs]
    return [(a.cpu(), b.cpu()) for a, b in zip(trained(Only(), there), trained(Workers(), there), strict=True)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_messages_change_nothing_on_the_device(device):
    """On a GPU: NCCL, with one process."""
    configs = [dataclasses.replace(SMALL, precision="float32", **options) for options in CASES.values()]
    pairs = together(1, on_one_device, device, configs, timeout=180.0, spawn=device == "cuda")[0]
    for name, (sent, kept) in zip(CASES, pairs, strict=True):
        close = 1e-4 if "optimizer" in CASES[name] else 1e-6
        assert float((sent - kept).abs().max()) <= close * max(1.0, float(kept.abs().max())), name


def unseeded(workers: Workers, configs: list[TrainConfig]) -> list[list[bytes]]:
    return [[t.numpy().tobytes()] for t in trained(workers, configs)]


def test_weights_are_identical_to_the_last_bit_without_a_seed_and_in_secure_mode():
    free = dataclasses.replace(SMALL, seed=None, noise_multiplier=1.0)
    configs = [free, dataclasses.replace(free, secure=True), dataclasses.replace(free, optimizer="adam", clipping="adaptive")]
    first, *others = together(3, unseeded, configs)
    assert all(other == first for other in others)
    again = together(2, unseeded, configs)[0]
    assert all(a != b for a, b in zip(first, again, strict=True)), "noise or batches were drawn again"


# --- the noise ------------------------------------------------------------------------------------------------------


class EachAddsItsOwn(GaussianMechanism):
    """The broken twin: every worker adds noise of full scale before the sums are added up."""

    def merge(self, add_up) -> None:
        self.noise.next_release()
        self._sum = {n: self.noise.perturb(t, self.std) for n, t in self._sum.items()}
        super().merge(add_up)


class Repeats(StreamNoise):
    """The broken twin: a noise source that opens the same release every second time."""

    def next_release(self) -> None:
        super().next_release()
        self._step -= self._step % 2


def releases(workers: Workers, count: int, kind: type[GaussianMechanism], source: str) -> torch.Tensor:
    """Private gradients of empty batches, as one worker sees them: nothing but noise, [count, d]."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.0)
    noise = {"secure": SecureNoise, "repeats": lambda: Repeats(0, rank=workers.rank)}.get(
        source, lambda: StreamNoise(0, rank=workers.rank)
    )()
    mechanism = kind(1.5, 2.0, noise=noise)
    parameters = dict(module.named_parameters())
    mechanism.bind(parameters, 4.0)
    training = PrivateTraining(
        module, optimizer, Tape(parameters), mechanism, PoissonSampler(8, 4), Accountant(), None, workers
    )
    training.install()
    out = []
    for _ in range(count):
        training.announce(RowMap.regular(0))
        module(torch.zeros(0, 3)).sum().backward()
        optimizer.step()
        out.append(torch.cat([p.grad.flatten() for p in parameters.values()]))
    return torch.stack(out)


def check_noise(by_rank: list[torch.Tensor], std: float) -> None:
    """N(0, std²I), white over steps, and the very same on every worker."""
    first = by_rank[0].double() / std
    assert all(torch.equal(by_rank[0], other) for other in by_rank[1:])
    n, d = first.shape
    assert len(torch.unique(first[:, 0])) == n, "noise was used twice"
    covariance = first.T @ first / n
    assert float((covariance - torch.eye(d)).abs().max()) < 6 * (2 / n) ** 0.5
    assert float(first.mean(0).abs().max()) < 5 / n**0.5
    assert float((first[1:] * first[:-1]).mean(0).abs().max()) < 6 / n**0.5
    assert float((first**4).mean()) == pytest.approx(3.0, abs=0.5)


@pytest.mark.parametrize("source", ["stream", "secure"])
def test_released_noise_has_the_covariance_of_one_process(source):
    check_noise(together(3, releases, 800, GaussianMechanism, source), 1.5 * 2.0 / 4.0)


@pytest.mark.parametrize(("kind", "source"), [(EachAddsItsOwn, "stream"), (GaussianMechanism, "repeats")])
def test_wrong_noise_is_caught(kind, source):
    with pytest.raises(AssertionError):
        check_noise(together(2, releases, 400, kind, source), 1.5 * 2.0 / 4.0)


# --- what takes long -------------------------------------------------------------------------------------------------


def slow_to_begin(workers: Workers, told: bool) -> list[float]:
    """What the first worker does before it begins takes twice as long as anybody waits for a word."""
    if workers.first:
        if told:
            workers.busy(1.0)
        time.sleep(10)
    session = session_of(workers, SMALL)
    session.step()
    return flat(session.model).tolist()


def test_the_others_wait_for_a_first_worker_that_is_busy():
    mine, theirs = together(2, slow_to_begin, True, timeout=5.0)
    assert mine == theirs
    assert all(isinstance(e, LostWorker) for e in together(2, slow_to_begin, False, timeout=5.0, failing=True)[1:])


def test_a_first_worker_that_fails_while_it_is_busy_says_so():
    errors = together(2, busy_and_failing, failing=True)
    assert isinstance(errors[0], ConfigError)
    assert "no such data" in str(errors[1])


def busy_and_failing(workers: Workers) -> None:
    if not workers.first:
        distributed.follow(workers)
    workers.busy(0.2)
    time.sleep(1.0)
    error = ConfigError("no such data")
    distributed.give_up(workers, error)
    raise error


# --- what can go wrong ----------------------------------------------------------------------------------------------


def drifting(workers: Workers) -> None:
    joint.COMPARE_EVERY = 2
    session = session_of(workers, SMALL)
    session.step()
    if workers.rank == 1:
        with torch.no_grad():
            next(session.model.parameters()).view(-1)[0] += 1e-6
    for _ in range(2):
        session.step()


def test_weights_that_drift_apart_are_noticed():
    errors = together(3, drifting, failing=True)
    assert all(isinstance(e, LostWorker) for e in errors)
    assert "on rank 1" in str(errors[1])


def drifting_after_the_last_step(workers: Workers) -> None:
    session = session_of(workers, SMALL)
    session.step()
    session.step()
    if workers.rank == 1:
        with torch.no_grad():
            next(session.model.parameters()).view(-1)[0] += 1e-6
    distributed.agree(session, last=3)
    distributed.agree(session, last=2)


def test_weights_that_differ_are_neither_evaluated_nor_kept():
    errors = together(2, drifting_after_the_last_step, failing=True)
    assert all(isinstance(e, LostWorker) for e in errors)


def on_two_data_sets(workers: Workers, paths: list[str]) -> None:
    if not workers.first:
        workers.decide(dict)
    Session(dataclasses.replace(SMALL, data=paths[workers.rank]), workers=workers)


def test_workers_with_other_data_are_refused(tmp_path):
    paths = [str(tmp_path / f"{k}.npz") for k in range(2)]
    for k, path in enumerate(paths):
        x = np.full((40, 1, 4, 4), k, dtype=np.float32)
        np.savez(path, x_train=x, y_train=np.arange(40) % 2)
    errors = together(2, on_two_data_sets, paths, failing=True)
    assert all("not started alike" in str(e) for e in errors)
    assert "on rank 1: data" in str(errors[1])


def whole_run(workers: Workers, folder: str, config: TrainConfig, event: str = "", at: int = 0) -> float:
    """A run of all workers; ``event`` happens on the last one after step ``at``."""
    last_rank = workers.rank == workers.count - 1
    plain = Session.step

    def step(self: Session) -> None:
        plain(self)
        if self.step_count == at and last_rank:
            if event == "dies":
                os._exit(1)
            if event == "asks to stop":
                os.kill(os.getpid(), signal.SIGTERM)
            if event == "hangs":
                time.sleep(600)

    Session.step = step  # type: ignore[method-assign]
    started = time.perf_counter()
    try:
        if not workers.first:
            distributed.follow(workers)
        elif (Path(folder) / "config.json").exists():
            distributed.resume(folder, say=lambda text: None)
        else:
            distributed.train(config, folder, say=lambda text: None)
    except BaseException as error:
        error.args = (*error.args, time.perf_counter() - started)
        raise
    finally:
        Session.step = plain  # type: ignore[method-assign]
    return time.perf_counter() - started


NOISY = dataclasses.replace(SMALL, noise_multiplier=1.2, evaluations=3, steps=6)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    run.train(NOISY, folder)
    return folder


def same_run(a: Path, b: Path) -> None:
    left, right = (load_file(f / "weights.safetensors") for f in (a, b))
    for name in left:
        torch.testing.assert_close(left[name], right[name], rtol=1e-4, atol=1e-6)


def test_a_run_by_three_workers_leaves_the_folder_of_one(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    together(3, whole_run, str(folder), NOISY)
    same_run(uninterrupted, folder)
    assert read_ledger(folder / "ledger.jsonl").steps == 6
    assert not certificate_check.verify(folder / "certificate.json")
    names = lambda f: sorted(p.name for p in f.iterdir() if not p.name.endswith(".lock"))  # noqa: E731
    assert names(folder) == names(uninterrupted)


def test_a_lost_worker_ends_the_run_cleanly_and_two_others_resume_it(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    errors = lost(3, folder, "dies", 3)
    assert all(isinstance(e, LostWorker) and "--resume" in str(e) for e in errors)
    counted = read_ledger(folder / "ledger.jsonl").steps
    assert 3 <= counted <= 4
    together(2, whole_run, str(folder), NOISY)
    book = read_ledger(folder / "ledger.jsonl")
    assert book.steps == counted + (6 - 2), "resumed at step 2; what was used after it stays spent"
    same_run(uninterrupted, folder)


def lost(count: int, folder: Path, event: str, at: int, timeout: float = 60.0, config: TrainConfig = NOISY) -> list:
    """Errors of the workers that are left when the last one is lost."""
    from tests import processes

    store = folder.parent / "store"
    answers = processes.CONTEXT.Queue()
    started = [
        processes.CONTEXT.Process(
            target=processes._process,
            args=(answers, whole_run, rank, count, str(store), timeout, (str(folder), config, event, at)),
        )
        for rank in range(count)
    ]
    for process in started:
        process.start()
    import pickle

    got = dict((answers.get(timeout=100)[:2]) for _ in range(count - 1))
    started[-1].kill()
    for process in started:
        process.join()
    return [pickle.loads(got[rank]) for rank in range(count - 1)]


def test_a_worker_that_hangs_is_lost_after_the_timeout(tmp_path):
    errors = lost(2, tmp_path / "run", "hangs", 2, timeout=4.0)
    assert isinstance(errors[0], LostWorker)
    assert errors[0].args[-1] < 60
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").steps >= 2


def test_any_worker_may_ask_for_a_stop_and_another_number_goes_on_exactly(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    errors = together(3, whole_run, str(folder), NOISY, "asks to stop", 3, failing=True)
    assert all(isinstance(e, run.Interrupted) for e in errors)
    assert read_ledger(folder / "ledger.jsonl").steps == 3
    together(4, whole_run, str(folder), NOISY)
    same_run(uninterrupted, folder)
    assert read_ledger(folder / "ledger.jsonl").steps == 6
    assert all(isinstance(seconds, float) for seconds in together(2, whole_run, str(folder), NOISY)), "complete: nothing to do"


def unwritable(workers: Workers, folder: str) -> int:
    """The ledger's disk is full from the third step on; how far did the weights of this worker get?"""
    from erlangen.accounting import ledger

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    seen: list[torch.Tensor] = []
    plain = Session.step

    def step(self: Session) -> None:
        seen.append(flat(self.model).clone())
        if workers.first and self.step_count == 2:
            ledger._write_all = full
        plain(self)

    Session.step = step  # type: ignore[method-assign]
    config = dataclasses.replace(NOISY, steps=200, epsilon=None, noise_multiplier=1.0, evaluations=1)
    try:
        distributed.train(config, folder, say=lambda text: None) if workers.first else distributed.follow(workers)
    except (LedgerError, LostWorker) as error:
        return len(seen) if "No space left" in str(error) else -1
    raise AssertionError("trained without a ledger")


def test_a_ledger_that_cannot_be_written_stops_every_worker(tmp_path):
    steps = together(2, unwritable, str(tmp_path / "run"))
    assert steps[0] == steps[1] > 0
    assert read_ledger(tmp_path / "run" / "ledger.jsonl").steps >= steps[0] - 1


def misconfigured(workers: Workers, folder: str) -> None:
    if workers.first:
        distributed.train(dataclasses.replace(SMALL, model_options={"no_such_option": 1}), folder, say=lambda text: None)
    distributed.follow(workers)


def test_a_run_that_cannot_begin_is_refused_everywhere(tmp_path):
    first, second = together(2, misconfigured, str(tmp_path / "a"), failing=True)
    assert "no_such_option" in str(first)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "ledger.jsonl").write_text("x")
    first, second = together(2, misconfigured, str(tmp_path / "b"), failing=True)
    assert isinstance(first, ConfigError)
    assert "holds a run already" in str(second), "the other worker says why, too"


def test_timeouts_are_numbers(monkeypatch):
    monkeypatch.setenv("ERLANGEN_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="ERLANGEN_TIMEOUT"):
        distributed._timeout()
    monkeypatch.setenv("ERLANGEN_TIMEOUT", "7.5")
    assert distributed._timeout() == 7.5


def test_variables_that_no_torchrun_has_set_are_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match=r"WORLD_SIZE is 2, but MASTER_ADDR is not set.*torchrun"), distributed.joined():
        pass


def test_a_rank_without_a_world_trains_by_itself(tmp_path):
    env = {**os.environ, "RANK": "1"}
    env.pop("WORLD_SIZE", None)
    command = [sys.executable, "-m", "erlangen", "train", "--model", "logistic", "--steps", "1", "--noise-multiplier", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path / "r")], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "r" / "certificate.json").is_file()


@pytest.mark.slow
def test_torchrun_trains_from_the_command_line(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "erlangen", "train"]
    options = ["--model", "mlp", "--epsilon", "3", "--steps", "6", "--batch", "64", "--out", str(tmp_path / "r"), "--json"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert summary["steps"] == 6
    assert math.isclose(summary["guarantee"]["epsilon"]["pld"], 3.0, rel_tol=0.01)
