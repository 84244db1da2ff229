"""Continuations of prompts, generated in batches with streamed text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data.task_data import GeneratedData
from data.tokenizers import Tokenizer
from generation.decoding import Generation
from generation.sampling import SamplingParams
from generation.text_stream import TextStream
from model import ModelError, Transformer


@dataclass
class Sample:
    """One continuation of a prompt: the request, and the tokens and text generated so far.

    Attributes:
        ids: token ids of the prompt.
        index: index of the prompt, from 0.
        finish: None until the sample is complete, then "eos", "length", "stop" or "interrupted".
    """

    prompt: str
    ids: list[int]
    index: int
    seed: int
    stream: TextStream
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, token: int, finish: str | None) -> str:
        """Append a token and return the text that became final.

        Args:
            finish: reason why generation finishes with this token, or None. A stop string also ends
                the sample.
        """
        self.tokens.append(token)
        text = self.stream.push(token)
        if self.stream.stopped and finish in (None, "length"):
            finish = "stop"
        if finish:
            text += self.stream.end()
            self.finish = finish
        self.text += text
        return text

    def interrupt(self) -> None:
        """Mark an incomplete sample with tokens as interrupted."""
        if self.tokens and not self.finish:
            self.text += self.stream.end()
            self.finish = "interrupted"


def make_samples(
    prompts: Sequence[str],
    tokenizer: Tokenizer,
    *,
    bos: bool,
    count: int,
    seed: int,
    stops: Sequence[str],
) -> list[Sample]:
    """`count` samples of each prompt, with the seeds `seed`, `seed` + 1, ...

    Args:
        bos: start each prompt with the begin-of-document token, if the tokenizer has one.
    """
    prefix = [tokenizer.bos_id] if bos and tokenizer.bos_id is not None else []
    samples = []
    for index, prompt in enumerate(prompts):
        ids = prefix + tokenizer.encode(prompt)
        if not ids:
            raise ModelError(
                "an empty prompt requires a model trained with a begin-of-document token"
            )
        for i in range(count):
            stream = TextStream(tokenizer, stops, begins=not prompt)
            samples.append(Sample(prompt, ids, index, seed + i, stream))
    return samples


def generate_samples(
    model: Transformer,
    tokenizer: Tokenizer,
    samples: Sequence[Sample],
    tokens: int,
    sampling: SamplingParams,
    *,
    items: GeneratedData | None = None,
    batch_size: int = 8,
    cache: bool = True,
    is_compiled: bool = False,
) -> Iterator[Sample]:
    """Generate samples in batches; yields a sample whenever its text grows or the sample is
    complete.

    Args:
        tokens: see `Generation`.
        items: the training data of a model trained on task items, which may define positions.
        cache, is_compiled: see `Generation`.
    """
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        prompts = [sample.ids for sample in batch]
        positions = None
        if items is not None and items.source.task.has_positions:
            positions = [items.positions(ids, tokens) for ids in prompts]
        generation = Generation(
            model,
            prompts,
            tokens,
            sampling,
            seeds=[sample.seed for sample in batch],
            eos_ids=tokenizer.eos_ids,
            vocab_size=tokenizer.vocab_size,
            cache=cache,
            is_compiled=is_compiled,
            positions=positions,
        )
        for new in generation:
            for row, (sample, token) in enumerate(zip(batch, new, strict=True)):
                if token is None:
                    continue
                text = sample.add(token, generation.finish[row])
                if sample.finish == "stop":
                    generation.stop(row)
                if text or sample.finish:
                    yield sample
