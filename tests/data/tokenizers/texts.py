"""Texts that tokenizers may lose or change."""

from hypothesis import strategies as st

HARD = [
    "",
    " ",
    "plain",
    " leading and trailing  ",
    "        eight spaces",
    "\ttabs\t\tand\nnewlines\r\n\r\n",
    "天下大势，分久必合，合久必分。",
    "emoji 😀👩‍👩‍👧 and é combining",
    "\u2581",
    "a \u2581 literal \u2581\u2581 underline",
    "NUL \0 inside \0",
    "reserved \u2047 \u2585 \ufffd \ufeff \u0120",
    "<|begin_of_text|><|end_of_text|><s></s><unk><pad><0x0A>",
    "a<|end_of_text|>b <|end_of_text|>",
    "0123456789 ١٢٣ ²",
    "\x00\x01\x7f",
    "I'm, YOU'LL, 'tis",
]
ANY = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
WHITESPACE = st.text("ab 1.'\n\r\t天é/\u2581", max_size=80)
