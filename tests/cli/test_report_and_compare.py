"""`erlangen report` and `erlangen compare` as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

SMALL = (
    "--model",
    "mlp",
    "--steps",
    "4",
    "--batch",
    "128",
    "--set",
    "evaluations=1",
    "--set",
    'model_options={"width": 8}',
)


def run(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "erlangen.cli.main", *args], capture_output=True, text=True)


def here(capsys, *args: str) -> tuple[int, str, str]:
    """The same command in this process: exit code, stdout, stderr."""
    from typer.main import get_command

    from erlangen.cli.main import app

    with pytest.raises(SystemExit) as end:
        get_command(app).main(list(args), "erlangen")
    return int(end.value.code or 0), *capsys.readouterr()


def test_a_report_in_plain_words(capsys, tmp_path):
    from erlangen.training import TrainConfig
    from erlangen.training.run import train

    config = TrainConfig(model="logistic", epsilon=None, noise_multiplier=2.0, steps=2, batch=64, seed=0, evaluations=2)
    train(config, tmp_path / "run")
    code, stdout, _ = here(capsys, "report", str(tmp_path / "run"), "--out", str(tmp_path / "page" / "r.html"))
    assert code == 0
    assert "works offline" in stdout
    assert (tmp_path / "page" / "r.html").stat().st_size > 1_000_000
    forged = tmp_path / "run" / "certificate.json"
    forged.write_text(forged.read_text().replace('"private": true', '"private": false'))
    code, _, stderr = here(capsys, "report", str(tmp_path / "run"))
    assert code == 0
    assert "does not hold" in stderr


def test_mechanisms_are_compared_on_patients(capsys, tmp_path):
    """The options for one's own images are those of `erlangen train`."""
    from tests.deploy.test_predict import write_digits

    for path in (write_digits(tmp_path / "scans", 120) / "test").rglob("*.png"):  # no patient on both sides
        path.rename(path.with_name("q" + path.name[1:]))
    code, stdout, stderr = here(
        capsys, "compare", "--data", str(tmp_path / "scans"), "--unit", "patient", "--unit-pattern", r"^([pq]\d+)_", "--image-size",
        "6", "--mechanism", "iso", "--epsilon", "6", "--seeds", "1", "--trials", "0", "--jobs", "1", "--model", "logistic",
        "--steps", "2", "--batch", "8", "--out", str(tmp_path / "grid"), "--json",
    )  # fmt: skip
    assert code == 0, stderr
    [folder] = [tmp_path / "grid" / name for name in json.loads(stdout)["runs"]]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["guarantee"]["unit"] == "patient"
    assert summary["data"]["input_shape"] == [1, 6, 6]


@pytest.mark.slow
def test_from_grid_to_report(tmp_path):
    out = tmp_path / "grid"
    done = run(
        "compare", "--mechanism", "iso,rep", "--epsilon", "6", "--seeds", "2", "--trials", "0", "--jobs", "1", *SMALL,
        "--out", str(out), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert [row["mechanism"] for row in result["rows"]] == ["iso", "rep"]
    assert (out / "table.md").is_file()
    done = run("report", str(out), "--figures", str(tmp_path / "figures"), "--details", "1", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert len(result["runs"]) == 4
    assert all(r["epsilon"] <= 6 and r["problems"] == [] for r in result["runs"])
    page = (out / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert (tmp_path / "figures" / "run1-confusion.svg").is_file()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["report", "nowhere"], "no config.json"),
        (["report", "nowhere", "--details", "0"], "at least one"),
        (["report", "nowhere", "--format", "png"], "svg, pdf"),
        (["compare", "--epsilon", "soon"], "1,2,4,8"),
        (["compare", "--mechanism", "iso", "--model-for", "rep=cnn"], "MECHANISM=NETWORK"),
        (["compare", "--jobs", "0"], "at least one process"),
    ],
)
def test_misuse_is_answered_with_the_cure(args, words, capsys):
    code, _, stderr = here(capsys, *args)
    assert code == 2
    assert words in " ".join(stderr.replace("│", " ").split())


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_a_cluster_without_ray_names_the_package(capsys):
    code, _, stderr = here(capsys, "compare", "--cluster")
    assert code == 2
    assert "pip install 'erlangen[cluster]'" in stderr
