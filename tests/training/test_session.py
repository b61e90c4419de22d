"""The training session: learns, stops where it should, repeats exactly, continues exactly."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from erlangen.data import load
from erlangen.data.augment import draw, views
from erlangen.models import _MODELS
from erlangen.training import TrainConfig, checkpoint
from erlangen.training.adam_bc import AdamBC
from erlangen.training.config import ConfigError
from erlangen.training.ema import EMA
from erlangen.training.metrics import calibration_error
from erlangen.training.run import train
from erlangen.training.session import Session
from erlangen.training.summary import in_plain_words
from tests.alone import alone

SMALL = TrainConfig(model="mlp", steps=6, batch=64, seed=0, evaluations=2)


def flat(session: Session) -> torch.Tensor:
    return torch.cat([t.flatten() for t in session.weights().values()])


def test_digits_are_learnt_privately():
    result = train(TrainConfig(seed=0))
    assert result.summary["test"]["test_accuracy"] > 0.9
    spent = result.summary["guarantee"]["epsilon"]
    assert 2.98 < spent["pld"] <= 3.0 < spent["rdp"]
    assert "ε = 3" in in_plain_words(result.summary)


def test_a_run_leaves_a_folder(tmp_path):
    out = tmp_path / "run"
    result = train(SMALL, out)
    assert TrainConfig.from_file(out / "config.json") == result.session.config
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 6]
    assert lines[0]["epsilon"] < lines[1]["epsilon"]
    assert json.loads((out / "summary.json").read_text()) == result.summary
    assert result.summary["non_private"] == []
    assert "loss" not in lines[0], "training loss is a statistic of private records"
    with pytest.raises(ConfigError, match="holds a run already"):
        train(SMALL, out)
    train(SMALL, out, overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="refusing to overwrite"):
        train(SMALL, tmp_path / "other", overwrite=True)


@pytest.mark.parametrize(
    "wrong",
    [{"mechanism": "rap"}, {"model": "mpl"}, {"clipping": "flatt"}, {"batch": 10**6}, {"model_options": {"widht": 3}}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_options_that_cannot_be_cost_neither_the_old_run_nor_a_folder(tmp_path, wrong):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "ledger.jsonl").write_text("what was spent")
    for place in ("old", "new"):
        with pytest.raises((ConfigError, ValueError, TypeError)):
            train(dataclasses.replace(SMALL, **wrong), tmp_path / place, overwrite=True)
    assert (tmp_path / "old" / "ledger.jsonl").read_text() == "what was spent"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("wrong", [{"mechanism": "rap"}, {"model": "mpl"}, {"clipping": "flatt"}], ids=str)
def test_unknown_names_and_taken_folders_are_refused_before_the_records_are_read(tmp_path, wrong):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "ledger.jsonl").write_text("x")
    away = dataclasses.replace(SMALL, data=str(tmp_path / "nothing here"))
    ((option, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{option} is '{value}'; choose one of"):
        train(dataclasses.replace(away, **wrong))
    with pytest.raises(ConfigError, match="holds a run already"):
        train(away, tmp_path / "taken")
    with pytest.raises(ConfigError, match=r"ledger\.jsonl is a file; give a folder"):
        train(away, tmp_path / "taken" / "ledger.jsonl" / "run")


def without_permission() -> str:
    away = dataclasses.replace(SMALL, data="nothing here")
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o555)
        if os.getuid() == 0:  # who may write everywhere
            os.setresuid(65534, 65534, 0)
        try:
            train(away, Path(place) / "run")
        except ConfigError as error:
            return str(error)
        finally:
            os.setresuid(*3 * [os.getresuid()[2]])
            os.chmod(place, 0o755)
    return ""


def test_a_place_that_cannot_be_written_is_refused_before_the_records_are_read():
    assert "nothing may be written in" in alone(without_permission)


def test_equal_seeds_equal_weights_and_other_runs_other_noise():
    make = lambda run_id="", **k: Session(dataclasses.replace(SMALL, **k), run_id=run_id)  # noqa: E731
    a, b, c, d = make(), make(), make(seed=1), make(run_id="other")
    for session in (a, b, c, d):
        for _ in range(3):
            session.step()
    assert torch.equal(flat(a), flat(b))
    assert not torch.equal(flat(a), flat(c))
    assert not torch.equal(flat(a), flat(d))


@pytest.mark.parametrize("clipping", ["flat", "adaptive"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam-bc"])
def test_a_resumed_run_continues_exactly(tmp_path, optimizer, clipping):
    config = dataclasses.replace(
        SMALL, optimizer=optimizer, schedule="cosine", views=2, augment="shift", clipping=clipping
    )
    whole = Session(config)
    for _ in range(6):
        whole.step()
    half = Session(config)
    for _ in range(3):
        half.step()
    checkpoint.save(tmp_path / "c.safetensors", half.state_dict())
    other = Session(dataclasses.replace(config, max_physical_batch=16))
    other.load_state_dict(checkpoint.load(tmp_path / "c.safetensors"))
    for _ in range(3):
        other.step()
    torch.testing.assert_close(flat(whole), flat(other), rtol=1e-4, atol=1e-6)


def test_physical_batches_and_units(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (60, 6, 6), dtype=np.uint8)
    file = tmp_path / "scans.npz"
    np.savez(
        file,
        x_train=x,
        y_train=rng.integers(0, 3, 60),
        x_test=x[:9],
        y_test=rng.integers(0, 3, 9),
        patient=np.arange(60) // 3,
    )
    config = TrainConfig(data=str(file), unit="patient", model="cnn", steps=3, batch=5, seed=0)
    one, other = Session(config), Session(dataclasses.replace(config, max_physical_batch=4))
    assert one.sampler.units == 20
    for session in (one, other):
        for _ in range(3):
            session.step()
    torch.testing.assert_close(flat(one), flat(other), rtol=1e-4, atol=1e-6)


def test_sigma_zero_is_allowed_and_says_so():
    result = train(dataclasses.replace(SMALL, epsilon=None, noise_multiplier=0.0))
    assert result.summary["guarantee"]["epsilon"]["pld"] == "inf"
    assert "No privacy guarantee" in in_plain_words(result.summary)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"epsilon": -1.0}, "epsilon is -1.0"), ({"delta": 1.0}, "delta is 1.0"), ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"noise_multiplier": 1.0}, "exclude each other"), ({"epsilon": None}, "give epsilon"), ({"views": 0}, "views is 0"),
        ({"secure": True}, "exclude each other"), ({"optimizer": "lion"}, "choose one of adam"), ({"model": "vgg"}, "choose one"),
        ({"batch": 5000}, "only 1438 units"), ({"device": "cuda:9"}, "no GPU"), ({"augment": "mixup"}, "augment"),
        ({"augment": "flip-crop-mix"}, "views is 1; flip-crop-mix mixes them: give two or more"),
    ],
)  # fmt: skip
def test_bad_configurations(change, match):
    if change.get("device") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=match):
        Session(dataclasses.replace(SMALL, **change))


def test_every_option_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    table = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name.strip(" `") for cell in table for name in cell.split(",")}
    assert named == {f.name for f in dataclasses.fields(TrainConfig)}


def test_unknown_options_and_broken_files(tmp_path):
    with pytest.raises(ConfigError, match="unknown option"):
        TrainConfig.from_dict({"batchsize": 3})
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        TrainConfig.from_file(tmp_path / "c.json")


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"x": np.zeros((3, 4, 4))}, "no array 'x_train'"),
        ({"x_train": np.zeros((3, 4, 4)), "y_train": np.zeros(2, int)}, "2,\\) for 3 images"),
        ({"x_train": np.zeros((3, 4, 4)), "y_train": np.zeros(3, int)}, "one class only"),
        ({"x_train": np.zeros((2, 4, 4)), "y_train": np.array([0, -1])}, "integers ≥ 0"),
        ({"x_train": np.full((2, 4, 4), np.nan), "y_train": np.array([0, 1])}, r"record\(s\) 0, 1: pixels are not finite"),
        ({"x_train": np.zeros((2, 4)), "y_train": np.array([0, 1])}, "expected N×H×W"),
        ({"x_train": np.zeros((2, 4, 4)), "y_train": np.array([0, 1]), "x_test": np.zeros((2, 4, 4))}, "only one of"),
    ],
)
def test_bad_data_files(tmp_path, arrays, match):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(ValueError, match=match):
        load(tmp_path / "d.npz")


def test_missing_and_hostile_data_files(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no file at"):
        load(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="give a name"):
        load("nothing")
    np.savez(tmp_path / "p.npz", x_train=np.array([object()]), y_train=np.array([0]))
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path / "p.npz")
    monkeypatch.delenv("ERLANGEN_DATA", raising=False)
    monkeypatch.setenv("ERLANGEN_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="set ERLANGEN_DATA"):
        load("mnist")


def test_fingerprints_tell_data_apart():
    a = load("digits")
    assert a.fingerprint() == load("digits").fingerprint()
    assert a.fingerprint() != dataclasses.replace(a, y_train=a.y_train[::-1].copy()).fingerprint()


def test_views_keep_the_record_and_come_from_the_generator():
    x = torch.randn(3, 2, 8, 8)
    moves = draw(3, 4, "flip-crop", torch.Generator().manual_seed(0))
    out = views(x, 4, "flip-crop", moves)
    assert out.shape == (12, 2, 8, 8)
    assert torch.equal(out[::4], x)
    assert torch.equal(
        out, torch.cat([views(x[:1], 4, "flip-crop", moves[:4]), views(x[1:], 4, "flip-crop", moves[4:])])
    )
    assert not torch.equal(out[1], out[2])
    assert torch.equal(views(x, 2, "none", draw(3, 2, "none", torch.Generator())), x.repeat_interleave(2, 0))
    flipped = views(x[:1], 1, "flip-crop", torch.tensor([[4, 4, 1, 256]]))
    assert torch.equal(flipped, x[:1].flip(3))
    shifted = views(x[:1], 1, "flip-crop", torch.tensor([[5, 4, 0, 256]]))
    assert torch.equal(shifted[:, :, :-1], x[:1, :, 1:])


def test_views_are_mixed_with_views_of_the_same_record():
    x = torch.rand(3, 2, 8, 8)
    x[1] = float("nan")
    moves = draw(3, 4, "flip-crop-mix", torch.Generator().manual_seed(0))
    out = views(x, 4, "flip-crop-mix", moves)
    assert torch.equal(out[::4][[0, 2]], x[[0, 2]])
    assert out.isnan().flatten(1).any(1).tolist() == [False] * 4 + [True] * 4 + [False] * 4
    for k in range(3):
        alone = views(x[k : k + 1], 4, "flip-crop-mix", moves[4 * k : 4 * k + 4])
        assert torch.equal(alone.nan_to_num(9.0), out[4 * k : 4 * k + 4].nan_to_num(9.0))
    halves = torch.tensor([[4, 4, 0, 256], [2, 7, 1, 127], [6, 1, 0, 128], [3, 3, 1, 256]])
    plain, mixed = views(x[:1], 4, "flip-crop", halves), views(x[:1], 4, "flip-crop-mix", halves)
    torch.testing.assert_close(mixed[1:3], 0.5 * (plain[1:3] + plain[2:4]), atol=0.02, rtol=0)
    assert torch.equal(mixed[[0, 3]], plain[[0, 3]])


def test_shares_of_mixed_views_are_even_and_mostly_one_sided():
    x = torch.zeros(1, 1, 8, 8)
    x[..., :4] = 1.0
    moves = torch.tensor([[4, 4, 0, k, 4, 4, 1, 256] for k in range(256)]).view(-1, 4)  # the record mixed with its mirror image
    share = views(x.expand(256, -1, -1, -1), 2, "flip-crop-mix", moves)[::2, 0, 0, 0]
    assert float(share.mean()) == pytest.approx(0.5, abs=1e-6)
    assert float(share.var()) > 0.18, "mostly one of the two; 1/12 would be uniform"


def test_checkpoints_hold_no_seed_and_refuse_strangers(tmp_path):
    state = {"a": torch.arange(3), "deep": [{"b": torch.ones(2)}, 1.5, None, "x"], "n": {1: 2}}
    checkpoint.save(tmp_path / "c", state)
    back = checkpoint.load(tmp_path / "c")
    assert torch.equal(back["a"], state["a"])
    assert torch.equal(back["deep"][0]["b"], torch.ones(2))
    assert back["deep"][1:] == [1.5, None, "x"]
    assert back["n"] == {1: 2}
    for content in (b"", b"\x80\x04evil", (tmp_path / "c").read_bytes()[:-3]):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(checkpoint.CheckpointError):
            checkpoint.load(tmp_path / "bad")
    with pytest.raises(TypeError, match="plain values only"):
        checkpoint.save(tmp_path / "d", {"f": print})
    assert "seed" not in json.dumps(Session(SMALL).state_dict(), default=str)


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Flipped bytes, cuts, insertions and repeated parts, the header preferred."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(min(len(data), 600) if rng.random() < 0.8 else len(data)) if data else 0
        kind = rng.randrange(4)
        if kind == 0 and data:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randrange(1, 40)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randrange(1, 20))
        else:
            data[at:at] = data[at : at + rng.randrange(1, 60)]
    return bytes(data)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_checkpoints_end_in_a_clear_error_or_a_plain_state(tmp_path, count):
    """Nothing but `CheckpointError`; what still loads is tensors and plain values, whatever the bytes were."""
    rng = random.Random(0)
    session = Session(SMALL)
    session.step()
    checkpoint.save(tmp_path / "c", session.state_dict())
    content, loaded = (tmp_path / "c").read_bytes(), 0

    for _ in range(count):
        (tmp_path / "bad").write_bytes(mutated(content, rng))
        try:
            state = checkpoint.load(tmp_path / "bad")
        except checkpoint.CheckpointError:
            continue
        loaded += 1
        assert all(v is None or isinstance(v, (torch.Tensor, str, int, float)) for v in _flat(state).values())
    assert loaded < count


def _flat(value, path="") -> dict:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{path}/{key}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{path}/{i}").items()}
    return {path: value}


def test_denoising_is_an_option():
    session = Session(dataclasses.replace(SMALL, denoise="james-stein"))
    session.step()
    assert torch.isfinite(flat(session)).all()


def test_ema_forgets_the_start():
    model = nn.Linear(1, 1, bias=False)
    ema = EMA(model, 0.9)
    with torch.no_grad():
        for value in range(1, 60):
            model.weight.fill_(float(value))
            ema.update()
    assert 40 < float(ema.average["weight"]) < 59
    with ema.applied():
        assert torch.equal(model.weight.detach(), ema.average["weight"])
    assert float(model.weight.detach()) == 59.0


@pytest.mark.parametrize("h", [1.0, 3.0, 9.0])
def test_ema_is_of_the_last_part(h):
    model = nn.Linear(1, 1, bias=False)
    ema = EMA(model, 1 - 1e-9, h)
    with torch.no_grad():
        for value in range(1, 1000):
            model.weight.fill_(float(value))
            ema.update()
    assert float(ema.average["weight"]) == pytest.approx(1000 * h / (h + 1), rel=0.01)
    with pytest.raises(ValueError, match="h is 0"):
        EMA(model, h=0)


def test_adam_bc_subtracts_the_noise():
    p = nn.Parameter(torch.zeros(20000))
    optimizer = AdamBC([p], lr=1.0, betas=(0.0, 0.99))
    optimizer.set_noise_variance({p: 4.0})
    torch.manual_seed(0)
    for _ in range(600):
        p.grad = 3.0 + 2.0 * torch.randn_like(p)
        optimizer.step()
    square = optimizer.state[p]["square"].mean()
    assert float(square) == pytest.approx(9 + 4, rel=0.05)
    before = p.detach().clone()
    p.grad = torch.full_like(p, 3.0)
    optimizer.step()
    assert float((before - p.detach()).mean()) == pytest.approx(3 / 3, rel=0.1)


def test_calibration_error():
    confidence = torch.full((1000,), 0.8)
    right = (torch.arange(1000) % 10 < 8).float()
    assert calibration_error(confidence, right) == pytest.approx(0.0, abs=1e-4)
    assert calibration_error(confidence, torch.zeros(1000)) == pytest.approx(0.8, abs=1e-4)
    assert math.isfinite(calibration_error(torch.ones(3), torch.ones(3)))


@pytest.mark.parametrize("grouped", [False, True])
def test_padding_contributes_exactly_nothing(grouped, tmp_path):
    """Record 0 stands in for padding; not even one that makes every gradient NaN changes a bit."""
    g = np.random.default_rng(0)
    x = g.normal(size=(40, 1, 6, 6)).astype(np.float32)
    arrays = {"x_train": x, "y_train": np.arange(40) % 2, "who": np.arange(40) // 2}
    np.savez(tmp_path / "a.npz", **arrays)
    options = {"data": str(tmp_path / "a.npz"), "unit": "who" if grouped else None, "batch": 5, "steps": 4, "views": 2}
    config = dataclasses.replace(SMALL, augment="shift", epsilon=None, noise_multiplier=1.0, **options)
    weights = []
    for pad in (False, True):
        session = Session(dataclasses.replace(config, pad=pad, max_physical_batch=8 if pad else None))
        plain = session.units._cut
        session.units._cut = lambda units, limit, plain=plain: plain(units[units != 0], limit)  # nobody draws record 0
        session.x[0] = float("nan")
        shapes = set()
        session.model.register_forward_hook(lambda m, args, out, shapes=shapes: shapes.add(tuple(args[0].shape)))
        for _ in range(4):
            session.step()
        weights.append(flat(session))
        assert not pad or shapes == {(16, 1, 6, 6)}
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    assert bool(torch.isfinite(weights[1]).all())


class Flattens(nn.Module):
    """As networks are written everywhere: of no rows PyTorch cannot say how long each is."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(shape), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.reshape(x.size(0), -1))


@pytest.mark.parametrize("views", [1, 2])
def test_where_nobody_is_drawn_a_row_of_nobody_stands_in(views, monkeypatch):
    """A network of one's own that flattens by -1 ended a run whose batches are small."""
    monkeypatch.setitem(_MODELS, "flattens", Flattens)
    config = dataclasses.replace(
        SMALL, model="flattens", batch=1, steps=12, views=views, augment="shift", momentum=0.0, epsilon=None,
        noise_multiplier=0.0,
    )  # fmt: skip
    session, nobody = Session(config), 0
    session.x[0] = float("nan")
    announce = session.training.announce
    rows = []
    monkeypatch.setattr(session.training, "announce", lambda owners, *ends: (rows.append(owners), announce(owners, *ends)))
    for _ in range(12):
        before = [p.detach().clone() for p in session.model.parameters()]
        session.step()
        if not rows[-1].owners:
            nobody += 1
            assert rows[-1].rows == views
            assert all(torch.equal(p, q) for p, q in zip(session.model.parameters(), before, strict=True))
    assert nobody > 1
    assert bool(torch.isfinite(flat(session)).all())


def test_a_judge_of_whom_nobody_is_drawn_decides_by_noise_alone(monkeypatch):
    """The second sample of a selective update may be empty, too: the same network ended the run there."""
    monkeypatch.setitem(_MODELS, "flattens", Flattens)
    config = dataclasses.replace(
        SMALL, model="flattens", batch=1, steps=6, epsilon=None, noise_multiplier=1.0, selective=True
    )
    session, drawn = Session(config), []
    assert session.judge is not None
    losses = session.judge.losses
    monkeypatch.setattr(session.judge, "losses", lambda units: drawn.append(len(found := losses(units))) or found)
    for _ in range(6):
        session.step()
    assert 0 in drawn
    assert max(drawn) > 0
