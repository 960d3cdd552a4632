"""Token quotas: how many tokens each category and each source gives to a stage."""

from collections.abc import Mapping

from zgcm_data.records import CorpusError


def largest_remainder(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Split ``total`` in proportion to ``weights`` so that the parts sum to it exactly.

    Args:
        total: Tokens to split.
        weights: Positive weights; they need not sum to 1.

    Returns:
        Whole numbers; those with the largest remainders are rounded up, ties by name.
    """
    whole = sum(weights.values())
    exact = {name: total * weight / whole for name, weight in weights.items()}
    parts = {name: int(value) for name, value in exact.items()}
    order = sorted(weights, key=lambda name: (parts[name] - exact[name], name))
    for name in order[: total - sum(parts.values())]:
        parts[name] += 1
    return parts


def capacity(
    available: Mapping[tuple[str, str], int], shares: Mapping[str, float], max_epochs: Mapping[str, int]
) -> int:
    """Return the largest total that ``source_quotas`` can split without a refusal.

    Args:
        available: (category, source) to tokens.
        shares: Token share per category; empty takes what is available.
        max_epochs: How often each document of a category may be used.

    Returns:
        Tokens; with shares, a few less than the very largest, so that rounding up cannot break a limit.
    """
    limits: dict[str, int] = {}
    for (category, _), tokens in available.items():
        limits[category] = limits.get(category, 0) + tokens * max_epochs.get(category, 1)
    if not shares:
        return sum(limits.values())
    whole = sum(shares.values())
    scarce = min(max(limits.get(category, 0) - 1, 0) * whole / share for category, share in shares.items())
    return int(scarce)


def source_quotas(
    total: int,
    available: Mapping[tuple[str, str], int],
    shares: Mapping[str, float],
    max_epochs: Mapping[str, int],
) -> dict[tuple[str, str], int]:
    """Split a stage's tokens over categories by share, and over the sources of each by what they hold.

    Args:
        total: Tokens of the stage.
        available: (category, source) to tokens, end-of-document tokens included.
        shares: Token share per category; empty takes what is available.
        max_epochs: How often each document of a category may be used; 1 where not named.

    Returns:
        (category, source) to tokens; the sum is ``total`` exactly.

    Raises:
        CorpusError: If a quota is larger than its category and repeating is not allowed; names both.
    """
    held: dict[str, int] = {}
    for (category, _), tokens in available.items():
        held[category] = held.get(category, 0) + tokens
    limits = {category: tokens * max_epochs.get(category, 1) for category, tokens in held.items()}
    quotas = largest_remainder(total, dict(shares) or limits)
    result: dict[tuple[str, str], int] = {}
    for category, quota in quotas.items():
        check_quota(category, quota, held.get(category, 0), max_epochs.get(category, 1))
        sources = {source: float(n) for (name, source), n in available.items() if name == category and n}
        for source, part in largest_remainder(quota, sources).items():
            if part:
                result[category, source] = part
    return result


def check_quota(category: str, quota: int, held: int, epochs: int) -> None:
    """Refuse a quota that a category cannot fill.

    Raises:
        CorpusError: Names the quota, what there is, and the setting to change.
    """
    if quota > held * epochs:
        needed = -(-quota // held) if held else 0
        remedy = (
            f"lower the rows or the share, add text, or set max_epochs.{category} = {needed}"
            if held
            else "leave it out of the shares or add such text"
        )
        times = "once" if epochs == 1 else f"{epochs} times"
        raise CorpusError(
            f"the quota of {quota:,} tokens for {category} is larger than the {held:,} tokens "
            f"that are left of it, used {times}; {remedy}"
        )
