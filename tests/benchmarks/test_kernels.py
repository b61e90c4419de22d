"""The benchmark that chooses tiles: it refuses kernels that break their promise, and keeps the fastest of the others."""


import pytest
import torch

from tests.scripts import script

pytest.importorskip("triton", reason="Triton is not installed: the kernels cannot run, not even interpreted")

from erlangen.gradients import kernels
from erlangen.gradients.kernels import conv_unformed, tuned

if not kernels.INTERPRETED:
    pytest.skip("the interpreter is for machines without a GPU; on others run the benchmark", allow_module_level=True)

bench = script("kernels")

LAYER, CENTRED = bench.Layer("a network", 16, 16, 2), bench.Layer("a network", 16, 16, 2, 1, 2, centred=True)
VIEWED = bench.Layer("a network", 16, 16, 2, views=2)


@pytest.mark.parametrize("layer", [LAYER, CENTRED, VIEWED], ids=str)
def test_a_variant_that_breaks_its_promise_is_refused(layer, monkeypatch):
    torch.manual_seed(0)
    norms, total = conv_unformed.squared_norms, conv_unformed.weighted_sum
    assert bench.checked(layer, "cpu", tuned.Norms(32, 1, 1), tuned.Sum(16, 16, 1, 1)) == ""
    small = lambda *args, **options: norms(*args, **options) * 0.999  # noqa: E731
    large = lambda *args, **options: norms(*args, **options) * 1.5  # noqa: E731
    off = lambda *args, **options: total(*args, **options) * 1.001  # noqa: E731
    careless = lambda x, d, w, *args, **options: total(x, d, w + 1e-30, *args, **options)  # noqa: E731
    for name, twin, why in (
        ("squared_norms", small, "below"), ("squared_norms", large, "off by"), ("weighted_sum", off, "sums are off"),
        ("weighted_sum", careless, "weight zero"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(conv_unformed, name, twin)
            assert why in bench.checked(layer, "cpu", None, None)


def test_the_fastest_are_kept_and_read(monkeypatch, tmp_path):
    monkeypatch.setattr(tuned, "path", lambda: tmp_path / "kernels.json")
    monkeypatch.setattr(tuned, "machine", lambda: "a device")
    wide = bench.Layer("a network", 256, 256, 8)
    first, second = tuned.Norms(64, 4, 3), tuned.Norms(64, 8, 3)
    slow, quick = tuned.Sum(128, 128, 8, 5), tuned.Sum(128, 64, 4, 5)
    measured = {first: 1.0, second: 2.0}, {slow: 3.0, quick: 2.0}
    tuned._table.cache_clear()
    try:
        bench.keep([bench.Report(wide, 5.0, 9.0, 0.0, *measured, {})], "a device")
        assert (tuned.norms(64), tuned.weighing(64, 256, 256)) == (first, quick)
        assert conv_unformed.cheaper(64, 256, 256)
        bench.keep([bench.Report(wide, 2.5, 9.0, 0.0, *measured, {})], "a device")
        assert not conv_unformed.cheaper(64, 256, 256), "storing was faster"
    finally:
        tuned._table.cache_clear()


def test_the_layers_of_a_network_are_those_that_it_runs():
    found = {name: bench.layers_of(name, (3, 32, 32)) for name in ("resnet9", "wrn-16-4")}
    for layer in (*bench.LAYERS, *bench.LARGER):
        assert layer in found[layer.network]
        assert layer.unformed == (layer in bench.LAYERS)
    steerable = bench.layers_of("eq-resnet9-tuned", (3, 32, 32), views=4)
    assert [layer.tokens for layer in steerable] == [4 * size**2 for size in (32, 16, 16, 8, 4)]
    assert not any(layer.unformed for layer in steerable), "coefficients are summed from kernels that were formed"


def test_layers_without_a_case_are_named(capsys):
    assert bench.layers_of("lenet", (1, 28, 28)) == []
    assert "left out: Conv2d of (6, 14, 14)" in capsys.readouterr().out


def test_stored_gradients_of_several_views_are_measured():
    found = bench.measure_stored(bench.Layer("a network", 16, 16, 4, views=2), 3, "cpu", 1)
    assert None in found
    assert len(found) == 2
