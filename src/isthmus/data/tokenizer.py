"""From text to tokens: its bytes, or what a tokenizer of transformers makes of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isthmus.core.types import UserError, first_line

OneText = npt.NDArray[np.integer[Any]]  # [num_tokens]


class Bytes:
    """A tokenizer to the UTF-8 bytes of a text, a zero after them.

    Attributes:
        vocab_size: one more than the largest token.
        dtype: the smallest unsigned integers that hold all tokens.
        fingerprint: a text that differs where a text has other tokens.
    """

    vocab_size = 256
    dtype = np.dtype(np.uint8)
    fingerprint = "bytes"

    def encode(self, texts: list[str]) -> list[OneText]:
        """Return the bytes of each text and a zero."""
        return [np.frombuffer(text.encode("utf-8", "replace") + b"\0", self.dtype) for text in texts]

    def save(self, folder: Path) -> None:
        """Write what transformers' `AutoTokenizer.from_pretrained(folder)` loads: it gives a text the same tokens."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        printable = {*range(33, 127), *range(161, 173), *range(174, 256)}  # the others have signs of their own (GPT-2)
        signs = iter(range(256, 512))
        vocabulary = {chr(byte if byte in printable else next(signs)): byte for byte in range(256)}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        end = tokenizer.id_to_token(0)
        # split_special_tokens: the letter that stands for the end is an ordinary one in a text
        options = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
        fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
            tokenizer_object=tokenizer, eos_token=end, pad_token=end, **options
        )
        fast.save_pretrained(folder)


class Pretrained:
    """A tokenizer of transformers. A text ends with its end-of-sequence token, where it has one.

    Never runs code from the folder or the Hub.

    Args:
        name: a folder, or a name on the Hub.
    """

    def __init__(self, name: str) -> None:
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except Exception as error:  # broken files raise whatever their parser raises
            raise UserError(
                f"data.tokenizer: {name!r} cannot be loaded ({first_line(error)}): "
                "give a folder with a tokenizer, its name on the Hub, or bytes"
            ) from error
        self._tokenizer = tokenizer
        self._end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        vocabulary = tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1  # some leave numbers out
        if self.vocab_size == 0:
            raise UserError(f"data.tokenizer: {name!r} has no vocabulary; give a folder with a tokenizer, or bytes")
        self.dtype = np.min_scalar_type(self.vocab_size - 1)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else f"{name} {sorted(vocabulary.items())}"
        self.fingerprint = hashlib.sha256(f"{self._end} {rules}".encode()).hexdigest()[:16]

    def encode(self, texts: list[str]) -> list[OneText]:
        """Return the tokens of each text and the token that ends one."""
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.array([*tokens, *self._end], self.dtype) for tokens in encoded["input_ids"]]

    def save(self, folder: Path) -> None:
        """Write the tokenizer to a folder, for `AutoTokenizer`."""
        self._tokenizer.save_pretrained(folder)


Tokenizer = Bytes | Pretrained


def load_tokenizer(name: str) -> Tokenizer:
    """Return the tokenizer of a folder, of a name on the Hub, or "bytes"."""
    return Bytes() if name == "bytes" else Pretrained(name)
