"""A ZGCM decoder as a language model; the only file that imports ``zgcm_model`` and ``tokenizers``.

The decoder may be in the middle of its training: evaluation restores the mode of every submodule, draws no
random number and leaves no gradient behind.
"""

import copy
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn
from torch.nn import functional

from zgcm_eval.adapters.scoring import LogitScorer, evaluation_mode, logits_in_chunks, plain_ids, whole

END_OF_DOCUMENT = "<|endoftext|>"
"""Name of the end-of-document token in the tokenizers of the data package."""


class ZgcmLanguageModel(LogitScorer):
    """Rates and continues text with a ``zgcm_model.Decoder``.

    Args:
        decoder: maps token ids [B, T] to hidden states [B, T, D]; its ``lm_head.weight`` is [V, D].
        tokenizer: the path of a ``tokenizer.json``, a ``tokenizers.Tokenizer``, or anything with
            ``encode(text)`` and ``decode(ids)`` that adds no token.
        eos_id: the end-of-document id; None asks the tokenizer for it.
        max_length: longest input in tokens; None takes the decoder's ``config.max_positions``.
        chunk: positions whose logits are held at once.
        length_multiple: inputs are padded at the right to a multiple of this; a decoder with sequence
            parallelism needs the number of its tensor-parallel ranks.

    Raises:
        FileNotFoundError: there is no such tokenizer file.
        ImportError: the tokenizers package is missing; the message names the extra.
        ValueError: neither ``eos_id`` nor the tokenizer says which id ends a document.
    """

    def __init__(
        self,
        decoder: nn.Module,
        tokenizer: Any,
        *,
        eos_id: int | None = None,
        max_length: int | None = None,
        chunk: int = 512,
        length_multiple: int = 1,
    ) -> None:
        if isinstance(tokenizer, str | Path):
            tokenizer = _read_tokenizer(Path(tokenizer))
        end = _end_of_document_id(tokenizer) if eos_id is None else eos_id
        super().__init__(decoder, end, _longest_input(decoder) if max_length is None else max_length)
        self._tokenizer = _reading_no_special_token(tokenizer)
        self._chunk = chunk
        self._length_multiple = length_multiple

    def _logits(self, token_ids: Int[Tensor, "B T"]) -> Iterator[tuple[Tensor, Tensor]]:
        token_ids = token_ids.to(self.device)
        inputs = token_ids[:, :-1]
        padding = -inputs.shape[1] % self._length_multiple
        padded = functional.pad(inputs, (0, padding), value=self._prefix_id)
        hidden = self._model(padded)[:, : inputs.shape[1]]
        return logits_in_chunks(hidden, self._head_weight(), token_ids[:, 1:], self._chunk)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue each prompt with its most probable tokens.

        Args:
            prompts: token ids, with the prefix id in front.
            max_new_tokens: upper bound of a continuation's length.

        Returns:
            The new ids of each prompt, ended before the end-of-document id.

        Raises:
            ImportError: zgcm-model is missing; a decoder of another library can be rated but not continued.
        """
        if not prompts:
            return []
        library = _import("zgcm_model")
        token_ids, padding = library.left_pad(prompts, self._prefix_id)
        with evaluation_mode(self._model):
            rows = library.generate(
                self._model,
                token_ids.to(self.device),
                max_new_tokens,
                stop_ids=(self._prefix_id,),
                padding=padding.to(self.device),
            )
        return [self._until_end(row) for row in rows[:, token_ids.shape[1] :].tolist()]

    def _until_end(self, token_ids: list[int]) -> list[int]:
        """Leave out the end of document and what a longer row's generation appended to it."""
        return token_ids[: token_ids.index(self._prefix_id)] if self._prefix_id in token_ids else token_ids

    def _head_weight(self) -> Tensor:
        """The rows of the head that are no padding of the vocabulary."""
        weight = whole(self._model.lm_head.weight)
        return weight[: getattr(self._model.config, "real_vocab_size", len(weight))]

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids and add none."""
        return plain_ids(self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids back into text."""
        return str(self._tokenizer.decode(list(token_ids)))


def load_zgcm(folder: Path | str, tokenizer: Path | str, *, device: str = "cpu") -> ZgcmLanguageModel:
    """Load a saved decoder and its tokenizer.

    Args:
        folder: what ``zgcm_model.save_pretrained`` wrote.
        tokenizer: a ``tokenizer.json``.
        device: where the decoder goes.

    Returns:
        The language model.

    Raises:
        FileNotFoundError: the folder or the file is missing.
        ImportError: zgcm-model or tokenizers is not installed; the message names the extra.
    """
    if not Path(folder).is_dir():
        raise FileNotFoundError(f"{folder} is missing; give the folder of a saved model")
    decoder = _import("zgcm_model").load_pretrained(Path(folder)).to(device)
    return ZgcmLanguageModel(decoder, tokenizer)


def _read_tokenizer(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give the tokenizer.json that the model was trained with")
    return _import("tokenizers").Tokenizer.from_file(str(path))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise ImportError(f'{name} is needed to load a ZGCM model: pip install "zgcm-eval[zgcm]"') from error


def _reading_no_special_token(tokenizer: Any) -> Any:
    """Copy a ``tokenizers.Tokenizer`` so that "<|endoftext|>" written in a text is text, not an end."""
    if not isinstance(getattr(tokenizer, "encode_special_tokens", None), bool):
        return tokenizer
    plain = copy.deepcopy(tokenizer)
    plain.encode_special_tokens = True
    plain.no_truncation()
    plain.no_padding()
    return plain


def _longest_input(decoder: Any) -> int:
    return int(decoder.config.max_positions)


def _end_of_document_id(tokenizer: Any) -> int:
    token_id = getattr(tokenizer, "eos_id", None)
    if token_id is None and hasattr(tokenizer, "token_to_id"):
        token_id = tokenizer.token_to_id(END_OF_DOCUMENT)
    if token_id is None:
        raise ValueError(f"the tokenizer has no eos_id and no token {END_OF_DOCUMENT!r}; pass eos_id")
    return int(token_id)
