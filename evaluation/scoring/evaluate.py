"""Evaluate the loss of one checkpoint under every method at every length; finished cells are
reused."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from errors import EvaluationError
from evaluation.contamination.screening import Screening
from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import EvaluationSettings
from evaluation.ranks import EvaluationRanks, lost_process
from evaluation.scoring.methods import TRAINED, TRUNCATE, CellPlace, Method, new_sinks
from evaluation.scoring.plan import ChosenTargets, EvaluationPlan, raw_bytes, truncation_step
from evaluation.scoring.repetition import ControlText, RepeatedTargets
from evaluation.scoring.scoring import (
    CellFailed,
    ModelScorer,
    batches,
    measure,
    merge_ranks,
    unigram_nll,
)
from evaluation.scoring.session import (
    Advance,
    CellSession,
    CellStore,
    EvaluationCell,
    MeasuredCells,
)
from evaluation.scoring.windows import TargetWindows
from model import ModelError, Transformer
from model.sharding import is_broken_link

PRECISION_SAMPLE = 32  # windows scored again in float32 for comparison with bfloat16

SAMPLE = "float32 sample"  # role of a cell for the precision of bfloat16
TRUNCATED = "truncated"  # role of the baseline of by-position
REPEATED = "repeated"  # role of a cell of repeated text
CONTROL = "control"  # role of a cell of repeated text whose earlier occurrence is replaced

Losses = dict[CellPlace, np.ndarray]


@dataclass(kw_only=True)
class EvaluationResult(MeasuredCells):
    """Everything measured. `nll[method, length]` is per-target, in the order of `document` (n,):
    the plan's targets in their order, without those that `screening` drops."""

    settings: EvaluationSettings
    plan: EvaluationPlan
    screening: Screening
    unit_kind: str
    unit_names: list[str]  # of the ids in `unit` and `units`
    units: np.ndarray  # of every document of the corpus
    document: np.ndarray
    unit: np.ndarray
    unigram: np.ndarray | None = None
    n_bytes: int | None = None
    nll: Losses = field(default_factory=dict)
    truncated: np.ndarray | None = None  # context truncated to L0: the baseline of every net gain
    # of the plan's repeated targets, and after their earlier occurrence was replaced
    repeated: Losses = field(default_factory=dict)
    control: Losses = field(default_factory=dict)
    # built-in methods that do not apply, and why
    left_out: dict[str, str] = field(default_factory=dict)


class EvaluationSession(CellSession):
    """The targets and the cells of one evaluation of loss. Raises EvaluationError for invalid
    settings.

    An interrupted `run` keeps every finished cell and the finished part of the current one. With
    several `ranks` all of them must call it; each measures its share and all return the same
    result.
    """

    result: EvaluationResult
    store: CellStore

    def __init__(
        self,
        settings: EvaluationSettings,
        subject: EvaluatedModel,
        targets: ChosenTargets,
        methods: list[Method],
        cells: Path,
        console=None,
        ranks: EvaluationRanks | None = None,
    ):
        self.targets = targets
        self.text = targets.text
        self.plan = targets.plan
        if self.plan.repeats is not None:
            self.control = ControlText(self.text, self.plan.repeats)
        units, unit_names, unit_kind = self.text.units()
        document = self.plan.truncated.target_documents()[targets.screening.kept]
        stores = targets.stores
        result = EvaluationResult(
            settings=settings,
            subject=subject,
            plan=self.plan,
            facts={
                "corpus_hash": stores.read.hash,
                "tokenizer_hash": targets.tokenizer.hash,
                "documents_in_corpus": stores.read.n_documents,
            },
            methods=methods,
            unit_kind=unit_kind,
            unit_names=unit_names,
            units=units,
            document=document,
            unit=units[document],
            screening=targets.screening,
        )
        lengths = {length: length for length in self.plan.lengths}
        super().__init__(result, lengths, cells, console, ranks)
        notes = [targets.screening.unchecked, _sinks(result)]
        result.notes = list(filter(None, notes))
        self.title = f"{self.plan.n_targets:,} targets"
        # by role of a cell: its losses by (method, length)
        self.kept: dict[str, Losses] = defaultdict(dict)
        if self.plan.note:
            self.warn(self.plan.note)

    def cells(self) -> list[EvaluationCell]:
        out = []
        plan = self.plan
        for method, length in self.places():
            if method.truncates:
                continue
            windows = plan.windows[length]
            out.append(self._cell(method, length, windows, {}))
            if self.settings.dtype == "bfloat16":
                few = evenly_spread(windows, PRECISION_SAMPLE)
                more = {"sample": PRECISION_SAMPLE}
                out.append(self._cell(method, length, few, more, SAMPLE))
            if plan.repeats is not None:
                out += self._repeat_cells(method, length, plan.repeats)
        if plan.protocol == "by-position":
            length = self.subject.trained_length
            step = truncation_step(self.settings, length)
            trained = Method(TRAINED, ())
            more = {"truncated": True, "step": step}
            out.append(self._cell(trained, length, plan.truncated, more, TRUNCATED))
        return out

    def _repeat_cells(
        self,
        method: Method,
        length: int,
        repeats: RepeatedTargets,
    ) -> list[EvaluationCell]:
        """Repeated text, and those of its windows that hold a replaced token."""
        windows = repeats.windows(length)
        changed = windows.take(np.flatnonzero(repeats.is_changed(length)))
        roles = {REPEATED: windows, CONTROL: changed}
        return [
            self._cell(method, length, each, {"targets": repeats.hash, "role": role}, role)
            for role, each in roles.items()
            if len(each)
        ]

    def _cell(
        self,
        method: Method,
        length: int,
        windows: TargetWindows,
        more: dict,
        role: str = "",
    ) -> EvaluationCell:
        key = self.key(method, length, "float32" if role == SAMPLE else None)
        key |= {"targets": self.plan.hash, "protocol": self.plan.protocol} | more
        if self.plan.protocol == "sliding":
            key["stride"] = self.settings.step(length)
        return EvaluationCell(
            method,
            length,
            key,
            inputs=windows.inputs,
            keep=int(windows.keep.max()),
            chunk=self.settings.chunk,
            role=role,
            windows=windows,
        )

    def score(
        self,
        cell: EvaluationCell,
        model: Transformer,
        batch: int,
        advance: Advance,
    ) -> np.ndarray:
        """Score the windows of this rank or of its context group, and gather those of the others;
        progress is estimated from this rank. Batch b belongs to group b mod (number of groups), so
        the result is bitwise equal for any number of them."""
        ranks = self.ranks
        # of an earlier call, NaN where there are none
        known = ranks.from_main(lambda: self.store.load_partial(cell.key))
        if known is None:
            known = np.full(cell.windows.n_targets, np.nan)
        out = known.copy()
        text = self.control if cell.role == CONTROL else self.text
        scorer = ModelScorer(
            model,
            device=self.device,
            chunk=cell.chunk,
            length=cell.length,
            shard=ranks.shard,
        )
        groups = batches(cell.windows, batch)[ranks.data_rank :: ranks.data_world]
        total = sum(cell.windows.inputs[members].sum() for members in groups)

        def save(now: bool) -> None:
            if ranks.reports_losses:
                self.store.save_partial(cell.key, out, ranks.rank, now=now)

        def after(inputs: int) -> None:
            advance(inputs / total)
            save(now=False)

        error = ""
        try:
            measure(scorer, text, cell.windows, groups, out, after)
        except KeyboardInterrupt:
            save(now=True)
            raise
        except RuntimeError as failure:
            if ranks.shard is None or not is_broken_link(failure):
                raise
            save(now=True)
            raise lost_process(failure) from failure
        except (CellFailed, ModelError) as failure:
            error = str(failure)
        if ranks.world > 1 and not error:  # the process may end while waiting for the others
            save(now=True)
        # Losses from an earlier call belong to rank 0, those of a context group to its first rank.
        mine = out if ranks.main else np.where(np.isnan(known) & ranks.reports_losses, out, np.nan)
        errors, parts = zip(*ranks.collect((error, mine)), strict=True)
        if any(errors):
            raise CellFailed(next(filter(None, errors)))
        return merge_ranks(list(parts))

    def keep(self, cell: EvaluationCell, values: np.ndarray) -> None:
        self.kept[cell.role][cell.where] = values
        if cell.role != SAMPLE:
            name = TRUNCATED if cell.role == TRUNCATED else cell.label
            self.result.files[f"{name}@{cell.length}"] = cell.file

    def run(self) -> EvaluationResult:
        """Measure; drop the screened targets, add the precision of bfloat16, the truncation and the
        unigram baseline."""
        super().run()
        result = self.result
        plan = self.plan
        result.nll = self.kept[""]
        for where, exact in self.kept[SAMPLE].items():
            if where in result.nll:
                windows = plan.windows[where[1]]
                of_window = np.repeat(np.arange(len(windows)), windows.keep)
                here = np.isin(of_window, _spread(len(windows), PRECISION_SAMPLE))
                result.precision[where] = float((result.nll[where][here] - exact).mean())
        kept = result.screening.kept
        result.nll = {where: nll[kept] for where, nll in result.nll.items()}
        for truncated in self.kept[TRUNCATED].values():
            result.truncated = truncated[kept]
        self._add_repeated()
        stores = self.targets.stores
        tokenizer = self.targets.tokenizer
        if plan.span_bytes is None:
            ids = plan.target_ids(self.text)[kept]
            index = plan.target_index()[kept]
            result.n_bytes = raw_bytes(ids, result.document, index, self.text, tokenizer)
            if stores.train is not None:
                result.unigram = unigram_nll(stores.train, ids, tokenizer.vocab_size)
        else:
            result.nll = {where: plan.per_byte(nll) for where, nll in result.nll.items()}
            result.document = np.repeat(plan.truncated.document, plan.span_bytes)
            result.unit = result.units[result.document]
            result.n_bytes = len(result.document)
        baseline = result.nll.get((TRAINED, self.subject.trained_length))
        if plan.protocol != "by-position" and baseline is not None:
            result.truncated = baseline
            self._add_truncated(result.nll)
        return result

    def _add_truncated(self, losses: Losses) -> None:
        """Add `truncate`, whose losses are those as trained at the trained length."""
        baseline = losses.get((TRAINED, self.subject.trained_length))
        if baseline is not None and any(method.truncates for method in self.result.methods):
            losses |= {(TRUNCATE, length): baseline for length in self.plan.lengths}

    def _add_repeated(self) -> None:
        """Losses of repeated text. Windows without a replaced token are their own control."""
        result = self.result
        repeats = self.plan.repeats
        if repeats is None:
            return
        for where, nll in self.kept[REPEATED].items():
            changed = np.repeat(repeats.is_changed(where[1]), repeats.keep)
            control = nll.copy()
            if changed.any():
                if where not in self.kept[CONTROL]:
                    continue  # it has failed
                control[changed] = self.kept[CONTROL][where]
            result.repeated[where] = nll
            result.control[where] = control
        self._add_truncated(result.repeated)
        self._add_truncated(result.control)


def _sinks(result: EvaluationResult) -> str:
    """A note for methods that keep the first tokens of windows, which start anywhere in a document.

    Raises EvaluationError if the model was trained with BOS there.
    """
    subject = result.subject
    trained = subject.position(())
    with_sinks = [label for label, scheme in result.schemes.items() if new_sinks(scheme, trained)]
    if not with_sinks or result.settings.bos == "every-window":
        return ""
    names = ", ".join(with_sinks)
    if subject.bos_first:
        raise EvaluationError(
            f"{names}: the first tokens of a window are kept as sinks. {subject.bos_first}, but "
            "windows inside a document start with any token: set bos=every-window, or remove "
            "these methods"
        )
    return (
        f"Sinks ({names}) are the first tokens of a window, here arbitrary tokens, as at the "
        "start of a training window; bos=every-window puts BOS first."
    )


def _spread(n: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(np.int64))


def evenly_spread(windows: TargetWindows, count: int) -> TargetWindows:
    """At most `count` windows, evenly spread."""
    return windows.take(_spread(len(windows), count))
