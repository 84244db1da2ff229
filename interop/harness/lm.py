"""A Sextant run as a model of lm-evaluation-harness (0.4.13), equal to its `hf` model on the same
weights."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from data.hashing import canonical_hash
from errors import InteropError
from evaluation.scoring.methods import TRUNCATE, builtin_methods, resolve_methods
from generation.samples import Sample, generate_samples
from generation.sampling import SamplingParams
from generation.text_stream import TextStream
from interop.harness.arguments import dtype_named, join_processes, overrides_of, positive
from interop.runs import run_of
from model import TokenPositions
from run_directory.position_overrides import override
from run_directory.run import LoadedRun, Run

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

log = logging.getLogger("lm_eval.sextant")
AUTO_TOKENS = 16_384  # tokens per batch with batch_size=auto
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Generation arguments of transformers that some tasks set to the only value that we support.
_PLAIN = {"num_beams": (1,), "use_cache": (True, False)}

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, context, continuation


class SextantLM(TemplateLM):
    """A trained run as a harness model.

    Args:
        run: run directory, `hf:NAME_OR_FOLDER`, or a run loaded with `sextant.load`; then
            `overrides`, `method`, `checkpoint`, `weights`, `device` and `dtype` must not be set.
        overrides: test-time changes of the positional scheme, e.g.
            `model.position.scaling.name=yarn`.
        method: a context-extension method of configs/evaluation/methods.yaml, applied before
            `overrides`.
        max_length: maximum number of input tokens; longer contexts are truncated on the left.
            Default: the trained length.
        max_gen_toks: new tokens of a generation whose task does not set it.
        checkpoint: step of the checkpoint; default: the newest.
        weights: "ema" or "last"; default: the EMA if there is one.
        device: default: the GPU of this process if there is one.
        dtype: name of the dtype of the weights, e.g. "bfloat16".
        batch_size: rows per batch, or "auto": as many as have 16,384 tokens together.
        max_batch_size: maximum number of rows with "auto".
        add_bos_token: start each text with BOS. Default: as in training (`data.bos`).
        prefix_token_id: the token before a text without context. Default: BOS if the run was
            trained with it, else EOS.
        seed: seed of sampled generations. A generation depends on its prompt and on how often the
            prompt occurred before, not on the batch.
        settings: more overrides by key, for `--model_args model.position.window=256`.

    With a scheme that depends on the sequence length, the declared length of a request is the
    number of its own inputs (of a generation: with the new tokens).

    Raises:
        InteropError: an unknown argument, or one that does not fit the run.
    """

    def __init__(
        self,
        run: str | LoadedRun,
        *overrides: str,
        method: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        checkpoint: int | None = None,
        weights: Any = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = 64,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        seed: int = 0,
        **settings: Any,
    ):
        super().__init__()
        self._ranks = join_processes()
        self._rank = self._ranks.rank
        self._world_size = self._ranks.world
        changes = [*overrides, *overrides_of(settings)]
        if isinstance(run, LoadedRun):
            if changes or any(x is not None for x in (method, checkpoint, weights, device, dtype)):
                raise InteropError(
                    "overrides, method, checkpoint, weights, device and dtype apply when a run is "
                    "loaded; pass them to sextant.load, or pass the run directory"
                )
            loaded = run
        else:
            # The harness passes cuda:0 where the user gives no device.
            wanted = "auto" if device in (None, "cuda", "cuda:0") else str(device)
            loaded = Run.open(run_of(run)).load(
                device=self._ranks.device(wanted),
                dtype=dtype_named(dtype),
                checkpoint=checkpoint,
                weights=weights,
            )
            if method is not None:
                length = loaded.settings.train_length
                *_, chosen = resolve_methods([method], builtin_methods(), length)
                changes = [*chosen.overrides, *changes]
            changed = override(loaded.settings, changes)
            loaded.model.reposition(changed.model)
            loaded = replace(loaded, settings=changed)
        self.run = loaded
        self.overrides = changes
        self.model = loaded.model
        self._tokenizer = loaded.tokenizer
        trained = loaded.settings.train_length
        if method == TRUNCATE and max_length not in (None, trained):
            raise InteropError(
                f"method=truncate truncates to the trained length of {trained} tokens: remove "
                "max_length"
            )
        self.max_length = positive("max_length", trained if max_length is None else max_length)
        limit = self.model.limit
        if limit is not None and self.max_length > limit:
            raise InteropError(
                f"max_length={self.max_length} is beyond the positions of this run, which end "
                f"after {limit} tokens; decrease it or set a method that extends them"
            )
        self.max_gen_toks = positive("max_gen_toks", max_gen_toks)
        self.seed = seed
        self.batch_size = batch_size if batch_size == "auto" else positive("batch_size", batch_size)
        self.max_batch_size = max_batch_size or 64
        self._add_bos, self._prefix = self._special_tokens(add_bos_token, prefix_token_id)

    def _special_tokens(self, add_bos: bool | None, prefix: int | None) -> tuple[bool, int | None]:
        """Whether texts start with BOS, and the token before a text without context."""
        tokenizer = self._tokenizer
        data = self.run.settings.data
        if add_bos and tokenizer.bos_id is None:
            raise InteropError("add_bos_token=true, but the tokenizer of this run has no BOS token")
        if prefix is not None and not 0 <= prefix < self.model.vocab_size:
            raise InteropError(
                f"prefix_token_id={prefix} is outside the vocabulary of {self.model.vocab_size} "
                f"tokens"
            )
        trained_with = [tokenizer.bos_id] * data.bos + [tokenizer.eos_id] * data.eos
        if prefix is None:
            prefix = next((token for token in trained_with if token is not None), None)
        if add_bos is None:
            add_bos = data.bos and tokenizer.bos_id is not None
        return add_bos, prefix

    # What the harness reads

    @property
    def device(self) -> torch.device:
        return self.model.embed.weight.device

    @property
    def eot_token_id(self) -> int | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        if self._prefix is None:
            raise InteropError(
                "a text without context needs a token before it, but this run was trained without "
                "BOS and EOS; set prefix_token_id"
            )
        return self._prefix

    def all_gather(self, tensor: Tensor) -> Tensor:
        parts = [part.reshape(-1) for part in self._ranks.collect(tensor.cpu())]
        return torch.cat(parts).to(tensor.device)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        objects = self._ranks.collect(obj)
        return objects if self.rank == dst else None

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes to the `config` of its results."""
        settings = self.run.settings
        return {
            "run": str(self.run.folder),
            "step": self.run.step,
            "checkpoint_hash": self.run.checkpoint_hash,
            "weights": self.run.weights,
            "overrides": self.overrides,
            "position": settings.model.positions_record(),
            "train_length": settings.train_length,
            "max_length": self.max_length,
            "model_num_parameters": self.model.parameter_count(),
            "model_dtype": str(self.model.embed.weight.dtype),
        }

    # Text to tokens

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:  # pyright: ignore
        bos = self._add_bos if add_special_tokens is None else add_special_tokens
        prefix = [self._tokenizer.bos_id] if bos and self._tokenizer.bos_id is not None else []
        return prefix + self._tokenizer.encode(string)

    # Likelihoods

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding generates it) of every continuation."""
        for texts, _, continuation in requests:
            if not continuation or len(continuation) > self.max_length:
                raise InteropError(
                    f"the continuation {texts and texts[1]!r} has {len(continuation)} tokens "
                    f"after its context, but 1 to max_length={self.max_length} can be scored"
                )
        # A context of spaces alone belongs to the continuation.
        requests = [
            (texts, context or [self.prefix_token_id], last) for texts, context, last in requests
        ]
        truncated = sum(len(a) + len(b) > self.max_length + 1 for _, a, b in requests)
        if truncated:
            log.warning(
                "%d of %d contexts are truncated on the left to %d tokens",
                truncated,
                len(requests),
                self.max_length,
            )
        # Continuations that share all inputs, such as answers of one token, share a forward pass.
        sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            sharing[tuple((context + continuation)[-(self.max_length + 1) :][:-1])].append(index)
        inputs = list(sharing)
        members = list(sharing.values())
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        keeps = [max(len(requests[j][2]) for j in indices) for indices in members]
        with self._progress(len(requests), "loglikelihood", disable_tqdm) as bar:
            for i, logits in self._logits(inputs, keeps):
                for j in members[i]:
                    texts, _, continuation = requests[j]
                    answers[j] = _likelihood(logits[-len(continuation) :], continuation)
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, answers[j])
                bar.update(len(members[i]))
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-likelihood of whole texts, in windows of `max_length` inputs that predict each token
        once.

        As in the `hf` model, a leading BOS is itself predicted, from the prefix token.
        """
        owners = []
        inputs = []
        targets = []
        for index, (string,) in enumerate(request.args for request in requests):
            ids = self.tok_encode(string)
            for window in get_rolling_token_windows(
                ids, self.prefix_token_id, self.max_length, context_len=1
            ):
                context, predicted = make_disjoint_window(window)
                owners.append(index)
                inputs.append((context + predicted)[:-1])
                targets.append(predicted)
        totals = [0.0] * len(requests)
        with self._progress(len(inputs), "loglikelihood_rolling", disable_tqdm) as bar:
            for i, logits in self._logits(inputs, list(map(len, targets))):
                totals[owners[i]] += _likelihood(logits, targets[i])[0]
                bar.update()
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    @torch.no_grad()
    def _logits(
        self, rows: Sequence[Sequence[int]], keeps: Sequence[int]
    ) -> Iterator[tuple[int, Tensor]]:
        """The index of each row, in any order, and the logits (keep, V) after its last tokens.

        No token attends to the padding after it. Rows of different lengths are kept apart where a
        scheme depends on the length.
        """
        for batch in self._batches(list(map(len, rows)), self.model.depends_on_length):
            width = max(len(rows[i]) for i in batch)
            first = min(len(rows[i]) - keeps[i] for i in batch)
            padded = [[*rows[i], *[0] * (width - len(rows[i]))] for i in batch]
            positions = TokenPositions.plain(width, device=self.device)
            tokens = torch.tensor(padded, device=self.device)
            logits = self.model(tokens, positions, keep=width - first)
            for i, row_logits in zip(batch, logits, strict=True):
                end = len(rows[i]) - first
                yield i, row_logits[end - keeps[i] : end]

    # Text

    def generate_until(
        self,
        requests: list[Instance],
        disable_tqdm: bool = False,
    ) -> list[str]:
        """Continuations of contexts, up to EOS, a stop string or `max_gen_toks` tokens."""
        occurred: Counter[str] = Counter()
        prompts = []
        groups = defaultdict(list)
        for index, request in enumerate(requests):
            arguments: Any = request.args
            context, settings = arguments
            prompts.append((context, self.tok_encode(context), occurred[context]))
            occurred[context] += 1
            groups[canonical_hash(settings)].append(index)
        texts = [""] * len(requests)
        with self._progress(len(requests), "generate_until", disable_tqdm) as bar:
            for members in groups.values():
                arguments = requests[members[0]].args[1]
                for batch in self._batches([len(prompts[i][1]) for i in members], equal=False):
                    indices = [members[i] for i in batch]
                    generated = self._generate([prompts[i] for i in indices], arguments)
                    for i, text in zip(indices, generated, strict=True):
                        texts[i] = text
                        self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update(len(batch))
        return texts

    def _generate(
        self, prompts: Sequence[tuple[str, list[int], int]], arguments: dict
    ) -> list[str]:
        """The texts generated after prompts (text, ids, number of earlier occurrences), as one
        batch."""
        stops, tokens, sampling = self._generation_settings(arguments)
        room = self.max_length - tokens
        if room < 1:
            raise InteropError(
                f"max_gen_toks={tokens} leaves no room for a prompt within "
                f"max_length={self.max_length}; decrease max_gen_toks (--gen_kwargs "
                "max_gen_toks=N) or increase max_length"
            )
        samples = []
        for index, (context, ids, occurrence) in enumerate(prompts):
            seed = int(canonical_hash([self.seed, context, occurrence])[:12], 16)
            stream = TextStream(self._tokenizer, stops)
            ids = ids[-room:] or [self.prefix_token_id]
            samples.append(Sample(context, ids, index, seed, stream))
        for _ in generate_samples(self.model, self._tokenizer, samples, tokens, sampling):
            pass
        return [
            postprocess_generated_text(self._tokenizer.decode(sample.tokens), stops, None)
            for sample in samples
        ]

    def _generation_settings(self, arguments: dict) -> tuple[list[str], int, SamplingParams]:
        """Stop strings, number of new tokens and sampling parameters of a task's generation
        arguments."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        stops = [stop for stop in given.pop("until") if stop]
        tokens = given.pop("max_gen_toks")
        sample = given.pop("do_sample", False)
        for key, accepted in _PLAIN.items():
            if given.pop(key, accepted[0]) not in accepted:
                raise InteropError(f"generation argument {key}={arguments[key]} is not supported")
        chosen = {key: given.pop(key) for key in SAMPLING if given.get(key) is not None}
        if given.keys() - set(SAMPLING):
            raise InteropError(
                f"unknown generation argument {min(given)}; supported: until, max_gen_toks, "
                f"do_sample, {', '.join(SAMPLING)}"
            )
        if sample and not chosen.get("temperature"):
            raise InteropError("do_sample=true requires a temperature above 0")
        if not sample:
            chosen["temperature"] = 0.0
        return stops, tokens, SamplingParams(**chosen)

    # Batches

    def _batches(self, lengths: Sequence[int], equal: bool) -> Iterator[list[int]]:
        """Indices in batches, longest first; with `equal`, the rows of a batch have the same
        length."""
        batch: list[int] = []
        for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            if batch:
                is_full = len(batch) == self._rows(lengths[batch[0]])
                if is_full or (equal and lengths[i] != lengths[batch[0]]):
                    yield batch
                    batch = []
            batch.append(i)
        if batch:
            yield batch

    def _rows(self, longest: int) -> int:
        """The number of rows of a batch whose longest row has this many tokens."""
        if isinstance(self.batch_size, int):
            return self.batch_size
        return max(1, min(self.max_batch_size, AUTO_TOKENS // max(1, longest)))

    def _progress(self, total: int, what: str, disabled: bool) -> tqdm:
        return tqdm(
            total=total, desc=f"Running {what} requests", disable=disabled or self.rank != 0
        )


def _likelihood(logits: Tensor, tokens: Sequence[int]) -> tuple[float, bool]:
    """Log-likelihood of `tokens` under their logits (n, V), and whether each is the most likely
    one."""
    wanted = torch.tensor(tokens, device=logits.device)
    log_p = logits.float().log_softmax(-1).gather(1, wanted[:, None])
    return float(log_p.double().sum()), bool((logits.argmax(-1) == wanted).all())
