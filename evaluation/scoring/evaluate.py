"""Evaluate the loss of one checkpoint under every method at every length; finished cells are
reused."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from data import Tokenizer
from errors import EvaluationError
from evaluation.contamination.screening import Screening, screen, shared_text
from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import ContaminationSettings, EvaluationSettings
from evaluation.ranks import LAUNCH, EvaluationRanks, lost_process
from evaluation.scoring.loss_session import CellSession, EvaluationCell, MeasuredCells
from evaluation.scoring.methods import TRAINED, TRUNCATE, Method, new_sinks
from evaluation.scoring.plan import EvaluationPlan, make_plan, raw_bytes, truncation_step
from evaluation.scoring.scoring import (
    CellFailed,
    ModelScorer,
    batches,
    measure,
    merge_ranks,
    unigram_nll,
)
from evaluation.scoring.text import EvaluationText
from evaluation.scoring.windows import TargetWindows
from evaluation.stores import EvaluationStores
from model import ModelError, Transformer
from model.attention.sharding import is_broken_link

PRECISION_SAMPLE = 32  # windows scored again in float32 for comparison with bfloat16


@dataclass(kw_only=True)
class EvaluationResult(MeasuredCells):
    """Everything measured. `nll[method, length]` is per-target, in the order of `document` (n,):
    the plan's targets in their order, without those that `screening` drops."""

    settings: EvaluationSettings
    plan: EvaluationPlan
    document: np.ndarray
    unit: np.ndarray
    unit_kind: str
    screening: Screening
    n_bytes: int | None
    unigram: np.ndarray | None
    unit_names: list[str] = field(default_factory=list)  # of the ids in `unit`
    # per target: its cluster is also in the training text; None: unknown
    seen: np.ndarray | None = None
    nll: dict[tuple[str, int], np.ndarray] = field(default_factory=dict)
    truncated: np.ndarray | None = None  # context truncated to L0: the baseline of every net gain
    notes: list[str] = field(default_factory=list)  # caveats about the methods
    # built-in methods that do not apply, and why
    left_out: dict[str, str] = field(default_factory=dict)
    # mean bfloat16 - float32, nats
    precision: dict[tuple[str, int], float] = field(default_factory=dict)


class EvaluationSession(CellSession):
    """The targets and the cells of one evaluation of loss. Raises EvaluationError for invalid
    settings.

    An interrupted `run` keeps every finished cell and the finished part of the current one. With
    several `ranks` all of them must call it; each measures its share and all return the same
    result.

    Args:
        stores: the text to read, and the text the model was trained on, which gives the unigram
            baseline; passages that both share are excluded.
        dry_run: skip the search for passages shared with the training text.
    """

    result: EvaluationResult

    def __init__(
        self,
        settings: EvaluationSettings,
        subject: EvaluatedModel,
        *,
        stores: EvaluationStores,
        tokenizer: Tokenizer,
        methods: list[Method],
        cells: Path,
        console=None,
        ranks: EvaluationRanks | None = None,
        dry_run: bool = False,
    ):
        ranks = ranks or EvaluationRanks()
        if settings.context != ranks.context and not dry_run:
            raise EvaluationError(
                f"context = {settings.context} requires several processes: start {LAUNCH}"
            )
        shortest = settings.grid(subject.trained_length)[0]
        chunks = 2 * settings.context
        if settings.context > 1 and shortest < chunks:
            raise EvaluationError(
                f"context = {settings.context} requires windows of {chunks} tokens or more, two "
                f"for each process; the shortest length is {shortest}: lower context, or evaluate "
                "longer lengths"
            )
        if settings.minutes is not None and ranks.world > 1:
            raise EvaluationError("minutes does not support several processes; start one process")
        schemes = subject.schemes(methods)
        notes = _sinks(methods, schemes, settings.bos, subject)
        if dry_run:
            stores = replace(stores, train=None, earlier=(), unknown="")
            settings = settings.model_copy(
                update={"contamination": ContaminationSettings(check=False)}
            )
        self.text, self.plan, screening = choose_targets(
            settings,
            stores.read,
            stores.trained,
            tokenizer,
            subject.trained_length,
            unknown=stores.unknown,
            cache=stores.overlaps,
            console=console,
        )
        if self.plan.note and console:
            console.warn(self.plan.note)
        ids = self.plan.target_ids(self.text)[screening.kept]
        document = self.plan.truncated.target_documents()[screening.kept]
        self.tokenizer = tokenizer
        self.kept = screening.kept
        unit_of, unit_names, unit_kind = self.text.units()
        seen = None if stores.unknown else self.text.seen(stores.trained)
        train = stores.train
        result = EvaluationResult(
            settings=settings,
            subject=subject,
            plan=self.plan,
            facts={
                "corpus_hash": stores.read.hash,
                "tokenizer_hash": tokenizer.hash,
                "documents_in_corpus": stores.read.n_documents,
            },
            methods=methods,
            schemes=schemes,
            document=document,
            unit=unit_of[document],
            unit_kind=unit_kind,
            screening=screening,
            n_bytes=raw_bytes(ids, document, self.text, tokenizer),
            unigram=None if train is None else unigram_nll(train, ids, tokenizer.vocab_size),
            unit_names=unit_names,
            seen=None if seen is None else seen[document],
            absent=subject.absent_cells(
                methods, self.plan.lengths, refuse=settings.unreachable == "refuse"
            ),
            notes=notes,
        )
        super().__init__(result, cells, console, ranks)
        self.samples: dict[tuple[str, int], np.ndarray] = {}  # float32 reference for bfloat16

    def title(self) -> str:
        return f"{self.subject.name}: {self.plan.n_targets:,} targets"

    def cells(self) -> list[EvaluationCell]:
        out = []
        plan = self.plan
        sampled = self.settings.dtype == "bfloat16"
        for method in (method for method in self.result.methods if not method.truncates):
            lengths = [n for n in plan.lengths if (method.label, n) not in self.result.absent]
            out += [self._cell(method, length, plan.windows[length]) for length in lengths]
            for length in lengths if sampled else []:
                few = evenly_spread(plan.windows[length], PRECISION_SAMPLE)
                out.append(self._cell(method, length, few, "sample", sample=PRECISION_SAMPLE))
        if plan.protocol == "by-position":
            trained = next(method for method in self.result.methods if method.label == TRAINED)
            length = self.subject.trained_length
            step = truncation_step(self.settings, length)
            out.append(
                self._cell(trained, length, plan.truncated, "truncated", truncated=True, step=step)
            )
        return out

    def _cell(
        self, method: Method, length: int, windows: TargetWindows, role: str = "", **more
    ) -> EvaluationCell:
        key = self.key(method, length, "float32" if role == "sample" else None)
        key |= {"targets": self.plan.hash, "protocol": self.plan.protocol, **more}
        if self.plan.protocol == "sliding":
            key["stride"] = self.settings.step(length)
        keep = int(windows.keep.max())
        chunk = self.settings.chunk
        return EvaluationCell(
            method, length, key, windows.inputs, keep, chunk, role=role, windows=windows
        )

    def score(
        self, cell: EvaluationCell, model: Transformer, batch: int, advance: Callable[[float], None]
    ) -> np.ndarray:
        """Score the windows of this rank or of its context group, and gather those of the others;
        progress is estimated from this rank."""
        ranks = self.ranks
        windows = cell.windows
        rank = ranks.data_rank
        world = ranks.data_world
        assert windows is not None
        known = self.of_main(lambda: self.store.load_partial(cell.key))
        if known is None:
            known = np.full(windows.n_targets, np.nan)
        out = known.copy()
        total = sum(
            windows.inputs[members].sum() for members in batches(windows, batch)[rank::world]
        )

        def after(inputs: int, out: np.ndarray) -> None:
            advance(inputs / total)
            save()

        def save(now: bool = False) -> None:
            if ranks.reports_losses:
                self.store.save_partial(cell.key, out, ranks.rank, now=now)

        scorer = ModelScorer(
            model, device=self.device, chunk=cell.chunk, length=cell.length, shard=ranks.shard
        )
        error = ""
        try:
            measure(
                scorer,
                self.text,
                windows,
                batch=batch,
                rank=rank,
                world=world,
                out=out,
                after_batch=after,
            )
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
        errors, parts = zip(*self.ranks.collect((error, mine)), strict=True)
        if any(errors):
            raise CellFailed(next(filter(None, errors)))
        return merge_ranks(list(parts))

    def measure_cells(
        self, missing: list[EvaluationCell], advance: Callable[[EvaluationCell, float], None]
    ) -> None:
        """With a time limit, measure window by window, and drop the documents that are not
        finished."""
        if self.settings.minutes is None:
            return super().measure_cells(missing, advance)
        stop = time.monotonic() + 60 * self.settings.minutes
        distinct = self._distinct(missing)
        rows: dict[str, np.ndarray] = {}
        failures: dict[str, str] = {}  # by file, which several cells can share
        for cell in distinct:
            known = self.store.load_partial(cell.key)
            rows[self.store.name(cell.key)] = (
                np.full(self.plan.n_targets, np.nan) if known is None else known
            )
        turns = ((window, cell) for window in range(len(self.plan.truncated)) for cell in distinct)
        for window, cell in turns:
            if time.monotonic() > stop:
                break
            if (name := self.store.name(cell.key)) not in failures:
                try:
                    self._score_window(
                        cell,
                        window,
                        rows[name],
                        partial(advance, cell),
                    )
                except (CellFailed, ModelError) as error:
                    failures[name] = str(error)
        scored = np.ones(self.plan.n_targets, dtype=bool)
        for cell in missing:
            if (name := self.store.name(cell.key)) in failures:
                self.fail(cell, failures[name])
                continue
            scored &= ~np.isnan(rows[name])
            self.keep(cell, rows[name])
            if not np.isnan(rows[name]).any():
                self._add(cell, rows[name])
        self._restrict(scored)

    def _score_window(
        self, cell: EvaluationCell, window: int, rows: np.ndarray, advance: Callable[[float], None]
    ) -> None:
        """Score one window of a cell and save it; `rows` (n_targets,) are the losses of the cell so
        far. Raises CellFailed or ModelError."""
        all_windows = cell.windows
        assert all_windows is not None
        first = int(all_windows.keep[:window].sum())
        keep = int(all_windows.keep[window])
        if np.isnan(rows[first : first + keep]).any():
            scorer = ModelScorer(
                self.model(cell), device=self.device, chunk=cell.chunk, length=cell.length
            )
            rows[first : first + keep] = measure(
                scorer,
                self.text,
                all_windows.part(window),
            )
            self.store.save_partial(cell.key, rows, now=True)
            if not np.isnan(rows).any():
                self.store.save(cell.key, rows)
        advance(1 / len(all_windows))

    def _restrict(self, scored: np.ndarray) -> None:
        """Drop all targets of documents with a target that was not scored in every cell."""
        result = self.result
        of_target = self.plan.truncated.target_documents()
        every = np.unique(result.document)  # without documents that are excluded
        finished = np.setdiff1d(every, of_target[~scored])
        if not len(finished):
            raise EvaluationError(
                f"no document was scored under every method within {self.settings.minutes:g} "
                "minutes; run the same command again to continue"
            )
        if len(finished) == len(every):
            return
        result.notes.append(
            f"{len(finished)} of {len(every)} documents were scored under every method within the "
            "time limit; the same command continues."
        )
        here = np.isin(result.document, finished)
        self.kept = self.kept & np.isin(of_target, finished)
        for name in ("document", "unit", "unigram", "seen"):
            values = getattr(result, name)
            setattr(result, name, None if values is None else values[here])
        ids = self.plan.target_ids(self.text)[self.kept]
        result.n_bytes = raw_bytes(
            ids,
            result.document,
            self.text,
            self.tokenizer,
        )

    def keep(self, cell: EvaluationCell, values: np.ndarray) -> None:
        if cell.role == "truncated":
            self.result.truncated = values
        else:
            (self.samples if cell.role == "sample" else self.result.nll)[cell.where] = values

    def run(self) -> EvaluationResult:
        """Measure; drop the screened targets, add the precision of bfloat16 and the truncation
        baseline."""
        super().run()
        result = self.result
        kept = self.kept
        for where, exact in self.samples.items():
            if where in result.nll:
                windows = self.plan.windows[where[1]]
                of_window = np.repeat(np.arange(len(windows)), windows.keep)
                here = np.isin(of_window, _chosen(len(windows), PRECISION_SAMPLE))
                result.precision[where] = float((result.nll[where][here] - exact).mean())
        result.nll = {where: nll[kept] for where, nll in result.nll.items()}
        if result.truncated is not None:
            result.truncated = result.truncated[kept]
        baseline = result.nll.get((TRAINED, self.subject.trained_length))
        if self.plan.protocol != "by-position" and baseline is not None:
            result.truncated = baseline
            if any(method.truncates for method in result.methods):
                result.nll.update({(TRUNCATE, length): baseline for length in self.plan.lengths})
        return result


def choose_targets(
    settings: EvaluationSettings,
    store,
    trained: Sequence,
    tokenizer,
    trained_length: int,
    *,
    unknown: str = "",
    cache: Path | None = None,
    console=None,
) -> tuple[EvaluationText, EvaluationPlan, Screening]:
    """The text, the targets, and what is excluded; arguments as for `shared_text`.

    Raises EvaluationError if too little text remains.
    """
    shared = shared_text(
        settings.contamination,
        store,
        trained,
        tokenizer,
        unknown=unknown,
        cache=cache,
        console=console,
    )
    text = EvaluationText(
        store,
        settings.bos,
        getattr(tokenizer, "bos_id", None),
        shared.rows,
    )
    plan = make_plan(settings, text, store.hash, tokenizer.hash, trained_length)
    return text, plan, screen(shared, text, plan.truncated, plan.candidates)


def _sinks(
    methods: list[Method], schemes: dict[str, dict], bos: str, subject: EvaluatedModel
) -> list[str]:
    """A note for methods that keep the first tokens of windows, which start anywhere in a document.

    Raises EvaluationError if the model was trained with BOS there.
    """
    trained = subject.position(())
    with_sinks = [method.label for method in methods if new_sinks(schemes[method.label], trained)]
    if not with_sinks or bos == "every-window":
        return []
    names = ", ".join(with_sinks)
    if subject.bos_first:
        raise EvaluationError(
            f"{names}: the first tokens of a window are kept as sinks. {subject.bos_first}, but "
            "windows inside a document start with any token: set bos=every-window, or remove "
            "these methods"
        )
    return [
        f"Sinks ({names}) are the first tokens of a window, here arbitrary tokens, as at the "
        "start of a training window; bos=every-window puts BOS first."
    ]


def _chosen(n: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(np.int64))


def evenly_spread(windows: TargetWindows, count: int) -> TargetWindows:
    """At most `count` windows, evenly spread."""
    rows = _chosen(len(windows), count)
    return TargetWindows(
        windows.document[rows], windows.end[rows], windows.inputs[rows], windows.keep[rows]
    )
