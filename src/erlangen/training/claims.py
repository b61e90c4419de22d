"""What a run claims beside the number ε: before training to its owner, afterwards in its certificate."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from erlangen.accounting import AccountingError, certificate, epsilon
from erlangen.accounting.compose import UNKNOWN, Spent, ledgers_of
from erlangen.accounting.ledger import Ledger, LedgerError, NotALedger, read_ledger
from erlangen.accounting.words import factor, is_weak, upper
from erlangen.data import Dataset
from erlangen.sampling import Units
from erlangen.training.config import ConfigError, TrainConfig
from erlangen.training.folder import begun_with, run_of, without_places
from erlangen.training.session import Session
from erlangen.training.summary import non_private

CLASSES_FROM_LABELS = (
    "the number of classes, which shows in the shape of the weights: it was read off the private labels, where one record can "
    "change it"
)
CHANNELS_FROM_IMAGES = (
    "whether the network sees colours, which shows in the shape of its first weights: it was read off the private images, where "
    "one record can change it"
)
IN_THE_TEST_SET = (
    "whoever is in the test set, which its owner declared public: some of its images are stored with the run, and accuracy on them "
    "is shown as it is, without noise"
)

_OF_A_RUN = (
    "a run's ledger lies beside them, on other records: if these are private, too, whoever is among both has spent both ε"
)

#: what no certificate of a run leaves out; its ledger says so from the beginning, because what is not there contradicts nothing
STATED = ["sampler", "mechanism", "expected_batch", "weights"]


def remark_on_guarantee(session: Session, say: Callable[[str], None]) -> None:
    """What the owner wants to know before the privacy is spent: a δ or an ε that protects nobody much."""
    for remark in _allowed_by_delta(session.config, session.units):
        say(f"{remark}; give a smaller δ")
    learnt = run_of(session.config.weights)
    if learnt is not None:
        say(f"weights is {session.config.weights!r}: {_OF_A_RUN}; add both up with: erlangen account {quote(str(learnt[0]))} RUN")
    planned = _planned(session)
    if is_weak(planned):
        say(
            f"ε = {upper(planned, 3)} is a weak guarantee: what comes out may be {factor(planned)} times as likely with a given "
            f"{session.units.name} as without; give a smaller ε, or more noise"
        )


def spent_by(folder: Path) -> str | None:
    """What the run in a folder spent, validation on its records included, rounded up; None where nothing was released."""
    try:
        books = [book for book in (read_ledger(path, single_copy=True) for path in ledgers_of(folder)) if book.steps]
    except NotALedger:
        return None
    except (LedgerError, OSError):
        return "∞ (its ledger cannot be read)"
    if not books:
        return None
    try:
        delta = TrainConfig.from_file(folder / "config.json").delta or 1e-5
    except (ConfigError, OSError):
        delta = 1e-5
    spent = Spent(books[0].data or UNKNOWN, tuple(book for book in books if book.data == books[0].data))
    spent = Spent(spent.fingerprint, (books[0],)) if spent.mixed else spent
    more = sum(book.steps for book in books if book not in spent.books)
    try:
        amount = upper(spent.epsilon(delta), 4)
    except (AccountingError, LedgerError):
        amount = "∞"
    return amount + (f" (and {more} releases of private validation beside it)" if more else "")


def _planned(session: Session) -> float:
    """ε after all steps: the target, or what the given noise costs."""
    config = session.config
    if config.epsilon is not None:
        return config.epsilon
    assert config.delta is not None
    releases = [*((release.event, 1) for release in session.prior), (session.training.event(), config.steps)]
    return epsilon(releases, config.delta)


def write_certificate(session: Session, folder: Path, ledger: Ledger, weights: str) -> None:
    """``certificate.json`` and its one-page rendering, from the ledger, the facts of the run and its weights' SHA-256."""
    config, mechanism = session.config, session.training.mechanism
    audited = folder / "audit.json"
    assert config.delta is not None
    document = certificate.build(ledger.book, config.delta, {
        "sampler": session.sampler.describe(),
        "mechanism": session.mechanism_facts(),
        "data_size": len(session.dataset),
        "expected_batch": session.sampler.expected_batch,
        "secure": mechanism.noise.secure and session.sampler.secure,
        "non_private": non_private(config),
        "not_covered": [*dict.fromkeys([*ledger.book.not_covered, *not_covered(config, session.units, session.dataset)])],
        "audit": _audit_line(audited),
        "config": without_places(config),
        "weights": weights,
    })  # fmt: skip
    certificate.save(document, folder)


def not_covered(config: TrainConfig, units: Units, dataset: Dataset) -> list[str]:
    """What the guarantee of this run does not speak about, beside what no guarantee does."""
    shown = _shown_in_shapes(dataset)
    return [*_allowed_by_delta(config, units), *shown, *_taken_as_public(config), *_tested_in_public(dataset)]


def _allowed_by_delta(config: TrainConfig, units: Units) -> list[str]:
    delta = config.delta or 0.0
    if delta * units.count <= 1:
        return []
    return [f"delta is {delta:g}, above 1/{units.count}: that allows to publish a {units.name} outright"]


def _shown_in_shapes(dataset: Dataset) -> list[str]:
    """What private records alone decide about the shape of the weights: no noise hides that."""
    decided = {CLASSES_FROM_LABELS: dataset.classes_from_labels, CHANNELS_FROM_IMAGES: dataset.channels_from_images}
    return [words for words, so in decided.items() if so]


def _taken_as_public(config: TrainConfig) -> list[str]:
    if config.weights is None:
        return []
    name, digest = Path(config.weights).name, begun_with(config)["weights"]
    learnt = f"; {_OF_A_RUN}" if run_of(config.weights) is not None else ""
    return [
        f"the weights that training began with, {name} (SHA-256 {digest}): they are taken to be public, and what they tell about "
        f"anybody is not counted{learnt}"
    ]


def _tested_in_public(dataset: Dataset) -> list[str]:
    """Whether somebody of the training data is in the test set, too, only its owner can know."""
    return [] if dataset.x_test is None else [IN_THE_TEST_SET]


def _audit_line(path: Path) -> str | None:
    """What an audit of this run found, in one line; a file that is no audit is no audit."""
    from erlangen.audit.runs import in_words

    try:
        return in_words(json.loads(path.read_text())) if path.exists() else None
    except (ValueError, KeyError, TypeError):
        return f"{path.name} cannot be read"
