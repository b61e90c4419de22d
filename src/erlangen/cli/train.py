"""``erlangen train``: from data to a private model."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import typer

from erlangen.accounting.words import upper
from erlangen.cli.data import CHANNELS, IMAGE_SIZE, SKIP_BAD, UNIT_CSV, UNIT_PATTERN, WHITE, data_options
from erlangen.cli.manners import Misuse
from erlangen.cli.settings import configuration

if TYPE_CHECKING:
    from erlangen.training.session import Session

    Watch = Callable[[Session, dict[str, Any]], None]


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    data: str | None = typer.Option(
        None, help="A data set's name, a folder of class folders, or an .npz file (see docs/data.md). Default digits."
    ),
    epsilon: float | None = typer.Option(None, help="Target ε; the noise is calibrated to it. Default 3."),
    delta: str = typer.Option("auto", help="Target δ; auto is min(1e-5, 0.1/N)."),
    noise_multiplier: float | None = typer.Option(None, help="σ, in place of --epsilon; 0 means no privacy."),
    model: str | None = typer.Option(None, help="A network's name; yours with --plugin FILE."),
    weights: str | None = typer.Option(None, help="Public weights to start from; erlangen prior makes a file without data."),
    prior: bool = typer.Option(False, "--prior", help="First learn features from made-up images: no data is read, and it is kept."),
    mechanism: str | None = typer.Option(None, help="A mechanism's name; yours with --plugin FILE."),
    clipping: str | None = typer.Option(None, help="flat, per-layer, auto-s, psac or adaptive."),
    max_grad_norm: float | None = typer.Option(None, help="The clipping bound C."),
    sampling: str | None = typer.Option(None, help="poisson, or importance (by gradient norm)."),
    selective: bool | None = typer.Option(
        None, "--selective", help="Keep an update only if a second sample's loss falls; costs a release a step."
    ),
    batch: int | None = typer.Option(None, help="Expected batch size (units of privacy). Default by the number of records."),
    steps: int | None = typer.Option(None, help="Number of steps. Default 30 epochs."),
    lr: float | None = typer.Option(None, help="Learning rate. Default by the noise of the whole run."),
    unit: str | None = typer.Option(None, help="Whose privacy: an array of the file, or what --unit-pattern/--unit-csv say."),
    unit_pattern: str | None = UNIT_PATTERN,
    unit_csv: str | None = UNIT_CSV,
    image_size: str | None = IMAGE_SIZE,
    channels: str | None = CHANNELS,
    normalise: str | None = typer.Option(None, help="half (default), none, private (costs ε), or MEAN/STD (public)."),
    white: float | None = WHITE,
    skip_bad: bool = SKIP_BAD,
    seed: int | None = typer.Option(None, help="Makes the run reproducible, and therefore not fit for release."),
    secure: bool | None = typer.Option(None, "--secure", help="Noise and sampling from the system's secure generator."),
    device: str | None = typer.Option(None, help="auto (default), cpu, cuda or cuda:N."),
    shard: bool | None = typer.Option(
        None, "--shard/--no-shard", help="Under torchrun, each process holds a part of the network (FSDP2), not all of it."
    ),
    out: Path | None = typer.Option(None, help="Folder of the run. Default runs/DATA-TIME."),
    resume: Path | None = typer.Option(
        None, help="Go on with the run in this folder; --device, --physical-batch, --shard and --data (moved) may differ."
    ),
    single_copy: bool = typer.Option(False, "--single-copy", help="Resume with one of the ledger's two copies missing."),
    physical_batch: int | None = typer.Option(
        None, help="Rows held in memory at once; changes no result. Default: what takes 4 GB, or two fifths of a GPU."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace a run that is in the folder."),
    config: Path | None = typer.Option(None, help="JSON file with any option of the configuration."),
    set_: list[str] = typer.Option([], "--set", help="key=value for any option of the configuration."),
    tensorboard: bool = typer.Option(False, "--tensorboard", help="Also write RUN/tensorboard (needs tensorboard)."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as one JSON object."),
) -> None:
    """Train a model with differential privacy and say what was guaranteed.

    torchrun --nproc-per-node 4 -m erlangen train … shares the work among four processes.
    """
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # a RANK alone is not torchrun's
    if several and int(os.environ.get("RANK", "0")):  # one of its other processes
        from erlangen.training.distributed import assist

        assist()
        return
    given: dict[str, Any] = {
        "data": data, "model": model, "weights": weights, "mechanism": mechanism, "clipping": clipping,
        "max_grad_norm": max_grad_norm, "sampling": sampling, "selective": selective,
        "batch": batch, "steps": steps, "lr": lr, "unit": unit, "seed": seed, "secure": secure, "device": device,
        "epsilon": epsilon, "noise_multiplier": noise_multiplier, "max_physical_batch": physical_batch,
        "shard": shard,
    }  # fmt: skip
    if prior:
        given["weights"] = _made_up(weights, resume)
    values = {key: value for key, value in given.items() if value is not None}
    about_data = data_options(unit_pattern, unit_csv, image_size, channels, white, skip_bad, normalise)
    if about_data:
        values["data_options"] = about_data
    _refuse_zeros(values)
    if resume is not None:
        fixed = {"--delta": delta != "auto", "--out": out, "--overwrite": overwrite, "--config": config, "--set": set_}
        _refuse_with_resume([name for name, value in fixed.items() if value])
        summary = continue_with_progress(resume, values, quiet=as_json, single_copy=single_copy, tensorboard=tensorboard)
        typer.echo(json.dumps({**summary, "run": str(resume)})) if as_json else report(summary, resume)
        return
    if single_copy:
        raise Misuse("--single-copy is for --resume: a new run writes both copies of its ledger")
    if delta != "auto":
        values["delta"] = _float("delta", delta)
    settings = configuration(config, values, set_)
    folder = out or Path("runs") / f"{Path(settings.data).stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    summary = run_with_progress(settings, folder, overwrite, quiet=as_json, tensorboard=tensorboard)
    if as_json:
        typer.echo(json.dumps({**summary, "run": str(folder)}))
    else:
        report(summary, folder)


def _made_up(weights: str | None, resume: Path | None) -> str | None:
    """What stands for a prior in the options; nothing where a run that began with one goes on."""
    from erlangen.prior.kept import MADE_UP, is_kept
    from erlangen.training.config import read_options

    if weights is not None:
        raise Misuse(f"--prior and --weights {weights} exclude each other: give the weights to start from, or let them be learnt")
    if resume is None:
        return MADE_UP
    began = read_options(resume / "config.json").get("weights")
    if not is_kept(began):
        raise Misuse(f"--prior: {resume} began with {began or 'fresh weights'}. Give --resume {resume} alone, or start a new run")
    return None


def _refuse_zeros(values: dict[str, Any]) -> None:
    for name in ("batch", "steps", "lr"):
        if values.get(name) == 0:
            raise Misuse(f"{name} is 0; give a number above 0, or leave --{name} out for the automatic choice")


def _refuse_with_resume(names: list[str]) -> None:
    if names:
        raise Misuse(f"{', '.join(names)} cannot be given with --resume: the run keeps its folder and its options")


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{name} is {text!r}; give a number, or auto") from None


def run_with_progress(
    settings: Any, folder: Path, overwrite: bool, quiet: bool, tensorboard: bool = False
) -> dict[str, Any]:
    """Train with a progress bar on stderr: ε spent, images a second, time left, public test accuracy."""
    from functools import partial

    from erlangen.cli.prior import with_bar
    from erlangen.training.distributed import train as run

    learn = partial(with_bar, quiet=quiet)
    with progress_bar(quiet) as bar, _board(folder, tensorboard) as board:
        return run(settings, folder, overwrite, watch=_both(bar, board), say=_say, learn=learn).summary


def continue_with_progress(
    folder: Path, changes: dict[str, Any], quiet: bool, single_copy: bool = False, tensorboard: bool = False
) -> dict[str, Any]:
    from erlangen.training.distributed import resume as run

    with progress_bar(quiet) as bar, _board(folder, tensorboard) as board:
        return run(folder, watch=_both(bar, board), say=_say, single_copy=single_copy, **changes).summary


def _say(text: str) -> None:
    print(f"erlangen: note: {text}", file=sys.stderr)


@contextmanager
def _board(folder: Path, wanted: bool) -> Iterator[Watch | None]:
    if not wanted:
        yield None
        return
    from erlangen.training.tensorboard import Board

    with Board(folder / "tensorboard") as board:
        yield board


def _both(first: Watch, second: Watch | None) -> Watch:
    def watch(session: Session, metrics: dict[str, Any]) -> None:
        first(session, metrics)
        if second is not None:
            second(session, metrics)

    return watch


class Spent:
    """ε for the eye: brought up to date as often as a fiftieth of the time allows, and whenever a run has computed it."""

    def __init__(self) -> None:
        self.value, self.due, self.step = 0.0, 0.0, -1

    def of(self, session: Session, metrics: dict[str, Any]) -> float:
        if metrics.get("step") == session.step_count:
            self.value, self.step = float(metrics["epsilon"]), session.step_count
        elif time.perf_counter() >= self.due:
            started = time.perf_counter()
            self.value, self.step = session.epsilon(), session.step_count
            now = time.perf_counter()
            self.due = now + max(1.0, 50 * (now - started))
        return self.value


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Watch]:
    """A bar that stays once a step was made; before that, an error finds the screen empty."""
    from erlangen import terminal

    progress = terminal.bars("training", terminal.COUNT, "{task.fields[note]}", quiet=quiet)
    console = progress.console
    waiting = None if quiet or not console.is_terminal else console.status("reading the data, calibrating the noise")
    task = progress.add_task("", total=None, note="")
    first: list[tuple[float, int]] = []
    spent, rest = Spent(), ""

    def watch(session: Session, metrics: dict[str, Any]) -> None:
        nonlocal rest
        if not first:
            first.append((time.perf_counter(), session.step_count))
            if waiting is not None:
                waiting.stop()
            progress.start()
        seconds, steps = time.perf_counter() - first[0][0], session.step_count - first[0][1]
        images = steps * session.config.batch * len(session.dataset) / session.units.count  # a patient may have several
        note = rest = f"{images / max(1e-9, seconds):,.0f} images/s" if steps else ""
        if not quiet:
            note = f"ε {upper(spent.of(session, metrics), 3)}  " + note
        if "test_accuracy" in metrics:
            note = f"test {metrics['test_accuracy']:.1%}  " + note
        progress.update(task, completed=session.step_count, total=session.config.steps, note=note)

    try:
        if waiting is not None:
            terminal.waiting.append(waiting)
            waiting.start()
        yield watch
    finally:
        if waiting is not None:
            terminal.waiting.remove(waiting)
            waiting.stop()
        if first:
            if progress.tasks[task].completed != spent.step:  # an earlier ε, which must not stay beside the last step
                progress.update(task, note=rest)
            progress.stop()


def report(summary: dict[str, Any], folder: Path | None) -> None:
    """Accuracy and guarantee in plain words."""
    from erlangen.training.summary import in_plain_words

    if summary["test"]:
        test = summary["test"]
        single = f"; of single views {test['single_view_accuracy']:.1%}" if "single_view_accuracy" in test else ""
        typer.echo(f"\nTest accuracy  {test['test_accuracy']:.1%} on {summary['data']['name']} (public test set){single}")
    else:
        typer.echo("\nNo public test set: no accuracy is reported (erlangen validate releases one on private records).")
    typer.echo(f"Privacy        {in_plain_words(summary)}")
    private = summary["guarantee"]["epsilon"]["pld"] != "inf"
    typer.echo(f"Randomness     {_randomness(summary['randomness'], private)}")
    if summary["non_private"]:
        typer.echo(f"Not private    {', '.join(summary['non_private'])}: shown without noise, and outside the guarantee")
    if summary["steps"] < summary["planned_steps"]:
        typer.echo(
            f"Stopped        after {summary['steps']} of {summary['planned_steps']} steps: the privacy budget is spent"
        )
    for note in summary.get("ledger_notes", []):
        typer.echo(f"Ledger         was damaged and repaired: {note}")
    if folder is not None:
        typer.echo(f"Run            {folder} (certificate.json, certificate.md, weights.safetensors)")
        place = quote(str(folder))
        typer.echo(f"Next           erlangen predict {place} IMAGE…, erlangen export {place}, erlangen report {place}")


def _randomness(source: str, private: bool) -> str:
    if source == "secure" or not private:  # no generator makes up for a guarantee that is not there
        return source
    return f"{source.removesuffix(': not for release')}: for experiments; train with --secure before giving the model away"
