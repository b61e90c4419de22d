"""Noise sources: distribution, independence, and the grid that hides low bits."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from erlangen.mechanisms import GaussianMechanism
from erlangen.mechanisms.noise import GRID, SecureNoise, StreamNoise, secure_normal
from erlangen.sampling import PoissonSampler
from erlangen.streams import Stream, fill_normal, secure_uniform, seed_layers
from tests.alone import alone


@pytest.mark.parametrize("source", [StreamNoise(seed=1), StreamNoise(), SecureNoise()])
def test_noise_is_standard_normal_after_scaling(source):
    source.next_release()
    z = source.perturb(torch.zeros(20000, dtype=torch.float64), 2.5) / 2.5
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-4


def test_a_broken_uniform_would_be_seen():
    z = torch.rand(20000, dtype=torch.float64) * math.sqrt(12) - math.sqrt(3)
    assert stats.kstest(z.numpy(), "norm").pvalue < 1e-4


def test_streams_never_meet():
    names = [
        (seed, run, purpose, rank) for seed in (0, 1) for run in ("a", "b") for purpose in ("x", "y") for rank in (0, 1)
    ]
    draws = {
        torch.randn(4, generator=Stream(p, s, r, k).at(step)).numpy().tobytes()
        for s, r, p, k in names
        for step in (0, 1)
    }
    assert len(draws) == 2 * len(names)
    a, b = Stream("noise"), Stream("noise")
    assert not torch.equal(torch.randn(4, generator=a.at(0)), torch.randn(4, generator=b.at(0)))
    assert "entropy" not in repr(a)


def test_steps_whose_32_bit_seeds_collide_draw_different_noise():
    """The CPU generator reads 32 bits of a seed; streams fill its whole state instead."""
    stream = Stream("noise", seed=0)
    assert not torch.equal(torch.randn(50, generator=stream.at(4317)), torch.randn(50, generator=stream.at(85074)))
    generator = stream.at(7)
    low = torch.Generator().manual_seed(generator.initial_seed() & 0xFFFFFFFF)
    assert not torch.equal(torch.randn(9, generator=generator), torch.randn(9, generator=low))
    assert torch.equal(torch.randn(9, generator=stream.at(7)), torch.randn(9, generator=stream.at(7)))
    z = torch.cat([torch.randn(50, generator=stream.at(k)) for k in range(400)])
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-4


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = [(3, 5), (40,), (), (2, 3, 4, 4), (0, 7), (17,)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_tensors_get_the_noise_of_one_after_the_other(dtype, device):
    values = [torch.randn(shape, dtype=dtype, device=device) for shape in SHAPES]
    together, apart = StreamNoise(seed=3), StreamNoise(seed=3)
    together.next_release()
    apart.next_release()
    for a, b in zip(together.perturb_all(values, 0.7), [apart.perturb(v, 0.7) for v in values], strict=True):
        assert torch.equal(a, b)


def test_many_tensors_get_independent_noise_of_one_variance():
    source = StreamNoise()
    draws = []
    for _ in range(4000):
        source.next_release()
        draws.append(torch.cat([t.flatten() for t in source.perturb_all([torch.zeros(2, 2), torch.zeros(3)], 1.5)]))
    covariance = torch.cov(torch.stack(draws).double().T)
    deviations = 2.25 / math.sqrt(4000) * torch.where(torch.eye(7, dtype=torch.bool), math.sqrt(2), 1.0)  # of each entry
    assert float(((covariance - 2.25 * torch.eye(7)).abs() / deviations).max()) < 6


def test_noise_lies_in_memory_as_its_tensors_do():
    values = [torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.randn(6, 2).T, torch.zeros(3)]
    source = StreamNoise(seed=0)
    source.next_release()
    noisy = source.perturb_all(values, 1e-9)
    assert [t.stride() for t in noisy] == [v.stride() for v in values]
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(noisy, values, strict=True))
    spread = torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last)
    assert len(source.perturb_all([spread, spread], 1.0)[1].unique()) == spread.numel(), "an entry was noised twice, or not"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_which_coordinate_gets_which_noise_is_no_matter_of_memory(device):
    plain = [torch.randn(4, 3, 5, 5, device=device), torch.randn(2, 6, device=device)]
    turned = [plain[0].to(memory_format=torch.channels_last), plain[1].T.contiguous().T]
    assert not any(t.is_contiguous() for t in turned)
    for way in (lambda s, values: s.perturb_all(values, 2.0), lambda s, values: [s.perturb(v, 2.0) for v in values]):
        noisy = []
        for values in (plain, turned):
            source = StreamNoise(seed=1)
            source.next_release()
            noisy.append(way(source, values))
        assert all(torch.equal(a, b) for a, b in zip(*noisy, strict=True))


@GPU
def test_on_a_gpu_many_tensors_get_fresh_normal_noise_in_one_draw():
    values = [torch.full((300, 40), 5.0), torch.ones(64, 3, 3, 3).to(memory_format=torch.channels_last), torch.zeros(7)]
    values = [v.cuda() for v in values]
    source, draws = StreamNoise(seed=2), []
    for _ in range(2):
        source.next_release()
        noisy = source.perturb_all(values, 3.0)
        assert [t.stride() for t in noisy] == [v.stride() for v in values]
        draws.append(torch.cat([(t - v).flatten() / 3.0 for t, v in zip(noisy, values, strict=True)]).cpu())
    assert len(torch.cat(draws).unique()) > 1.99 * len(draws[0])
    for z in draws:
        assert stats.kstest(z.double().numpy(), "norm").pvalue > 1e-4


def test_tensors_of_several_kinds_and_noise_of_ones_own_go_one_by_one():
    class Louder(StreamNoise):
        def perturb(self, value, std):
            return super().perturb(value, 100 * std)

    def wrapped(seed):
        source = StreamNoise(seed)
        honest = source.perturb
        source.perturb = lambda value, std: honest(value, 100 * std)
        return source

    mixed = [torch.zeros(500), torch.zeros(500, dtype=torch.float64)]
    for kind, values, least in ((StreamNoise, mixed, 0.8), (Louder, mixed[:1] * 2, 80.0), (wrapped, mixed[:1] * 2, 80.0)):
        source = kind(seed=1)
        source.next_release()
        for noisy, value in zip(source.perturb_all(values, 1.0), values, strict=True):
            assert noisy.dtype == value.dtype
            assert float(noisy.std()) > least
    with pytest.raises(RuntimeError, match="open a release first"):
        StreamNoise(seed=1).perturb_all(mixed[:1], 1.0)


def drawn_after_fork(source: StreamNoise, answers) -> None:
    source.next_release()
    answers.put(source.perturb(torch.zeros(4), 1.0).tolist())


def draws_around_forks() -> list[list[list[float]]]:
    """What a parent and its two children draw: from an unseeded source, one that is shared on purpose, and a seeded one."""
    context, found = multiprocessing.get_context("fork"), []
    for source, shared in ((StreamNoise(), False), (StreamNoise(), True), (StreamNoise(seed=3), False)):
        if shared:
            source._stream = source._stream.sharing("known to all")
        answers = context.SimpleQueue()
        children = [context.Process(target=drawn_after_fork, args=(source, answers)) for _ in range(2)]
        for child in children:
            child.start()
        drawn_after_fork(source, answers)
        found.append([answers.get() for _ in range(3)])
        for child in children:
            child.join()
    return found


def test_forked_processes_draw_noise_of_their_own():
    """A mechanism that was made before a fork has the same entropy in both; models trained with the same noise say their
    difference without any. Who shares a stream on purpose still does, and so does who has the seed."""
    counts = [len({tuple(draw) for draw in draws}) for draws in alone(draws_around_forks)]
    assert counts == [3, 1, 1]


def test_copies_of_a_mechanism_draw_noise_of_their_own():
    """One mechanism, copied for each of several models: they may not hide behind the same noise."""
    nobody = {"w": torch.zeros(0, 5)}
    made, seeded = GaussianMechanism(1.0), GaussianMechanism(1.0, noise=StreamNoise(seed=3))
    for mechanism, same in ((made, False), (seeded, True)):
        copies = [copy.deepcopy(mechanism) for _ in range(2)]
        draws = {tuple(m.release(nobody)["w"].tolist()) for m in (mechanism, *copies)}
        assert len(draws) == (1 if same else 3)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda made: pickle.loads(pickle.dumps(made)), "copy": copy.copy}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("begun", [False, True])
def test_no_way_of_copying_noise_draws_it_again(name, begun):
    """Entropy in a pickle, read by the first process of two containers, gave both the same noise; and so did a copy that was
    taken in the middle of a release."""
    for seed, different in ((None, 3), (3, 1)):
        source = StreamNoise(seed)
        if begun:
            source.next_release()
            source.perturb(torch.zeros(2), 1.0)
        sources = [COPIES[name](source), COPIES[name](source), source]
        for one in sources if not begun else ():
            one.next_release()
        assert len({tuple(one.perturb(torch.zeros(5), 1.0).tolist()) for one in sources}) == different


def test_pickled_samplers_draw_batches_of_their_own_unless_workers_share_them():
    for sampler, different in ((PoissonSampler(200, 100), 3), (PoissonSampler(200, 100, seed=1), 1)):
        copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(2)]
        assert len({tuple(one.draw().tolist()) for one in (sampler, *copies)}) == different
    shared = Stream("sampling").sharing("00" * 32)
    assert pickle.loads(pickle.dumps(shared)) == shared


def test_noise_needs_an_open_release():
    with pytest.raises(RuntimeError, match="next_release"):
        StreamNoise(seed=0).perturb(torch.zeros(2), 1.0)


def test_secure_results_lie_on_one_grid_whatever_the_value_was():
    """The attack on floating-point noise looks at low bits; on a common grid they say nothing about the value."""
    source, step = SecureNoise(), 2.0 ** math.floor(math.log2(0.7 * GRID))
    for value in (0.0, 1 / 3, math.pi, 1e-12):
        out = source.perturb(torch.full((1000,), value, dtype=torch.float64), 0.7)
        assert torch.equal(out / step, torch.round(out / step))
    plain = StreamNoise(seed=0)
    plain.next_release()
    off = plain.perturb(torch.full((1000,), 1 / 3, dtype=torch.float64), 0.7)
    assert not torch.equal(off / step, torch.round(off / step))


def untempered(word: int) -> int:
    """The state of a Mersenne twister that says ``word`` next."""
    word ^= word >> 18
    word ^= (word << 15) & 0xEFC60000
    start = word
    for _ in range(5):
        word = start ^ ((word << 7) & 0x9D2C5680)
    start = word = word & 0xFFFFFFFF
    for _ in range(3):
        word = start ^ (word >> 11)
    return word & 0xFFFFFFFF


def saying(word: int) -> torch.Generator:
    """A CPU generator whose next 624 words are this one."""
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    state[8:12] = torch.tensor([624], dtype=torch.int32).view(torch.uint8)  # words left before it turns
    state[24 : 24 + 8 * 624] = torch.full((624,), untempered(word), dtype=torch.int64).view(torch.uint8)
    return generator.set_state(state)


def test_noise_reaches_as_far_as_the_neighbour_does():
    """PyTorch's own float32 normals end at 5.77: a record that adds C = σ/0.6 to one coordinate went beyond in 2·10⁻⁵ of all
    releases on it, where nothing but this record can be. Over REP's 18,760 steps at σ = 0.6 that is δ = 4·10⁻⁴, not 10⁻⁵."""
    largest = 0xFFFFFFFF
    plain = torch.empty(16).normal_(generator=saying(largest)).max()
    assert float(plain) == pytest.approx(math.sqrt(2 * 24 * math.log(2)), abs=1e-4)
    assert float(fill_normal(torch.empty(16), saying(largest)).max()) == pytest.approx(math.sqrt(2) * float(plain))
    beyond = 1 - (1 - stats.norm.sf([float(plain), math.sqrt(2) * float(plain)] - np.array(1 / 0.6)) / 938) ** 18760
    assert beyond[0] > 4e-4
    assert beyond[1] < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_release_draws_such_noise(dtype):
    source = StreamNoise(seed=1)
    source.next_release()
    want = fill_normal(torch.empty(40, dtype=dtype), Stream("noise", 1).at(0))
    assert torch.equal(source.perturb(torch.zeros(40, dtype=dtype), 1.0), want)
    source.next_release()
    want = fill_normal(torch.empty(40, dtype=dtype), Stream("noise", 1).at(1))
    assert torch.equal(source.perturb_all([torch.zeros(40, dtype=dtype)], 1.0)[0], want)
    z = fill_normal(torch.empty(200_000, dtype=dtype), torch.Generator().manual_seed(0)).double()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-4
    assert float(torch.corrcoef(torch.stack([z[:-1], z[1:]]))[0, 1].abs()) < 0.01


def test_secure_numbers():
    u = secure_uniform(10000)
    assert ((u > 0) & (u < 1)).all()
    assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
    assert secure_normal(torch.Size([3, 5])).shape == (3, 5)
    assert SecureNoise().perturb(torch.zeros(0), 1.0).shape == (0,)
    assert not SecureNoise().state_dict(), "no seed is ever stored"


def test_per_coordinate_std():
    std = torch.tensor([0.0, 1.0, 100.0])
    for source in (SecureNoise(), StreamNoise(seed=0)):
        source.next_release()
        z = torch.stack([source.perturb(torch.zeros(3), std) for _ in range(500)])
        assert torch.equal(z[:, 0], torch.zeros(500))
        assert float(z[:, 2].std()) == pytest.approx(100, rel=0.2)


@pytest.mark.parametrize("word", [0, -1])
def test_secure_uniforms_are_never_zero_or_one(monkeypatch, word):
    """At the ends of the range of words; a uniform of 1 would be a normal of infinite size elsewhere."""
    from erlangen import streams

    monkeypatch.setattr(streams, "secure_words", lambda count: torch.full((count,), word, dtype=torch.int64))
    u = streams.secure_uniform(3)
    assert bool(((u > 0) & (u < 1)).all())


def test_layers_draw_what_pytorchs_own_seed_gives_them():
    """`torch.manual_seed` also keeps a seed for devices that nothing uses, and where it was called from."""
    torch.manual_seed(3)
    own = torch.rand(5)
    torch.rand(2)
    seed_layers(3)
    assert torch.equal(torch.rand(5), own)
    if torch.cuda.is_available():
        torch.manual_seed(3)
        own = torch.rand(5, device="cuda")
        seed_layers(3)
        assert torch.equal(torch.rand(5, device="cuda"), own)
