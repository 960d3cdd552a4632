"""A causal language model of ``transformers``; the only file that imports it."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from zgcm_eval.adapters.scoring import LogitScorer, evaluation_mode

LOGITS_AT_ONCE = 2**27
"""Logits that one forward pass may return, half a gibibyte in float32; a single row may be more."""


class HuggingFaceLanguageModel(LogitScorer):
    """Rates and continues text with a ``transformers`` model and tokenizer.

    Args:
        model: a causal language model; called with ``input_ids``, it returns ``logits``.
        tokenizer: its tokenizer.
        prefix_id: id that stands before the first token of a document; None takes the tokenizer's beginning
            of sequence, or its end of sequence where it has no beginning.
        max_length: longest input in tokens; None takes ``config.max_position_embeddings``.

    Raises:
        ValueError: neither the arguments nor the tokenizer and the configuration give the prefix id and the
            length.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, *, prefix_id: int | None = None, max_length: int | None = None
    ) -> None:
        prefix = _first_of("prefix_id", prefix_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        stated = getattr(model.config, "max_position_embeddings", None)
        super().__init__(model, prefix, _first_of("max_length", max_length, stated))
        self._tokenizer = tokenizer

    def _logits(self, token_ids: Int[Tensor, "B T"]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield logits and targets, those of as many rows at once as ``LOGITS_AT_ONCE`` allows."""
        rows = max(1, LOGITS_AT_ONCE // (token_ids.shape[1] * int(self._model.config.vocab_size)))
        for part in token_ids.to(self.device).split(rows):
            logits = self._model(input_ids=part[:, :-1], use_cache=False).logits
            yield logits.flatten(0, 1), part[:, 1:].flatten()

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Continue each prompt with its most probable tokens.

        Args:
            prompts: token ids, with the prefix id in front.
            max_new_tokens: upper bound of a continuation's length.

        Returns:
            The new ids of each prompt, ended before the end of sequence or the prefix id.
        """
        with evaluation_mode(self._model):
            return [self._continue(list(prompt), max_new_tokens) for prompt in prompts]

    def _continue(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        ends = [end for end in (self._prefix_id, self._tokenizer.eos_token_id) if end is not None]
        inputs = torch.tensor([prompt], device=self.device)
        result = self._model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            num_beams=1,
            max_new_tokens=max_new_tokens,
            eos_token_id=ends,
            pad_token_id=self._prefix_id,
        )
        new = [int(token_id) for token_id in result[0, len(prompt) :]]
        stop = next((place for place, token_id in enumerate(new) if token_id in ends), len(new))
        return new[:stop]

    def encode(self, text: str) -> list[int]:
        """Turn text into token ids; adds no special token and reads none from the text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids back into text."""
        return str(self._tokenizer.decode(list(token_ids)))


def load_huggingface(folder: str, *, device: str = "cpu") -> HuggingFaceLanguageModel:
    """Load a model and its tokenizer from a folder, without asking the network.

    Args:
        folder: what ``save_pretrained`` of both wrote.
        device: where the model goes.

    Returns:
        The language model.

    Raises:
        ImportError: transformers is not installed; the message names the extra.
        OSError: the folder holds no model.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except (ImportError, OSError) as error:
        raise ImportError(
            'transformers is needed to load a Hugging Face model: pip install "zgcm-eval[huggingface]"'
        ) from error
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return HuggingFaceLanguageModel(model.to(device), tokenizer)


def _first_of(name: str, *values: int | None) -> int:
    for value in values:
        if value is not None:
            return int(value)
    raise ValueError(f"the model and its tokenizer do not say {name}; pass it")
