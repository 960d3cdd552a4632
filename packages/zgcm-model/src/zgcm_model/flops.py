"""Floating-point operations of one training token, exact for windows, grouped queries, gates and the head."""

from dataclasses import dataclass

from zgcm_model.config import ModelConfig

_PER_PARAMETER = 6
"""Two operations per multiply-add, once forward and twice backward."""


@dataclass(frozen=True)
class FlopsBreakdown:
    """Operations per token, forward and backward, without recomputation.

    Attributes:
        projections: query, key, value and output matrices.
        gate: gate matrices of the window layers.
        feed_forward: the three feed-forward matrices.
        attention: scores and weighted values, each key a query sees counted once.
        head: the output head.
        attention_if_all_full: ``attention`` under the convention that charges half the sequence to every
            layer, window or not; published figures may use it.
    """

    projections: float
    gate: float
    feed_forward: float
    attention: float
    head: float
    attention_if_all_full: float

    @property
    def total(self) -> float:
        """Operations per token."""
        return self.projections + self.gate + self.feed_forward + self.attention + self.head

    @property
    def total_if_all_full(self) -> float:
        """Operations per token as a counter that ignores windows would report them; an over-count."""
        return self.total - self.attention + self.attention_if_all_full


def mean_visible_keys(sequence_length: int, window: int | None) -> float:
    """Average over a sequence the number of keys a query sees.

    Args:
        sequence_length: T.
        window: visible keys per query; None for all that precede.

    Returns:
        The mean over T queries, each with its own key counted.
    """
    reach = sequence_length if window is None else min(window, sequence_length)
    return (reach * (reach + 1) / 2 + (sequence_length - reach) * reach) / sequence_length


def flops_per_token(config: ModelConfig, sequence_length: int) -> FlopsBreakdown:
    """Count the operations of one training token.

    Args:
        config: the model's.
        sequence_length: T, of one undivided sequence.

    Returns:
        The parts; ``total`` sums them.

    Raises:
        ValueError: the length is below 1.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length} cannot be used; set at least 1")
    counts = config.parameter_breakdown()
    keys = sum(mean_visible_keys(sequence_length, config.layer_window(i)) for i in range(config.num_layers))
    # Scores and weighted values: two products of the query width with each visible key.
    per_key = 2 * _PER_PARAMETER * config.query_size
    return FlopsBreakdown(
        projections=float(_PER_PARAMETER * counts["attention"]),
        gate=float(_PER_PARAMETER * counts["gate"]),
        feed_forward=float(_PER_PARAMETER * counts["feed_forward"]),
        attention=float(per_key * keys),
        head=float(_PER_PARAMETER * counts["head"]),
        attention_if_all_full=per_key * config.num_layers * sequence_length / 2,
    )
