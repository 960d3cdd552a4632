"""Train or load a Hugging Face tokenizer, and encode text so that it can never become a control token.

The one end-of-document id after each document is added when rows are packed, never here, whatever the
tokenizer file would add by itself.
"""

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zgcm_data.records import CorpusError

END_OF_TEXT = "<|endoftext|>"


class Tokenizer:
    """A tokenizer file bound to its digest.

    Args:
        path: A Hugging Face ``tokenizer.json``.
        eos: The end-of-document token; ``None`` for decoding only.

    Raises:
        ValueError: If the file is not a tokenizer or does not know ``eos``.
    """

    def __init__(self, path: Path, eos: str | None = END_OF_TEXT) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer {path} does not exist; check the path")
        try:
            self._tokenizer: Any = library().Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"{path} is not a tokenizer.json ({error}); give a Hugging Face tokenizer file"
            ) from error
        eos_id = -1 if eos is None else self._tokenizer.token_to_id(eos)
        if eos_id is None:
            raise ValueError(
                f"tokenizer {path} has no token {eos!r}; set tokenizer.eos to its end-of-document token"
            )
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control = control_ids(self._tokenizer) | ({int(eos_id)} if eos is not None else set())
        self.eos_id = int(eos_id)
        self.vocab_size = vocabulary(self._tokenizer)
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode documents over all cores, without any special token.

        Args:
            texts: Documents.

        Returns:
            One uint32 array per document.

        Raises:
            ValueError: If a text became a control token all the same.
        """
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        result = [np.array(item.ids, dtype=np.uint32) for item in encodings]
        control = np.array(sorted(self._control), dtype=np.uint32)
        for text, ids in zip(texts, result, strict=True):
            if np.isin(ids, control).any():
                raise ValueError(f"the tokenizer turns text into a control token: {text[:60]!r}")
        return result

    def control(self, token: str) -> int:
        """Return the id of a control token.

        Args:
            token: Its spelling.

        Returns:
            The id.

        Raises:
            ValueError: If the tokenizer has no such token.
        """
        number = self._tokenizer.token_to_id(token)
        if number is None:
            raise ValueError(
                f"the tokenizer has no token {token!r}; use one that has, or set tokenizer.fim_rate = 0"
            )
        return int(number)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, control tokens spelled out.

        Args:
            ids: Token ids.

        Returns:
            The text.
        """
        text: str = self._tokenizer.decode([int(item) for item in ids], skip_special_tokens=False)
        return text


def library() -> Any:
    """Return the ``tokenizers`` module.

    Raises:
        ImportError: If it is not installed; names the extra.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        import tokenizers
    except (ImportError, OSError) as error:
        raise ImportError('tokenizers is needed to prepare data: pip install "zgcm-data[prepare]"') from error
    return tokenizers


def control_ids(tokenizer: Any) -> set[int]:
    """Return the ids of the special tokens of a tokenizer."""
    return {int(number) for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def vocabulary(tokenizer: Any) -> int:
    """Return one more than the largest id, which may exceed the number of entries."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def train_tokenizer(
    texts: Iterable[str], path: Path, *, vocab_size: int, eos: str = END_OF_TEXT, specials: Sequence[str] = ()
) -> Tokenizer:
    """Train a byte-level BPE tokenizer and write it to ``path``, atomically.

    Every byte has an entry, so every text can be encoded and decoded without loss. The result depends on
    the texts and their order only.

    Args:
        texts: Training documents.
        path: Where ``tokenizer.json`` goes.
        vocab_size: Entries, the end-of-document token included.
        eos: That token; it gets id 0.
        specials: Further control tokens.

    Returns:
        The tokenizer.

    Raises:
        CorpusError: If the texts hold too little for so many entries.
    """
    parts = library()
    tokenizer = parts.Tokenizer(parts.models.BPE())
    tokenizer.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = parts.decoders.ByteLevel()
    trainer = parts.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos, *specials],
        initial_alphabet=sorted(parts.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.replace(eos, " ") for text in texts), trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise CorpusError(
            f"the corpus gives a tokenizer of {found} entries, not {vocab_size}; add text or lower tokenizer.vocab_size"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    tokenizer.save(str(temporary))
    temporary.replace(path)
    return Tokenizer(path, eos)
