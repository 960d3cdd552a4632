"""Text generation with a cache that forgets what no window can see any more."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from zgcm_model.cache import DecoderCache
from zgcm_model.decoder import Decoder


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: divides the logits; 0 takes the most probable token.
        top_p: samples from the smallest set of tokens whose probabilities reach this.
        seed: of the sampling; None draws from torch's global generator.

    Raises:
        ValueError: a value is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} cannot be used; set 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} cannot be used; set a share above 0 and up to 1")


GREEDY = Sampling()
"""Always the most probable token."""


def left_pad(
    prompts: Sequence[Sequence[int]], pad_id: int = 0
) -> tuple[Int[Tensor, "batch time"], Int[Tensor, " batch"]]:
    """Lay prompts of different lengths side by side, aligned at the end.

    Args:
        prompts: token ids, one or more per prompt.
        pad_id: fills the front; any id of the vocabulary, no token ever sees it.

    Returns:
        The ids, and how many of each row only pad.

    Raises:
        ValueError: there is no prompt, or an empty one.
    """
    if not prompts or not all(prompts):
        raise ValueError("prompts holds nothing or an empty prompt; give each at least one token")
    width = max(len(prompt) for prompt in prompts)
    padding = [width - len(prompt) for prompt in prompts]
    rows = [[pad_id] * pad + list(prompt) for pad, prompt in zip(padding, prompts, strict=True)]
    return torch.tensor(rows), torch.tensor(padding)


@torch.no_grad()
def generate(
    decoder: Decoder,
    token_ids: Int[Tensor, "batch time"],
    max_new_tokens: int,
    *,
    sampling: Sampling = GREEDY,
    stop_ids: Sequence[int] = (),
    padding: Int[Tensor, " batch"] | None = None,
) -> Int[Tensor, "batch longer"]:
    """Continue each row, one token at a time.

    Args:
        decoder: the model; its mode is left alone.
        token_ids: prompts, aligned at the end.
        max_new_tokens: upper bound of new tokens per row.
        sampling: how a token is chosen.
        stop_ids: a row ends with the first of these it produces; the rest of it repeats that id.
        padding: how many leading ids of each row only pad, as :func:`left_pad` returns it.

    Returns:
        Prompts and new tokens; as long as the longest row, at most ``time + max_new_tokens``.

    Raises:
        ValueError: ``max_new_tokens`` is negative, a prompt is empty, or prompt and new tokens exceed
            ``max_positions``.
    """
    _check(decoder, token_ids, max_new_tokens, padding)
    cache = DecoderCache(decoder.config, None if padding is None else padding.to(token_ids.device))
    random = None
    if sampling.seed is not None:
        random = torch.Generator(token_ids.device).manual_seed(sampling.seed)
    stops = torch.tensor(list(stop_ids), dtype=token_ids.dtype, device=token_ids.device)
    pieces, new = [token_ids], token_ids
    done = torch.zeros(token_ids.shape[0], dtype=torch.bool, device=token_ids.device)
    for _ in range(max_new_tokens):
        logits = decoder.logits(decoder(new, cache=cache)[:, -1]).float()
        chosen = choose(logits, sampling, random).to(token_ids.dtype)
        new = torch.where(done, pieces[-1][:, -1], chosen).unsqueeze(1)
        pieces.append(new)
        done |= torch.isin(new[:, 0], stops)
        if bool(done.all()):
            break
    return torch.cat(pieces, dim=1)


def choose(
    logits: Float[Tensor, "batch vocab"], sampling: Sampling, random: torch.Generator | None = None
) -> Int[Tensor, " batch"]:
    """Choose one token per row.

    Args:
        logits: scores.
        sampling: how to choose.
        random: the generator to draw from.

    Returns:
        The chosen ids.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities, ids = (logits / sampling.temperature).softmax(-1).sort(-1, descending=True)
    # A token stays when those before it have not reached top_p yet; the first always stays.
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return ids.gather(-1, probabilities.multinomial(1, generator=random)).squeeze(-1)


def _check(decoder: Decoder, token_ids: Tensor, max_new_tokens: int, padding: Tensor | None) -> None:
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} cannot be used; set 0 or more")
    if token_ids.shape[1] == 0:
        raise ValueError("token_ids holds empty prompts; give each at least one token")
    limit, needed = decoder.config.max_positions, token_ids.shape[1] + max_new_tokens
    if needed > limit:
        raise ValueError(
            f"prompt and max_new_tokens={max_new_tokens} need {needed} positions, past max_positions={limit}; "
            "shorten the prompt or generate less"
        )
    if padding is not None and (
        padding.shape != token_ids.shape[:1] or int(padding.max()) >= token_ids.shape[1]
    ):
        raise ValueError(
            f"padding={padding.tolist()} does not fit prompts of shape {list(token_ids.shape)}; "
            "give one count per row, below the row's length"
        )
