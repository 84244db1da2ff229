"""A Sextant run as a model of EleutherAI's lm-evaluation-harness (0.4.13): its `hf` model around
our decoder. Requires the extra `harness`."""

import json
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports] an extra
from transformers import PreTrainedTokenizerFast

from errors import InteropError
from evaluation.methods import TRAINED, TRUNCATE, resolve_methods
from interop.export import generated
from interop.export.modeling import SextantConfig, SextantForCausalLM
from interop.export.tokenizer import control_ids, fast_tokenizer
from interop.imported_runs import run_of
from model import find_device
from run_directory.position_overrides import override
from run_directory.run import Run


class SextantLM(HFLM):
    """A trained run as a harness model, by default with the special tokens of its training.

    Args:
        run: run directory, or `hf:NAME_OR_FOLDER`.
        method: a context-extension method of configs/evaluation/methods.yaml.
        max_length: maximum number of input tokens; longer contexts are truncated on the left.
            Default: the trained length.
        checkpoint: step of the checkpoint; default: the newest.
        weights: "ema" or "last"; default: the EMA if the run has one.
        device: default: the GPU of this process if there is one.
        batch_size: rows per batch, or "auto". It is 1 if the positional scheme depends on the
            sequence length, which differs between requests.
        max_batch_size: as in the `hf` model, as are add_bos_token and prefix_token_id.
        add_bos_token: default: `data.bos`.
        prefix_token_id: default: BOS if the run was trained with it, else EOS.
        settings: overrides of the positional scheme by key, such as `model.position.window`.

    Raises:
        InteropError: an argument is unknown or does not fit the run.
    """

    def __init__(
        self,
        run: str,
        *,
        method: str = TRAINED,
        max_length: int | None = None,
        checkpoint: int | None = None,
        weights: Any = None,
        device: str | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = 64,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **settings: Any,
    ):
        accelerator = Accelerator(
            cpu=not torch.cuda.is_available(),  # otherwise the harness ignores the other processes
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=1))],
        )
        # The harness passes cuda:0 if the user sets no device.
        wanted = "auto" if device in (None, "cuda", "cuda:0") else device
        loaded = Run.open(run_of(run)).load(
            device=find_device(wanted, accelerator.local_process_index),
            checkpoint=checkpoint,
            weights=weights,
        )
        trained = loaded.settings
        if method == TRUNCATE:
            raise InteropError(
                f"method=truncate: leave it out and set max_length={trained.train_length}"
            )
        *_, chosen = resolve_methods([method], trained.train_length)
        self.overrides = [*chosen.overrides, *_overrides(settings)]
        model = loaded.model
        model.reposition(override(trained, self.overrides).model)
        max_length = max_length or trained.train_length
        if model.limit is not None and max_length > model.limit:
            raise InteropError(
                f"max_length={max_length} is beyond the positions of this run, which end after "
                f"{model.limit} tokens; decrease it or set a method that extends them"
            )
        self.run = loaded
        if prefix_token_id is None and not trained.data.bos and trained.data.eos:
            prefix_token_id = loaded.tokenizer.eos_id
        config = SextantConfig(**generated.config(model), **control_ids(loaded.tokenizer))
        decoder = SextantForCausalLM(config)
        decoder.model = model
        made, names = fast_tokenizer(loaded.tokenizer, trained.data.bos)
        super().__init__(
            pretrained=decoder,
            backend="causal",
            tokenizer=PreTrainedTokenizerFast(tokenizer_object=made, **names),
            max_length=max_length,
            batch_size=1 if model.depends_on_length else batch_size,
            max_batch_size=max_batch_size,
            add_bos_token=trained.data.bos if add_bos_token is None else add_bos_token,
            prefix_token_id=prefix_token_id,
        )
        self.accelerator = accelerator  # the base class does not set it for a model object
        self._rank = accelerator.process_index
        self._world_size = accelerator.num_processes

    def get_model_info(self) -> dict[str, Any]:
        """The entries that the harness writes to the `config` of its results."""
        return {
            "run": str(self.run.folder),
            "step": self.run.step,
            "checkpoint_hash": self.run.checkpoint_hash,
            "weights": self.run.weights,
            "overrides": self.overrides,
            "position": self.run.model.settings.positions_record(),
            "max_length": self.max_length,
            "model_num_parameters": self.run.model.parameter_count(),
        }


def _overrides(settings: dict[str, Any]) -> list[str]:
    """Overrides from keys and values of `--model_args`, which the harness has parsed."""
    unknown = [key for key in settings if not key.startswith("model.")]
    if unknown:
        raise InteropError(
            f"unknown model argument {unknown[0]!r}; overrides start with model., such as "
            "model.position.scaling.name=yarn"
        )
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    ]
