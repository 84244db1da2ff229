"""Compare rotary tables and ALiBi of a model here, in transformers and in the paper's formula.

    python scripts/compare_rope.py FOLDER_OR_CONFIG.json                      a Hugging Face config
    python scripts/compare_rope.py runs/quickstart model.position.scaling.name=yarn      a run, with overrides
    python scripts/compare_rope.py configs/tiny.yaml --lengths 512 2048 --json           settings

For every length: the largest difference of frequencies (relative), amplitude, cos and sin tables, and logits
of random queries and keys, with the rotary pair and position where it occurs; for ALiBi of slopes (relative)
and biases.
The exit status is 1 if ours and transformers' differ by more than rounding: transformers computes angles in
float32, whose error grows with the angle, and is allowed 2^-21 of each angle. A difference from the paper is
reported only. Requires the package transformers; no weights are read.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from data.files import read_object
from errors import InteropError
from interop.huggingface.config import read_config
from model import ModelSettings, TokenPositions
from model.position import HeadGeometry
from model.position.schemes.alibi import AlibiSettings, alibi_slopes
from model.position.schemes.rope import Rope, RopeSettings
from run_directory.run_settings import RunSettings
from settings.load import load_settings
from settings.script import Parser, run_main
from training.logging.console import Console
from training.position_overrides import override
from training.run.directory import is_run, read_settings

POSITIONS = 2048  # at most, evenly spaced over the length
# rounding of float32: of frequencies and angles, and of everything else
RELATIVE = 2.0**-21
ABSOLUTE = 1e-5
# Our names of transformers' rope_type, and the settings that both have.
KINDS = {
    "none": ("default", ()),
    "linear": ("linear", ("factor",)),
    "dynamic": ("dynamic", ("factor",)),
    "yarn": ("yarn", ("factor", "beta_fast", "beta_slow", "truncate", "attention_factor")),
    "longrope": ("longrope", ("factor", "short_factor", "long_factor", "attention_factor")),
    "llama3": ("llama3", ("factor", "low_freq_factor", "high_freq_factor")),
}


@dataclass(frozen=True)
class ComparedModel:
    """What is compared: our settings, and the config of transformers (None if it has no such kind)."""

    settings: ModelSettings
    train_length: int
    original_length: int
    config: Any


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity at one length, and whether it is more than rounding."""

    length: int
    quantity: str
    other: str  # transformers or paper
    size: float
    dimension: int | None  # rotary pair, or head
    position: int | None
    exceeds: bool


@dataclass(frozen=True)
class RotaryTable:
    """Frequencies (R,) in radians per token, amplitude, and cos and sin (T, R), float64."""

    frequencies: np.ndarray
    amplitude: float
    cos: np.ndarray
    sin: np.ndarray


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument(
        "model", type=Path, help="config.json or its folder, run directory, or settings file"
    )
    parser.add_argument("overrides", nargs="*", help="overrides of a run or of settings")
    parser.add_argument(
        "--lengths", nargs="+", type=int, metavar="N", help="default: original and trained"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    compared = open_model(options.model, options.overrides)
    lengths = options.lengths or sorted({compared.original_length, compared.train_length})
    if min(lengths) < 2:
        raise InteropError(f"--lengths must be at least 2, got {min(lengths)}")
    measure = alibi_differences if _is(compared, AlibiSettings) else rope_differences
    found = [one for length in lengths for one in measure(compared, length)]
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    else:
        rows = [
            [
                f"{one.length:,}",
                one.quantity,
                one.other,
                f"{one.size:.2e}",
                "" if one.dimension is None else str(one.dimension),
                "" if one.position is None else f"{one.position:,}",
                "differs" if one.exceeds else "equal",
            ]
            for one in found
        ]
        columns = [
            "length",
            "quantity",
            "ours and",
            "difference",
            "dimension",
            "position",
            "result",
        ]
        Console().table(f"{options.model}", columns, rows)
    return int(any(one.exceeds for one in found if one.other == "transformers"))


def _is(compared: ComparedModel, kind: type) -> bool:
    return isinstance(compared.settings.position, kind)


def open_model(path: Path, overrides: Sequence[str]) -> ComparedModel:
    """Read a config.json, a run or a settings file. Raises InteropError for other schemes."""
    if path.suffix in (".yaml", ".yml"):
        return from_settings(load_settings(RunSettings, [str(path), *overrides]))
    if is_run(path):
        return from_settings(override(read_settings(path), overrides))
    if overrides:
        raise InteropError("overrides apply to runs and settings files only, not to a config.json")
    file = path / "config.json" if path.is_dir() else path
    config = read_object(file)
    kind = config.get("model_type")
    if kind in ("bloom", "mpt"):
        heads = next(
            (
                config[key]
                for key in ("n_heads", "n_head", "num_attention_heads")
                if config.get(key)
            ),
            None,
        )
        if not isinstance(heads, int):
            raise InteropError(f"{file} does not state the number of heads")
        settings = ModelSettings.model_validate(
            {"dim": 2 * heads, "heads": heads, "position": {"name": "alibi"}}
        )
        length = config.get("max_seq_len") or config.get("seq_length") or 2048
        return ComparedModel(settings, length, length, kind)
    shape = read_config(config, str(file))
    if not isinstance(shape.model.position, RopeSettings):
        raise InteropError(
            f"{file}: layers with different positions cannot be compared, only one RoPE"
        )
    theirs = import_module("transformers").AutoConfig.for_model(
        kind, **{key: value for key, value in config.items() if key != "model_type"}
    )
    return ComparedModel(
        shape.model, shape.train_length, shape.original_length or shape.train_length, theirs
    )


def from_settings(settings: RunSettings) -> ComparedModel:
    """Our settings, with transformers' equivalent."""
    model = settings.model
    length = settings.train_length
    position = model.position
    original = settings.original_length or length
    if isinstance(position, AlibiSettings):
        return ComparedModel(model, length, original, "bloom")
    if not isinstance(position, RopeSettings):
        raise InteropError(
            f"model.position.name={position.name} cannot be compared; only rope and alibi can"
        )
    scaling = position.scaling
    if scaling.name not in KINDS or position.resonance or getattr(scaling, "first", 0):
        return ComparedModel(model, length, original, None)
    kind, keys = KINDS[scaling.name]
    given = {key: getattr(scaling, key) for key in keys}
    if given.get("factor") == "auto":
        raise InteropError(
            "factor=auto follows the length: set model.position.scaling.factor to a number"
        )
    if kind == "longrope" and given["short_factor"] is None:
        given["short_factor"] = [1.0] * len(given["long_factor"])
    parameters = {key: value for key, value in given.items() if value is not None}
    parameters |= {
        "rope_type": kind,
        "rope_theta": position.theta,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": position.fraction,
    }
    # Llama's own default frequencies are those of whole heads.
    family = "Phi3Config" if kind == "default" and position.fraction < 1 else "LlamaConfig"
    config = getattr(import_module("transformers"), family)(
        hidden_size=model.heads * model.head_dim,
        num_attention_heads=model.heads,
        max_position_embeddings=length,
        rope_parameters=parameters,
        pad_token_id=None,
    )
    return ComparedModel(model, length, original, config)


def rope_differences(compared: ComparedModel, length: int) -> list[Difference]:
    """Our rotary table against transformers' and the paper's, for sequences of `length` tokens."""
    positions = np.unique(
        np.linspace(0, length - 1, min(length, POSITIONS)).round().astype(np.int64)
    )
    ours = our_table(compared, length, positions)
    found = []
    others: dict[str, Callable[[], RotaryTable]] = {
        "paper": lambda: paper_table(compared, length, positions)
    }
    if compared.config is not None:
        others = {"transformers": lambda: their_table(compared, length, positions)} | others
    for name, table in others.items():
        theirs = table()
        size = np.abs(theirs.frequencies / ours.frequencies - 1)
        pair = int(size.argmax())
        found.append(
            Difference(
                length,
                "frequency",
                name,
                float(size[pair]),
                pair,
                None,
                bool(size[pair] > RELATIVE),
            )
        )
        change = abs(theirs.amplitude - ours.amplitude)
        found.append(Difference(length, "amplitude", name, change, None, None, change > ABSOLUTE))
        allowed = ours.amplitude * (ABSOLUTE + RELATIVE * positions[:, None] * ours.frequencies)
        gap = np.maximum(np.abs(theirs.cos - ours.cos), np.abs(theirs.sin - ours.sin))
        exceeds = bool((gap > allowed).any())
        at = np.unravel_index((gap / allowed if exceeds else gap).argmax(), gap.shape)
        where = (int(at[1]), int(positions[at[0]]))
        found.append(Difference(length, "cos and sin", name, float(gap[at]), *where, exceeds))
        found.append(_logit_difference(length, name, ours, theirs, positions, allowed))
    return found


def _logit_difference(
    length: int,
    name: str,
    ours: RotaryTable,
    theirs: RotaryTable,
    positions: np.ndarray,
    allowed: np.ndarray,
) -> Difference:
    """Logits of a random query at the last position, and one random key at every position."""
    pairs = len(ours.frequencies)
    q, k = np.random.default_rng(0).standard_normal((2, 2, pairs))

    def logits(table: RotaryTable) -> np.ndarray:
        turned = [
            np.stack([x * table.cos - y * table.sin, y * table.cos + x * table.sin])
            for x, y in (q, k)
        ]
        return (turned[0][:, -1:] * turned[1]).sum((0, 2)) / math.sqrt(2 * pairs)

    gap = np.abs(logits(theirs) - logits(ours))
    # Each of the four products of a pair has the error of two table entries.
    bound = (
        4 * ours.amplitude * (np.abs(q).sum(0) * np.abs(k).sum(0) * (allowed + allowed[-1:])).sum(1)
    )
    bound /= math.sqrt(2 * pairs)
    at = int(gap.argmax())
    return Difference(
        length, "logit", name, float(gap[at]), None, int(positions[at]), bool((gap > bound).any())
    )


def our_table(compared: ComparedModel, length: int, positions: np.ndarray) -> RotaryTable:
    s = compared.settings
    geometry = HeadGeometry(
        s.dim, s.heads, s.head_dim, compared.train_length, compared.original_length, s.kv_heads
    )
    assert isinstance(s.position, RopeSettings)
    scheme = Rope(s.position, geometry)
    where = TokenPositions.plain(len(positions), length=length)
    where = replace(
        where, position=torch.from_numpy(positions)[None], position_end=length, unit_steps=False
    )
    frequencies, amplitude = scheme.frequencies(scheme.stretch(length))
    cos, sin = (table[0].numpy() for table in scheme.tables(where, torch.float64)[:2])
    return RotaryTable(frequencies.numpy(), amplitude, cos, sin)


@torch.no_grad()
def their_table(compared: ComparedModel, length: int, positions: np.ndarray) -> RotaryTable:
    """The rotary embedding of the model's class in transformers, in float32 as it computes it."""
    kind = compared.config.model_type
    modeling = import_module(f"transformers.models.{kind}.modeling_{kind}")
    name = next(name for name in vars(modeling) if name.endswith("RotaryEmbedding"))
    module = getattr(modeling, name)(compared.config)
    cos, sin = module(torch.zeros(1, 1), torch.from_numpy(positions)[None])
    # after the pass, which may choose them by length
    frequencies = module.inv_freq.double().numpy()
    pairs = len(frequencies)
    half = (table[0, :, :pairs].double().numpy() for table in (cos, sin))
    return RotaryTable(frequencies, float(module.attention_scaling), *half)


def paper_table(compared: ComparedModel, length: int, positions: np.ndarray) -> RotaryTable:
    frequencies, amplitude = paper_frequencies(compared, length)
    angles = positions[:, None] * np.array(frequencies)
    return RotaryTable(
        np.array(frequencies), amplitude, amplitude * np.cos(angles), amplitude * np.sin(angles)
    )


def paper_frequencies(compared: ComparedModel, length: int) -> tuple[list[float], float]:
    """Frequencies and amplitude by the formulas as published, in float64, independent of model/position."""
    position = compared.settings.position
    original = compared.original_length
    assert isinstance(position, RopeSettings)
    dims = int(compared.settings.head_dim * position.fraction) // 2 * 2
    theta = position.theta
    scaling = position.scaling
    pairs = range(dims // 2)
    plain = [theta ** (-2 * k / dims) for k in pairs]  # Su et al. 2021, eq. 15
    get: dict[str, Any] = scaling.model_dump()
    s = get.get("factor", 1.0)
    match scaling.name:
        case "none":
            return plain, 1.0
        case "linear":  # Chen et al. 2023, eq. 3
            return [f / s for f in plain], 1.0
        case "dynamic":  # emozilla 2023: NTK-aware with the factor f·L/L0 − (f − 1)
            now = s * max(length, original) / original - (s - 1)
            base = theta * now ** (dims / (dims - 2))
            return [base ** (-2 * k / dims) for k in pairs], 1.0
        # Peng et al. 2023, eq. 17-18 and 22: the ramp is linear in the number of rotations
        case "yarn":
            found = []
            for f in plain:
                turns = original * f / (2 * math.pi)
                ramp = (turns - get["beta_slow"]) / (get["beta_fast"] - get["beta_slow"])
                keep = min(max(ramp, 0.0), 1.0)
                found.append((1 - keep) * f / s + keep * f)
            return found, 0.1 * math.log(s) + 1
        case "longrope":  # Ding et al. 2024; the amplitude is that of the released Phi-3 code
            divisors = (
                get["long_factor"]
                if length > original
                else get["short_factor"] or [1.0] * len(plain)
            )
            amplitude = math.sqrt(1 + math.log(s) / math.log(original)) if s > 1 else 1.0
            return [f / d for f, d in zip(plain, divisors, strict=True)], amplitude
        case "llama3":  # Meta's released code of Llama 3.1
            low = original / get["low_freq_factor"]
            high = original / get["high_freq_factor"]
            found = []
            for f in plain:
                wavelength = 2 * math.pi / f
                smooth = (original / wavelength - get["low_freq_factor"]) / (
                    get["high_freq_factor"] - get["low_freq_factor"]
                )
                blended = (1 - smooth) * f / s + smooth * f
                found.append(f if wavelength < high else f / s if wavelength > low else blended)
            return found, 1.0
    raise InteropError(
        f"no formula is known for scaling {scaling.name!r}; known: {', '.join(KINDS)}"
    )


@torch.no_grad()
def alibi_differences(compared: ComparedModel, length: int) -> list[Difference]:
    """Our slopes and biases (distance times slope) against those of Bloom or MPT and the paper's formula."""
    settings = compared.settings.position
    assert isinstance(settings, AlibiSettings)
    heads = compared.settings.heads
    ours = (
        alibi_slopes(heads) if settings.slopes is None else torch.tensor(settings.slopes).double()
    ).numpy()
    bloom, mpt = (
        import_module(f"transformers.models.{one}.modeling_{one}") for one in ("bloom", "mpt")
    )
    tensors = {
        "bloom": bloom.build_alibi_tensor(torch.ones(1, length), heads, torch.float32)[:, 0],
        "mpt": mpt.build_mpt_alibi_tensor(heads, length)[:, 0],
    }
    biases = {"transformers": tensors[compared.config].double().numpy()}
    biases["paper"] = np.array(paper_slopes(heads))[:, None] * np.arange(length)
    found = []
    for name, bias in biases.items():
        # A bias counts positions from either end; softmax sees differences only.
        penalty = bias - bias[:, :1]
        wanted = ours[:, None] * np.arange(length)
        slope = np.abs(penalty[:, 1] / ours - 1)
        head = int(slope.argmax())
        exceeds = bool(slope[head] > RELATIVE * length)
        found.append(Difference(length, "slope", name, float(slope[head]), head, None, exceeds))
        gap = np.abs(penalty - wanted)
        allowed = ABSOLUTE + RELATIVE * ours[:, None] * length
        at = np.unravel_index(gap.argmax(), gap.shape)
        found.append(
            Difference(
                length,
                "bias",
                name,
                float(gap[at]),
                int(at[0]),
                int(at[1]),
                bool((gap > allowed).any()),
            )
        )
    return found


def paper_slopes(heads: int) -> list[float]:
    """Press et al. 2021: 2^(−8/n), 2^(−16/n), ...; for other numbers of heads as in their released code."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return paper_slopes(below) + paper_slopes(2 * below)[0::2][: heads - below]


if __name__ == "__main__":
    run_main(main)
