"""Loss of text of one checkpoint under every method at every length, on the same targets. Computes
one NLL for each target, in batches of windows, in chunks through the cache."""

from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from errors import EvaluationError
from evaluation.evaluated_model import EvaluatedModel
from evaluation.evaluation_settings import HALF, EvaluationSettings
from evaluation.fixed_target_loss import measure_windows
from evaluation.methods import TRAINED, TRUNCATE, Method, MethodAndLength
from evaluation.ranks import lost_process
from evaluation.scoring.cells import (
    Advance,
    CellFailed,
    CellStore,
    EvaluationCell,
    Measurement,
)
from evaluation.scoring.evaluation_plan import ChosenTargets, truncation_step
from evaluation.scoring.repetition import ControlText, RepeatedTargets
from evaluation.scoring.targets import EvaluationText, targets_of
from model import ContextShard, ModelError, TokenPositions, Transformer
from model.devices import to_device
from model.sharding import is_broken_link

UNIGRAM_TOKENS = 50_000_000  # enough for four digits of every frequent token's share
PRECISION_SAMPLE = 32  # windows scored again in float32 for comparison with half precision

SAMPLE = "float32 sample"  # role of a cell for the precision of half-precision models
TRUNCATED = "truncated"  # role of the baseline of by-position
REPEATED = "repeated"  # role of a cell of repeated text
CONTROL = "control"  # role of a cell of repeated text whose earlier occurrence is replaced

Losses = dict[MethodAndLength, np.ndarray]


class LossMeasurement(Measurement):
    """The targets of one run and their loss under every method at every length. Raises
    EvaluationError for invalid settings.

    An interrupted `run` keeps every finished cell and the finished part of the current one. With
    several `ranks`, all of them must call it; each measures its share and all return the same
    numbers.

    Attributes:
        nll: by (method, length), NLL of every target (n,), in the order of `plan` and without the
            targets that `screening` drops.
        document, unit: document and unit of every target (n,). `units`: the unit of every document
            of the corpus; `unit_names`: names of the units.
        truncated_nll: NLL as trained of every target (n,), with the context truncated to L0: the
            baseline of every net gain.
        unigram: NLL of every target under a unigram model.
        n_bytes: number of bytes of the targets' text.
        repeated, control: like `nll`, for the plan's repeated targets, before and after their
            earlier occurrence was replaced.
        left_out: built-in methods that do not apply, with the reason.
    """

    settings: EvaluationSettings
    store: CellStore

    def __init__(
        self,
        settings: EvaluationSettings,
        subject: EvaluatedModel,
        targets: ChosenTargets,
        methods: list[Method],
        cells: Path,
        **environment: Any,
    ):
        self.targets = targets
        self.text = targets.text
        self.plan = targets.plan
        self.screening = targets.screening
        store = self.text.store
        facts = {
            "corpus_hash": store.hash,
            "tokenizer_hash": targets.tokenizer.hash,
            "documents_in_corpus": store.n_documents,
        }
        needed = {length: length for length in self.plan.lengths}
        super().__init__(
            settings, subject, methods, needed, facts=facts, cells=cells, **environment
        )
        document, _ = targets_of(self.plan.truncated_windows)
        self.document = document[self.screening.kept]
        self.units, self.unit_names, self.unit_kind = self.text.units()
        self.unit = self.units[self.document]
        self.nll: Losses = {}
        self.repeated: Losses = {}
        self.control: Losses = {}
        self.truncated_nll: np.ndarray | None = None
        self.unigram: np.ndarray | None = None
        self.n_bytes: int | None = None
        self.left_out: dict[str, str] = {}
        sinks = subject.check_sinks(self.schemes, settings.bos)
        self.notes = list(filter(None, [self.screening.unchecked, sinks]))
        self.title = f"{len(self.screening.kept):,} targets"
        if self.plan.note:
            self.warn(self.plan.note)

    @property
    def truncated_mean(self) -> float | None:
        """The mean of `truncated_nll`; None if it was not measured."""
        return None if self.truncated_nll is None else float(self.truncated_nll.mean())

    @property
    def unigram_mean(self) -> float | None:
        """The mean of `unigram`; None without training text."""
        return None if self.unigram is None else float(self.unigram.mean())

    def cells(self) -> list[EvaluationCell]:
        out = []
        plan = self.plan
        for method, length in self.places():
            if method.truncates:
                continue
            windows = plan.windows[length]
            out.append(self._cell(method, length, windows, {}))
            if self.settings.dtype in HALF:
                few = windows[spread(len(windows), PRECISION_SAMPLE)]
                out.append(self._cell(method, length, few, {"sample": PRECISION_SAMPLE}, SAMPLE))
            if plan.repeats is not None:
                repeated = plan.repeats.windows(length)
                # windows that contain a replaced token
                changed = repeated[plan.repeats.is_changed(length)]
                for role, each in {REPEATED: repeated, CONTROL: changed}.items():
                    if len(each):
                        more = {"targets": plan.repeats.hash, "role": role}
                        out.append(self._cell(method, length, each, more, role))
        if plan.protocol == "by-position":
            length = self.subject.trained_length
            more = {"truncated": True, "step": truncation_step(self.settings, length)}
            out.append(
                self._cell(Method(TRAINED, ()), length, plan.truncated_windows, more, TRUNCATED)
            )
        return out

    def _cell(
        self, method: Method, length: int, windows: np.ndarray, more: dict, role: str = ""
    ) -> EvaluationCell:
        """A cell whose key includes `more`."""
        key = self.key(method, length, "float32" if role == SAMPLE else None)
        key |= {"targets": self.plan.hash, "protocol": self.plan.protocol} | more
        if self.plan.protocol == "sliding":
            key["stride"] = self.settings.step(length)
        return EvaluationCell(
            method,
            length,
            key,
            inputs=windows[:, 2],
            keep=int(windows[:, 3].max()),
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
        """Score the windows of this rank or of its context group, and gather the losses of the
        others. Progress is estimated from this rank. Batch b belongs to group b mod (number of
        groups), so the result is bitwise equal for any number of groups."""
        ranks = self.ranks
        # losses from an earlier call; NaN for targets not scored yet
        known = ranks.from_main(lambda: self.store.load_partial(cell))
        if known is None:
            known = np.full(cell.windows[:, 3].sum(), np.nan)
        nll = known.copy()
        text: EvaluationText | ControlText = self.text
        if cell.role == CONTROL and self.plan.repeats is not None:
            text = ControlText(self.text, self.plan.repeats)
        scorer = ModelScorer(
            model,
            device=self.device,
            chunk=cell.chunk,
            length=cell.length,
            shard=ranks.shard,
        )
        # Processes that share each window: the first one reports their losses.
        sharing = 1 if ranks.shard is None else ranks.shard.size
        group_of_ranks, index_in_group = divmod(ranks.rank, sharing)
        groups = by_shape(cell.windows[:, 2:], batch)[group_of_ranks :: ranks.world // sharing]
        total = sum(cell.inputs[group].sum() for group in groups)

        def save(now: bool) -> None:
            if index_in_group == 0:
                self.store.save_partial(cell, nll, ranks.rank, now)

        def after(group: np.ndarray, losses: np.ndarray) -> None:
            finite = np.isfinite(losses).all(axis=1)
            if not finite.all():
                document, _, inputs, _ = cell.windows[group[finite.argmin()]]
                name = self.text.store.names[document]
                raise CellFailed(f"the loss is not finite at length {inputs}, document {name}")
            advance(cell.inputs[group].sum() / total)
            save(now=False)

        error = ""
        try:
            measure_windows(scorer, text.windows, cell.windows, groups, nll, after)
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
        # Losses from an earlier call belong to rank 0, losses of a context group to its first rank.
        mine = nll if ranks.main else np.where(np.isnan(known) & (index_in_group == 0), nll, np.nan)
        errors, parts = zip(*ranks.collect((error, mine)), strict=True)
        if any(errors):
            raise CellFailed(next(filter(None, errors)))
        return merge_ranks(list(parts))

    def run(self) -> Self:
        """Measure the cells, drop the screened targets, and add the rounding error of HALF,
        `truncate` and the unigram baseline."""
        super().run()
        plan = self.plan
        whole = self.values_by_role[""]
        for (method, length), exact in self.values_by_role[SAMPLE].items():
            if (method, length) in whole:
                windows = plan.windows[length]
                of_window = np.repeat(np.arange(len(windows)), windows[:, 3])
                here = np.isin(of_window, spread(len(windows), PRECISION_SAMPLE))
                difference = whole[method, length][here] - exact
                self.rounding_error[method, length] = float(difference.mean())
        kept = self.screening.kept
        self.nll = {where: nll[kept] for where, nll in whole.items()}
        if plan.repeats is not None:
            self._add_repeated(plan.repeats)
        if plan.span_bytes is None:
            document, index = (each[kept] for each in targets_of(plan.truncated_windows))
            ids = self.text.targets(plan.truncated_windows)[kept]
            self.n_bytes = raw_bytes(ids, document, index, self.text, self.targets.tokenizer)
            if (train := self.targets.stores.train) is not None:
                self.unigram = unigram_nll(train, ids, self.targets.tokenizer.vocab_size)
        else:
            self.nll = {
                where: per_byte(nll, plan.truncated_windows, plan.span_bytes)
                for where, nll in self.nll.items()
            }
            self.document = np.repeat(plan.truncated_windows[:, 0], plan.span_bytes)
            self.unit = self.units[self.document]
            self.n_bytes = len(self.document)
        if plan.protocol == "by-position":
            (truncated,) = self.values_by_role[TRUNCATED].values() or [None]
            self.truncated_nll = None if truncated is None else truncated[kept]
        else:
            self.truncated_nll = self.nll.get((TRAINED, self.subject.trained_length))
            self._add_truncated(self.nll)
        return self

    def _add_truncated(self, losses: Losses) -> None:
        """Add `truncate`, whose losses equal the losses as trained at the trained length."""
        baseline = losses.get((TRAINED, self.subject.trained_length))
        if baseline is not None and any(method.truncates for method in self.methods):
            losses |= {(TRUNCATE, length): baseline for length in self.plan.lengths}

    def _add_repeated(self, repeats: RepeatedTargets) -> None:
        """Losses of repeated text. Windows without a replaced token are their own control."""
        for where, nll in self.values_by_role[REPEATED].items():
            changed = np.repeat(repeats.is_changed(where[1]), repeats.keep)
            control = nll.copy()
            if changed.any():
                if where not in self.values_by_role[CONTROL]:
                    continue  # the control cell has failed
                control[changed] = self.values_by_role[CONTROL][where]
            self.repeated[where] = nll
            self.control[where] = control
        self._add_truncated(self.repeated)
        self._add_truncated(self.control)


class ModelScorer:
    """NLL in nats of the last `keep` tokens of each window under `model`, float64 (n, keep).

    `length` is the declared sequence length (it sets `factor: auto`); None: the length of the
    inputs. Windows longer than `chunk` are prefilled in chunks through the cache. The head and the
    last layer's queries run only at targets.

    With `shard`, each process of a context group reads its tokens of the windows, layer by layer in
    chunks of `chunk` tokens, and all return the same losses. All of them must be called alike.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        device: str | torch.device = "cpu",
        chunk: int = 4096,
        length: int | None = None,
        shard: ContextShard | None = None,
    ):
        self.model = model
        self.shard = shard
        self.device = torch.device(device)
        self.chunk = chunk
        self.length = length

    # no_grad and not inference_mode: tables that grow here are used again by training steps of the
    # same model.
    @torch.no_grad()
    def __call__(self, windows: np.ndarray, keep: int) -> np.ndarray:
        tokens = to_device(torch.from_numpy(windows), self.device)
        training = self.model.training
        self.model.eval()
        try:
            return self._nll(tokens, keep).double().cpu().numpy()
        finally:
            self.model.train(training)

    def _nll(self, tokens: torch.Tensor, keep: int) -> torch.Tensor:
        if self.shard is not None:
            return self._shared_nll(tokens, keep, self.shard)
        rows = tokens.shape[0]
        inputs = tokens.shape[1] - 1
        device = self.device
        cache = None
        if inputs > self.chunk:
            is_autocast = torch.is_autocast_enabled(device.type)
            half = torch.get_autocast_dtype(device.type) if is_autocast else None
            cache = self.model.make_cache(rows, inputs, dtype=half)
        # in place: losses kept apart, between the tensors of passes, would fragment the memory
        nll = torch.zeros(rows, keep, dtype=torch.float64, device=device)
        for start in range(0, inputs, self.chunk):
            stop = min(inputs, start + self.chunk)
            here = max(0, stop - max(start, inputs - keep))  # number of scored outputs
            places = TokenPositions.plain(
                stop - start,
                offset=start,
                length=self.length or inputs,
                device=device,
            )
            targets = tokens[:, stop - here + 1 : stop + 1]
            out = self.model(tokens[:, start:stop], places, targets=targets, cache=cache, keep=here)
            done = keep - (inputs - stop)
            nll[:, done - here : done] = out
        return nll

    def _shared_nll(
        self,
        tokens: torch.Tensor,
        keep: int,
        shard: ContextShard,
    ) -> torch.Tensor:
        inputs = tokens.shape[1] - 1
        device = self.device
        shard = shard.divided(inputs, self.chunk)
        places = TokenPositions.plain(
            inputs,
            length=self.length or inputs,
            device=device,
        )
        index = shard.select(torch.arange(inputs, device=device)[None])[0]
        counted = index[index >= inputs - keep]  # the last tokens of this process
        targets = shard.select(tokens[:, 1:])[:, len(index) - len(counted) :]
        nll = self.model(
            shard.select(tokens[:, :-1]),
            places,
            targets=targets,
            keep=len(counted),
            shard=shard,
        )
        whole = torch.zeros(
            len(tokens),
            keep,
            dtype=torch.float64,
            device=device,
        )
        whole[:, counted - (inputs - keep)] = nll.double()
        return shard.sum(whole)  # exact: sums of one loss and zeros


def by_shape(shapes: np.ndarray, size: int) -> list[np.ndarray]:
    """Indices of equal rows of `shapes` (n, k), at most `size` at a time, rows in ascending
    order."""
    out = []
    for shape in np.unique(shapes, axis=0):
        members = np.flatnonzero((shapes == shape).all(axis=1))
        out += [members[i : i + size] for i in range(0, len(members), size)]
    return out


def merge_ranks(parts: list[np.ndarray]) -> np.ndarray:
    """Merge the vectors of the ranks; every target belongs to exactly one rank."""
    stacked = np.stack(parts)
    owned = ~np.isnan(stacked)
    if not (owned.sum(axis=0) == 1).all():
        raise EvaluationError(
            "some targets were scored by no process or by several; run the same command again"
        )
    return np.where(owned, stacked, 0.0).sum(axis=0)


def unigram_nll(train, targets: np.ndarray, vocab_size: int) -> np.ndarray:
    """NLL in nats of every target id (n,) under add-one smoothed token counts of the store `train`,
    (n,) float64.

    BOS and EOS of a document are not counted, as they are never targets. Counting stops after
    50M tokens (whole documents, in stored order).
    """
    counts = np.ones(vocab_size)
    first = int(bool(train.has_bos))
    last = int(bool(train.has_eos))
    for document in range(train.n_documents):
        tokens = train.document(document)
        counts += np.bincount(tokens[first : len(tokens) - last], minlength=vocab_size)
        if counts.sum() >= UNIGRAM_TOKENS:
            break
    return -np.log(counts / counts.sum())[targets]


def spread(n: int, count: int) -> np.ndarray:
    """Indices of at most `count` of n windows, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(np.int64))


def per_byte(nll: np.ndarray, windows: np.ndarray, span_bytes: np.ndarray) -> np.ndarray:
    """The losses of the targets, spread evenly over the bytes of each window's targets."""
    keep = windows[:, 3]
    sums = np.add.reduceat(nll, np.cumsum(keep) - keep)
    return np.repeat(sums / span_bytes, span_bytes)


def raw_bytes(
    ids: np.ndarray,
    documents: np.ndarray,
    index: np.ndarray,
    text: EvaluationText,
    tokenizer,
) -> int | None:
    """Number of raw bytes of the targets with these token `ids`, each at this `index` of its
    document's text, without bytes that the tokenizer inserts before a text.

    None if an id has no bytes, or if the bytes of a document's tokens differ from its raw text:
    bits per byte would be wrong.
    """
    size = np.asarray(tokenizer.token_bytes, dtype=np.int64)
    for document in np.unique(documents).tolist():
        raw = int(text.store.bytes[document]) + len(tokenizer.prefix)
        if int(size[text.store.document(document)].sum()) != raw:
            return None
    if not (size[ids] > 0).all():
        return None
    first = int(text.store.has_bos) - text.shift  # index of the first token after BOS
    return int(size[ids].sum()) - len(tokenizer.prefix) * int((index == first).sum())
