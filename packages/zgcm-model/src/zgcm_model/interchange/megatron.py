"""The fused layout of the training framework, per tensor-parallel rank, both ways.

``linear_qkv`` holds, for each key/value head in turn, the rows of its query heads, then (window layers only)
the gate rows of the same heads, then the key and the value head. ``linear_fc1`` holds the gate rows above the
up rows, each rank its own slice of both. The norms before attention and before the feed-forward network live
inside those two modules.

Source: Megatron-LM at eba2eaf with the attention output gate on window layers only.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zgcm_model.config import ModelConfig, check_tensor_parallel, padded_vocab_size
from zgcm_model.decoder import Decoder
from zgcm_model.interchange.names import bare_name

_EMBEDDING, _HEAD, _FINAL = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
)


def fuse_attention(query: Tensor, gate: Tensor | None, key: Tensor, value: Tensor, kv_heads: int) -> Tensor:
    """Interleave the projections by key/value head.

    Args:
        query: [N * H, D].
        gate: [N * H, D], or None on a global layer.
        key: [K * H, D].
        value: [K * H, D].
        kv_heads: K.

    Returns:
        The fused rows, grouped by key/value head: query heads, gate heads, key, value.
    """
    parts = [query, key, value] if gate is None else [query, gate, key, value]
    return torch.cat([part.unflatten(0, (kv_heads, -1)) for part in parts], dim=1).flatten(0, 1)


def split_attention(
    fused: Tensor, has_gate: bool, heads: int, kv_heads: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Take the fused rows apart again.

    Args:
        fused: what :func:`fuse_attention` returned, of all heads or of one rank's.
        has_gate: whether gate rows are among them.
        heads: query heads among the rows.
        kv_heads: key/value heads among the rows.

    Returns:
        Query, gate or None, key and value rows.

    Raises:
        ValueError: the rows are no whole number of heads.
    """
    group = heads // kv_heads
    sizes = [group, group, 1, 1] if has_gate else [group, 1, 1]
    if fused.shape[0] % (kv_heads * sum(sizes)):
        raise ValueError(
            f"linear_qkv has {fused.shape[0]} rows, no multiple of {kv_heads * sum(sizes)} "
            f"({'with' if has_gate else 'without'} gate); check the layer pattern and the number of heads"
        )
    width = fused.shape[0] // (kv_heads * sum(sizes))
    parts = fused.unflatten(0, (kv_heads, -1)).split([size * width for size in sizes], dim=1)
    rows = [part.flatten(0, 1) for part in parts]
    return (rows[0], rows[1], rows[2], rows[3]) if has_gate else (rows[0], None, rows[1], rows[2])


def to_megatron(
    decoder: Decoder, tensor_parallel: int = 1, *, vocab_multiple: int = 128
) -> list[dict[str, Tensor]]:
    """Lay the weights out as the training framework holds them.

    Args:
        decoder: the model, not sharded.
        tensor_parallel: number of ranks.
        vocab_multiple: the vocabulary is padded with zero rows to a multiple of this times the ranks.

    Returns:
        One mapping of parameter names to tensors per rank.

    Raises:
        ValueError: heads, key/value heads or feed-forward width do not divide over the ranks.
    """
    config = decoder.config
    check_tensor_parallel(config, tensor_parallel)
    weights = {bare_name(name): p.detach() for name, p in decoder.named_parameters()}
    ranks: list[dict[str, Tensor]] = [{} for _ in range(tensor_parallel)]
    rows = padded_vocab_size(config.real_vocab_size, tensor_parallel, vocab_multiple)
    for name, ours in ((_EMBEDDING, "embed_tokens.weight"), (_HEAD, "lm_head.weight")):
        table = _resize(weights[ours][: config.real_vocab_size], rows)
        _scatter(ranks, name, table.chunk(tensor_parallel))
    for layer in range(config.num_layers):
        _write_layer(ranks, config, layer, weights)
    _scatter(ranks, _FINAL, [weights["norm.weight"]] * tensor_parallel)
    return ranks


def from_megatron(ranks: Sequence[Mapping[str, Tensor]], config: ModelConfig) -> dict[str, Tensor]:
    """Rebuild a decoder's state from the training framework's layout.

    Args:
        ranks: one mapping per tensor-parallel rank, in order.
        config: the model's; vocabulary rows beyond ``config.real_vocab_size`` are dropped.

    Returns:
        A state for ``Decoder.load_state_dict(state, strict=True)``.

    Raises:
        ValueError: keys are missing or unexpected, a shape does not fit, or ranks disagree on a replicated scale.
    """
    check_tensor_parallel(config, len(ranks))
    reader = _Reader(ranks)
    state: dict[str, Tensor] = {}
    for name, ours in ((_EMBEDDING, "embed_tokens.weight"), (_HEAD, "lm_head.weight")):
        table = reader.concatenated(name)
        if table.shape[0] < config.real_vocab_size:
            raise ValueError(
                f"{name} has {table.shape[0]} rows, below the vocabulary of {config.real_vocab_size}; "
                "use the vocabulary these weights were trained with"
            )
        state[ours] = _resize(table[: config.real_vocab_size], config.vocab_size)
    for layer in range(config.num_layers):
        state |= _read_layer(reader, config, layer)
    state["norm.weight"] = reader.replicated(_FINAL)
    reader.finish()
    return state


def _write_layer(
    ranks: list[dict[str, Tensor]], config: ModelConfig, layer: int, weights: Mapping[str, Tensor]
) -> None:
    count, ours, theirs = len(ranks), f"layers.{layer}.", f"decoder.layers.{layer}."
    att, ff = ours + "attention.", ours + "feed_forward."
    fused = fuse_attention(
        weights[att + "q_proj.weight"],
        weights.get(att + "g_proj.weight"),
        weights[att + "k_proj.weight"],
        weights[att + "v_proj.weight"],
        config.num_kv_heads,
    )
    gate, up = (weights[f"{ff}{name}_proj.weight"].chunk(count) for name in ("gate", "up"))
    sharded = {
        "self_attention.linear_qkv.weight": fused.chunk(count),
        "self_attention.linear_proj.weight": weights[att + "o_proj.weight"].chunk(count, dim=1),
        "mlp.linear_fc1.weight": [torch.cat(pair) for pair in zip(gate, up, strict=True)],
        "mlp.linear_fc2.weight": weights[ff + "down_proj.weight"].chunk(count, dim=1),
    }
    for name, parts in sharded.items():
        _scatter(ranks, theirs + name, parts)
    for name, source in _NORMS.items():
        _scatter(ranks, theirs + name, [weights[ours + source]] * count)


_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm.weight",
    "self_attention.q_layernorm.weight": "attention.q_norm.weight",
    "self_attention.k_layernorm.weight": "attention.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "feed_forward_norm.weight",
}


def _read_layer(reader: "_Reader", config: ModelConfig, layer: int) -> dict[str, Tensor]:
    theirs, ours = f"decoder.layers.{layer}.", f"layers.{layer}."
    fused = reader.concatenated(theirs + "self_attention.linear_qkv.weight")
    expected = config.query_size * (1 if config.is_global(layer) else 2) + 2 * config.kv_size
    if fused.shape[0] != expected:
        raise ValueError(
            f"{theirs}self_attention.linear_qkv.weight has {fused.shape[0]} rows instead of {expected}; "
            f"layer {layer} must be {'global, without' if config.is_global(layer) else 'a window layer, with'} gate"
        )
    query, gate, key, value = split_attention(
        fused, not config.is_global(layer), config.num_heads, config.num_kv_heads
    )
    gates, ups = zip(*(p.chunk(2) for p in reader.parts(theirs + "mlp.linear_fc1.weight")), strict=True)
    state = {
        "attention.q_proj": query,
        "attention.k_proj": key,
        "attention.v_proj": value,
        "attention.o_proj": reader.concatenated(theirs + "self_attention.linear_proj.weight", dim=1),
        "feed_forward.gate_proj": torch.cat(gates),
        "feed_forward.up_proj": torch.cat(ups),
        "feed_forward.down_proj": reader.concatenated(theirs + "mlp.linear_fc2.weight", dim=1),
    }
    if gate is not None:
        state["attention.g_proj"] = gate
    named = {f"{ours}{name}.weight": tensor for name, tensor in state.items()}
    return named | {ours + mine: reader.replicated(theirs + name) for name, mine in _NORMS.items()}


class _Reader:
    """Hands out each key once and knows which were never asked for."""

    def __init__(self, ranks: Sequence[Mapping[str, Tensor]]) -> None:
        self._ranks = ranks
        self._unread = {key for rank in ranks for key in rank}

    def parts(self, name: str) -> list[Tensor]:
        missing = [number for number, rank in enumerate(self._ranks) if name not in rank]
        if missing:
            raise ValueError(f"{name} is missing on rank {missing[0]}; pass the complete model of every rank")
        self._unread.discard(name)
        return [rank[name] for rank in self._ranks]

    def concatenated(self, name: str, dim: int = 0) -> Tensor:
        return torch.cat(self.parts(name), dim=dim)

    def replicated(self, name: str) -> Tensor:
        first, *others = self.parts(name)
        if not all(torch.equal(first, other) for other in others):
            raise ValueError(
                f"{name} differs between ranks; the ranks drifted apart, use an earlier checkpoint"
            )
        return first

    def finish(self) -> None:
        unread = sorted(self._unread)
        if unread:
            raise ValueError(
                f"{unread[0]} is unexpected ({len(unread)} such keys); use the matching configuration"
            )


def _scatter(ranks: list[dict[str, Tensor]], name: str, parts: Sequence[Tensor]) -> None:
    for rank, part in zip(ranks, parts, strict=True):
        rank[name] = part.clone()


def _resize(table: Tensor, rows: int) -> Tensor:
    return torch.cat((table, table.new_zeros(rows - table.shape[0], table.shape[1])))
