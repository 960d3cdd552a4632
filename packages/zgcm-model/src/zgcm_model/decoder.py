"""The decoder: embed, run the layers, normalize; the head comes apart, because the loss applies it in chunks."""

from collections.abc import Callable, Iterable
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from zgcm_model.block import Block
from zgcm_model.cache import DecoderCache
from zgcm_model.config import ModelConfig
from zgcm_model.head import OutputHead, WholeHead
from zgcm_model.kernels import AttentionKernel, AutoKernel, Documents, make_kernel
from zgcm_model.linear import LinearFactory
from zgcm_model.norm import RmsNorm
from zgcm_model.rotary import rotary_angles


class Decoder(nn.Module):
    """A decoder-only language model with one global attention layer in every ``config.global_every``.

    Args:
        config: shapes and constants.
        kernel: an attention kernel or its name; ``auto`` picks by device at the first call.
        linear: makes the projections of the layers from (in, out, bias=False); ``torch.nn.Linear`` when left
            out. The head is always a ``torch.nn.Linear``.

    Attributes:
        first_position: maps the number of positions at hand to the position of the first one. Always 0 unless
            context parallelism gives this rank a later part of the sequence.
        head: applies ``lm_head.weight``; replaced where tensor parallelism splits it.

    Source: ZGCM-1 release, published model files.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        kernel: str | AttentionKernel = "auto",
        linear: LinearFactory | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.kernel = make_kernel(kernel)
        self.first_position: Callable[[int], int] = _from_the_start
        factory = nn.Linear if linear is None else linear
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(config, layer, self.kernel, factory) for layer in range(config.num_layers)
        )
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.head: OutputHead = WholeHead(config.real_vocab_size)

    def forward(
        self,
        token_ids: Int[Tensor, "batch time"],
        *,
        document_ids: Int[Tensor, "batch time"] | None = None,
        cache: DecoderCache | None = None,
    ) -> Float[Tensor, "batch time hidden"]:
        """Return the hidden states after the final norm.

        Args:
            token_ids: ids below ``config.vocab_size - config.vocab_padding``.
            document_ids: positions with different ids never attend to each other; None for one document.
            cache: earlier keys and values, extended in place; not together with ``document_ids``.

        Returns:
            Hidden states; ``logits`` or the loss applies the head.

        Raises:
            ValueError: an id is outside the vocabulary, the sequence is too long, the shapes of ids differ,
                or cache and documents are mixed.
        """
        self._check(token_ids, document_ids, cache)
        if isinstance(self.kernel, AutoKernel):
            self.kernel.pick(token_ids.device)
        positions = self._positions(token_ids, cache)
        documents = _documents(positions, document_ids, cache)
        angles = rotary_angles(positions, self.config.rotary_dim, self.config.rotary_base)
        hidden = self.embed_tokens(token_ids)
        for index, block in enumerate(self.layers):
            hidden = block(hidden, angles, documents, None if cache is None else cache.layers[index])
        if cache is not None:
            cache.length += token_ids.shape[1]
        normed: Tensor = self.norm(hidden)
        return normed

    def logits(self, hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows vocab"]:
        """Apply the output head.

        Args:
            hidden: hidden states after the final norm.

        Returns:
            One score per vocabulary id that is no padding.
        """
        return self.head.logits(hidden, self.lm_head.weight)

    def lm_terms(
        self,
        hidden: Float[Tensor, "batch time hidden"],
        targets: Int[Tensor, "batch time"],
        loss_mask: Tensor,
        *,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss sum and the count of loss tokens, through the head and without the full logits.

        Args:
            hidden: what ``forward`` returned.
            targets: the token that follows each position; nothing is shifted here.
            loss_mask: bool [B, T], True where the target counts.
            z_loss: weight of the squared log-partition, 0 for none.

        Returns:
            float32 sum and int64 count.
        """
        return self.head.lm_terms(hidden, self.lm_head.weight, targets, loss_mask, z_loss)

    def blocks(self) -> list[Block]:
        """Return the layers with their type."""
        return list(cast("Iterable[Block]", self.layers))

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output head."""
        return self.lm_head

    def _positions(self, token_ids: Tensor, cache: DecoderCache | None) -> Tensor:
        length = token_ids.shape[1]
        start = self.first_position(length) if cache is None else cache.length
        positions = torch.arange(start, start + length, device=token_ids.device)
        if cache is None or cache.padding is None:
            return positions
        return positions - cache.padding.unsqueeze(-1)

    def _check(self, token_ids: Tensor, document_ids: Tensor | None, cache: DecoderCache | None) -> None:
        check_token_ids(token_ids, self.config.real_vocab_size)
        end = token_ids.shape[1] + (
            self.first_position(token_ids.shape[1]) if cache is None else cache.length
        )
        if end > self.config.max_positions:
            raise ValueError(
                f"the sequence ends at position {end}, past max_positions={self.config.max_positions}; "
                "pass fewer tokens or build the model with a larger max_positions"
            )
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids cannot be used with a cache; generate for one document per row")
        if document_ids is not None and document_ids.shape != token_ids.shape:
            raise ValueError(
                f"document_ids has shape {list(document_ids.shape)} but token_ids {list(token_ids.shape)}; "
                "pass one document id per token"
            )


def _from_the_start(length: int) -> int:
    return 0


def _documents(
    positions: Tensor, document_ids: Tensor | None, cache: DecoderCache | None
) -> Documents | None:
    if document_ids is not None:
        return Documents(document_ids)
    if cache is None or cache.padding is None:
        return None
    # Left padding is a document of its own: real tokens never see it, and no softmax is empty.
    seen = torch.arange(cache.length + positions.shape[1], device=positions.device)
    keys = (seen >= cache.padding.unsqueeze(-1)).to(torch.int64)
    return Documents(keys[:, cache.length :], keys)


def check_token_ids(token_ids: Tensor, vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary; on a GPU without waiting for it.

    Args:
        token_ids: int tensor of any shape.
        vocab_size: ids must lie in [0, vocab_size).

    Raises:
        ValueError: an id is outside, or the ids are no integers. On a GPU a RuntimeError comes at the next
            synchronization instead.
    """
    if token_ids.is_floating_point() or token_ids.dtype == torch.bool:
        raise ValueError(f"token_ids has dtype {token_ids.dtype}; pass integer ids")
    if token_ids.numel() == 0 or token_ids.is_meta or torch.compiler.is_compiling():
        return
    low, high = token_ids.aminmax()
    if token_ids.device.type != "cpu":
        torch._assert_async((low >= 0) & (high < vocab_size), f"token_ids are outside [0, {vocab_size})")
    elif int(low) < 0 or int(high) >= vocab_size:
        wrong = int(low) if int(low) < 0 else int(high)
        raise ValueError(
            f"token_ids holds {wrong}, outside the vocabulary [0, {vocab_size}); "
            "use the tokenizer this model was trained with"
        )
