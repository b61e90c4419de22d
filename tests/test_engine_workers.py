"""PrivacyEngine in a user's own distributed script: DDP-wrapped or plain, equal to one process, its all-reduce silent."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import erlangen
from erlangen import joint
from erlangen.workers import LostWorker, Workers
from tests.processes import together

N, B = 64, 16


class WithBuffer(nn.Module):
    """A buffer makes DDP broadcast in every forward pass, unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.scale)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def data() -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, 4, 4, generator=g)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


def script(workers: Workers, wrap: bool, options: dict) -> tuple[torch.Tensor, float, int]:
    """What users write: every process makes its own model, loader and engine. Weights, ε and the number of batches."""
    torch.manual_seed(workers.rank)  # DDP starts everybody from the first process's weights, and so do we
    model: nn.Module = WithBuffer()
    sampler = DistributedSampler(data()) if not workers.alone else None
    loader = DataLoader(data(), batch_size=B // workers.count, sampler=sampler)
    model = DistributedDataParallel(model) if wrap else model
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    engine = erlangen.PrivacyEngine(seed=0)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 0.7, "max_physical_batch": 5, **options}
    model, optimizer, private = engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **options)
    batches = 0
    for x, y in private:
        batches += 1
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return weights, engine.get_epsilon(1e-5), batches


CASES = [
    (True, {}),
    (False, {}),
    (True, {"noise_multiplier": 1.0, "clipping": "adaptive", "unit": [k // 3 for k in range(N)]}),
    (False, {"noise_multiplier": 1.0, "mechanism": "geodp"}),
    (False, {"poisson_sampling": False}),
    (False, {"noise_multiplier": 1.0, "denoiser": lambda gradient, variances: dict(reversed(list(gradient.items())))}),
]


def scripts(workers: Workers) -> list[tuple[torch.Tensor, float, int]]:
    return [script(workers, wrap and not workers.alone, options) for wrap, options in CASES]


def test_a_distributed_script_does_what_one_process_does():
    alone = scripts(Workers())
    several_ranks = together(2, scripts)
    for ranks in several_ranks:
        for (wrap, options), one, several in zip(CASES, alone, ranks, strict=True):
            assert float((one[0] - several[0]).abs().max()) <= 1e-6 * max(1.0, float(one[0].abs().max())), (wrap, options)
            assert one[1] == several[1], "every process knows what was spent"
    counts = [[case[2] for case in rank] for rank in several_ranks]
    assert counts[0] == counts[1], "loops with collectives of their own stay in step"


def restored(workers: Workers, static: bool) -> tuple[bool, torch.Tensor]:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(nn.Linear(3, 1), static_graph=static)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1)
    engine = erlangen.PrivacyEngine(seed=0)
    loader = DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=2)
    model, _, private = engine.make_private(
        module=wrapped, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    quiet = model is wrapped and not wrapped.require_backward_grad_sync
    for (x,) in private:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    engine.remove()
    wrapped(torch.full((1, 3), float(workers.rank))).sum().backward()
    return quiet and wrapped.require_backward_grad_sync and wrapped.static_graph == static, wrapped.module.weight.grad


@pytest.mark.parametrize("static", [False, True])
def test_ddp_is_silent_while_training_is_private_and_itself_again_after(static):
    both = together(2, restored, static)
    assert all(ok for ok, _ in both)
    assert torch.equal(both[0][1], both[1][1]), "its own all-reduce works again"
    assert torch.equal(both[0][1], torch.full((1, 3), 0.5))


def separately(workers: Workers) -> float:
    torch.manual_seed(workers.rank)
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    engine = erlangen.PrivacyEngine(seed=0, distributed=False)
    loader = DataLoader(TensorDataset(torch.zeros(8, 3)), batch_size=2)
    engine.make_private(
        module=model, optimizer=sgd(model), data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    assert engine.training is not None
    assert torch.equal(model.weight, before)
    return engine.training.sampler.expected_batch


def test_processes_may_train_models_of_their_own():
    assert together(2, separately) == [2.0, 2.0]


DIFFERENT = {
    "seed": lambda rank: ({"seed": rank}, {}),
    "run_id": lambda rank: ({"seed": 0, "run_id": f"rank-{rank}"}, {}),
    "mechanism": lambda rank: ({"seed": 0}, {"max_grad_norm": 1.0 + 9 * rank}),
    "unit": lambda rank: ({"seed": 0}, {"unit": [(k + rank) // 2 for k in range(8)]}),
    "data": lambda rank: ({"seed": 0}, {"poisson_sampling": rank == 0}),
    "split": lambda rank: ({"seed": 0}, {}),
    "order": lambda rank: ({"seed": 0}, {}),
    "files": lambda rank: ({"seed": 0}, {}),
    "two of many": lambda rank: ({"seed": 0}, {}),
}  # fmt: skip


class Files(Dataset):
    """Lists its records in an order of its own, as data sets do that shuffle their files."""

    def __init__(self, places: list[int]) -> None:
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, dict]:
        return torch.full((3,), float(self.places[place])) + 0.01 * torch.rand(3), {"name": str(self.places[place])}


def started(workers: Workers) -> dict[str, str]:
    said = {}
    for name, make in DIFFERENT.items():
        engine_options, options = make(workers.rank)
        model = nn.Linear(3, 1)
        records: Dataset = TensorDataset(torch.arange(24.0).view(8, 3))
        if name in ("split", "order"):
            places = torch.randperm(8, generator=torch.Generator().manual_seed(workers.rank))
            records = Subset(records, places.tolist()) if name == "split" else TensorDataset(records[:][0][places])
        if name == "files":
            records = Files(torch.randperm(8, generator=torch.Generator().manual_seed(workers.rank)).tolist())
        if name == "two of many":  # none of the records that are read
            records = Files([*range(51), *((52, 51) if workers.rank else (51, 52)), *range(53, 160)])
        loader = DataLoader(records, batch_size=2)
        options = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
        try:
            erlangen.PrivacyEngine(**engine_options).make_private(
                module=model, optimizer=sgd(model), data_loader=loader, **options
            )
        except ValueError as error:
            said[name] = str(error)
    return said


def test_processes_that_draw_clip_or_group_differently_are_refused():
    """Seeds that differ by rank, as scripts like to set them, would put one record into the batches of two workers; a
    bound that differs lets one worker add more than the noise of the first one covers. So would data that every process
    has split or shuffled for itself: a record with two indices adds two bounds."""
    for said in together(2, started):
        assert set(said) == set(DIFFERENT)
        assert all("not started alike" in text for text in said.values())


def listed_alike(workers: Workers) -> int:
    """Random transforms, and transforms from generators of their own, are no other order."""
    own = torch.Generator().manual_seed(workers.rank)
    drawn = type("Drawn", (Files,), {"__getitem__": lambda self, k: (torch.rand(3, generator=own), {})})
    for records in (Files(list(range(8))), drawn(list(range(8)))):
        model, loader = nn.Linear(3, 1), DataLoader(records, batch_size=2)
        erlangen.PrivacyEngine().make_private(
            module=model, optimizer=sgd(model), data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
    return workers.rank


@pytest.mark.filterwarnings("ignore")
def test_records_that_are_augmented_at_random_are_not_taken_for_others():
    assert together(2, listed_alike) == [0, 1]


def moved(workers: Workers) -> list[str]:
    """A schedule that one process alone follows, between two steps."""
    said = []
    for what in ("bound", "batch", "peek"):
        engine, model = erlangen.PrivacyEngine(seed=0), nn.Linear(3, 2)
        optimizer = sgd(model)
        loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), batch_size=2)
        _, _, private = engine.make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
        )
        if workers.rank == 1 and what == "bound":
            engine.training.mechanism.clipping.bound = 10.0
        elif workers.rank == 1 and what == "batch":
            engine.training.sampler.expected_batch = 1.0
        elif workers.first and what == "peek":
            next(iter(private))
        try:
            for x, y in private:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        except (ValueError, LostWorker) as error:
            said.append(str(error))
        assert engine.accountant.steps == 0, "nothing was released"
    return said


def test_processes_that_come_to_clip_or_draw_differently_are_stopped_before_the_noise():
    """The noise is made for the first worker's bound: records clipped at ten times of it elsewhere would show. And whoever has
    looked at a batch alone is a draw ahead: a record in both parts of two draws would count twice."""
    for bound, batch, draw in together(2, moved):
        assert "clipping bound" in bound
        assert "expected batch" in batch
        assert "the draw that a batch is a part of is 1 on the first worker" in draw


def set_back(workers: Workers, folder: str, secure: bool) -> list[float]:
    """The first process looks at a batch before all of them load a checkpoint: the most that a record adds to each sum."""
    model = nn.Linear(40, 1, bias=False)
    optimizer, engine = torch.optim.SGD(model.parameters(), 1.0), erlangen.PrivacyEngine(secure=secure)
    loader = DataLoader(TensorDataset(torch.eye(40)), batch_size=10)  # each record has a coordinate of its own
    _, _, private = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=1.0, loss_reduction="sum"
    )
    engine.save_checkpoint(path=f"{folder}/0")
    torch.distributed.barrier()
    if workers.first:
        next(iter(private))
    engine.load_checkpoint(path=f"{folder}/0")
    most = []
    for (x,) in private:
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        most.append(float((20 * (before - model.weight.detach())).max()))
    return most


@pytest.mark.parametrize("secure", [False, True])
def test_a_checkpoint_does_not_hide_that_one_process_has_drawn_ahead(tmp_path, secure):
    """It sets the number of the draw to the same place everywhere, but not what is drawn there: a record in both parts would count
    twice behind the noise of one bound."""
    for said in together(2, set_back, str(tmp_path), secure, failing=True):
        assert isinstance(said, (ValueError, LostWorker)), said
        assert "the mark of who is in a draw" in str(said)


def test_data_parallel_is_refused():
    with pytest.raises(ValueError, match="torchrun"):
        joint.unwrapped(DataParallel(nn.Linear(2, 2)))


def test_a_group_of_one_is_free():
    workers = Workers()
    t = [torch.ones(2), torch.zeros(1, dtype=torch.float64)]
    assert all(a is b for a, b in zip(workers.add_up(t), t, strict=True))
    assert workers.decide(lambda: object) is object
    assert not workers.any(False)
    assert workers.tell(b"x") == b"x"
    with pytest.raises(ValueError, match="rank"):
        Workers(2, 2)


def failing(workers: Workers) -> str:
    try:
        workers.decide(lambda: 1 / 0)
    except ZeroDivisionError:
        return "mine"
    except RuntimeError as error:
        return str(error)
    return "?"


def exchanged(workers: Workers) -> tuple[list, list, bytes, bool]:
    tensors = [torch.full((2, 3), float(workers.rank + 1)), torch.tensor(workers.rank, dtype=torch.float64), torch.ones(0)]
    total = [t.tolist() for t in workers.add_up(tensors)]
    sent = [t.tolist() for t in workers.send(tensors)]
    return total, sent, workers.tell(b"hello" if workers.first else b""), workers.any(workers.rank == 2)


def test_what_workers_say_to_each_other():
    first, *others = together(3, exchanged)
    assert first[0] == [[[6.0] * 3] * 2, 3.0, []]
    assert all(other[0] == [[[0.0] * 3] * 2, 0.0, []] for other in others), "a sum is held once"
    assert all(each[1:] == ([[[1.0] * 3] * 2, 0.0, []], b"hello", True) for each in (first, *others))
    assert together(2, failing) == ["mine", "the first worker stopped: ZeroDivisionError: division by zero"]
