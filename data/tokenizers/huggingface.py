"""Tokenizers of Hugging Face's tokenizers library (tokenizer.json), most of them byte-level BPE."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

from data.files import sha256_of
from data.tokenizers.tokenizer_base import Tokenizer, end_ids, lossless
from data.tokenizers.tokenizer_settings import HuggingFaceSettings
from errors import DataError

# Text that every usable tokenizer represents exactly. Documents with other characters may be lossy;
# the preparation counts them.
PROBE = (
    "The 2 quick  brown\n\n\tfoxes' (jumps) = {over}: [lazy] dogs; "
    '12,345.67% @#$&*_-+|\\~`^"<>?/!\n'
)

# Regular expressions that split text into words before BPE.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SINGLE_DIGITS = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # also Qwen 2's


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, trained here or external.

    Args:
        content: the bytes of the file; for a `tokenizers.Tokenizer`, `tokenizer.to_str().encode()`.
        origin: name of the file in messages.
        bos_id: BOS, as an id or as its text; tokenizer.json does not name control symbols.
        eos_id: EOS, like `bos_id`.
        pad_id: padding, like `bos_id`.
        eos_ids: further ids that end generated text.
        add_bos: see `Tokenizer`; None: true if the file's post-processor adds `bos_id`.

    Raises:
        DataError: the library cannot read the file, or the tokenizer loses information such as
            white space.
    """

    name = "huggingface"
    file = HuggingFaceSettings.file

    def __init__(
        self,
        content: bytes,
        origin: str = "the tokenizer.json",
        *,
        bos_id: int | str | None = None,
        eos_id: int | str | None = None,
        pad_id: int | str | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
    ):
        self.content = content
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
            spec = json.loads(content)
        except Exception as error:  # the library raises no narrower class
            raise DataError(
                f"{origin} cannot be read by tokenizers {tokenizers.__version__} ({error}); use "
                "another file, or the model's tokenizer.model"
            ) from error
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        names = {i: name for name, i in vocabulary.items()}
        if not names:
            raise DataError(f"{origin} has no vocabulary; use another file")
        self.vocab_size = max(names) + 1
        self.bos_id = self._control(bos_id, names, origin)
        self.eos_id = self._control(eos_id, names, origin)
        self.pad_id = self._control(pad_id, names, origin)
        self.eos_ids = end_ids(self.eos_id, eos_ids, self.vocab_size)
        controls = json.dumps([self.bos_id, self.eos_id, self.pad_id]).encode()
        self.hash = sha256_of(b"tokenizers\0" + controls + b"\0" + content)
        self.normalization = ", ".join(_normalizers(spec))
        self._make_plain()
        self._set_pieces(spec, names)
        self.prefix = b" " if self.pieces[self._encode("a")[0]].startswith(b" ") else b""
        self._check(spec, origin)
        self._spelled = self._spelled_controls(names, origin)
        if add_bos is None:
            add_bos = self._tokenizer.encode("a").ids[:1] == [self.bos_id]
        self.add_bos = add_bos and self.bos_id is not None

    def _control(
        self,
        token: int | str | None,
        names: dict[int, str],
        origin: str,
    ) -> int | None:
        i = self._tokenizer.token_to_id(token) if isinstance(token, str) else token
        if token is not None and i not in names:
            raise DataError(f"{origin}: the control symbol {token!r} is not in the vocabulary")
        return i

    def _make_plain(self) -> None:
        """Encode whole texts, always the same way, and text that spells a control symbol as
        text."""
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        if getattr(self._tokenizer.model, "dropout", None):
            self._tokenizer.model.dropout = None
        self._tokenizer.encode_special_tokens = True

    def _set_pieces(self, spec: dict[str, Any], names: dict[int, str]) -> None:
        model = spec["model"]
        controls = {self.bos_id, self.eos_id, self.pad_id}
        added = self._tokenizer.get_added_tokens_decoder()
        # Models may declare a control symbol in another file only. The library then treats it as
        # text.
        self._tokenizer.add_special_tokens([token for i, token in added.items() if i in controls])
        controls |= {i for i, token in added.items() if token.special}
        unknown = self._tokenizer.token_to_id(model.get("unk_token") or "")
        controls.add(model.get("unk_id", unknown))
        self._controls = {i for i in controls if i is not None}
        texts = {i: token.content.encode() for i, token in added.items() if i not in controls}
        as_bytes = _piece_bytes(spec)
        self.pieces = [b""] * self.vocab_size
        for i, name in names.items():
            if i not in controls:
                self.pieces[i] = texts.get(i) or as_bytes(name)

    def _check(self, spec: dict[str, Any], origin: str) -> None:
        if not lossless(self, self._encode(PROBE), PROBE):
            steps = f" after {self.normalization}" if self.normalization else ""
            raise DataError(
                f"{origin} does not represent text exactly ({spec['model'].get('type')}{steps}), "
                "so losses in bits per byte would be wrong; use a byte-level BPE or a "
                "sentencepiece model"
            )

    def _spelled_controls(
        self,
        names: dict[int, str],
        origin: str,
    ) -> re.Pattern | None:
        """Control symbols that the model itself, without the library's search, produces from their
        text."""
        spelled = []
        for i in sorted(self._controls.intersection(names)):
            ids = self._encode(names[i]) + self._encode(f"a{names[i]} a")
            if i in ids:
                spelled.append(names[i])
        if spelled and self.prefix:
            raise DataError(
                f"{origin} encodes the text {spelled[0]!r} as a control symbol; use the model's "
                "tokenizer.model"
            )
        return re.compile("|".join(map(re.escape, spelled))) if spelled else None

    def encode(self, text):
        ids: list[int] = []
        start = 0
        if self._spelled is not None:
            for control in self._spelled.finditer(text):  # split after its first character
                ids += self._encode(text[start : control.start() + 1])
                start = control.start() + 1
        return ids + self._encode(text[start:])

    def _encode(self, text: str) -> list[int]:
        # Unlike `encode`, it releases Python's global lock and computes no offsets.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @property
    def controls(self):
        ids = {"bos_id": self.bos_id, "eos_id": self.eos_id, "pad_id": self.pad_id}
        return ids | super().controls


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as a flat list."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    members = next(value for value in part.values() if isinstance(value, list))
    return [step for member in members for step in _steps(member)]


def _normalizers(spec: dict[str, Any]) -> list[str]:
    """The normalizers that are not undone by decoding."""
    names = [step["type"] for step in _steps(spec.get("normalizer"))]
    return [name for name in names if name not in ("Prepend", "Replace", "ByteLevel")]


def _piece_bytes(spec: dict[str, Any]) -> Callable[[str], bytes]:
    """A function from strings of the vocabulary to the bytes that they represent."""
    decoder = _steps(spec.get("decoder")) or _steps(spec.get("pre_tokenizer"))
    types = {step["type"] for step in [*decoder, *_steps(spec.get("pre_tokenizer"))]}
    if "ByteLevel" in types:
        return _byte_level
    replaced = [
        (step["pattern"]["String"], step["content"])
        for step in decoder
        if step["type"] == "Replace" and "String" in step["pattern"]
    ]
    replaced += [(step["replacement"], " ") for step in decoder if step["type"] == "Metaspace"]
    has_bytes = "ByteFallback" in types

    def as_bytes(name: str) -> bytes:
        if has_bytes and (byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name)):
            return bytes([int(byte[1], 16)])
        for old, new in replaced:
            name = name.replace(old, new)
        return name.encode()

    return as_bytes


def _alphabet() -> dict[str, int]:
    """The byte of each character of byte-level vocabularies (GPT-2's `bytes_to_unicode`): printable
    Latin-1 characters are themselves, the other bytes are U+0100, U+0101, ..."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    for n, byte in enumerate(others):
        alphabet[chr(256 + n)] = byte
    return alphabet


ALPHABET = _alphabet()


def _byte_level(name: str) -> bytes:
    try:
        return bytes([ALPHABET[character] for character in name])
    except KeyError:  # an entry that is no byte-level text, hence never produced
        return b""
