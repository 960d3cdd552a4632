"""Connected components of a pair list, the same for any order of the pairs and any number of workers."""

from typing import Any

from zgcm_data import engine


def connected_components(pairs: Any) -> Any:
    """Label every id in ``pairs`` with the smallest id it is connected to.

    The smallest label of the neighbours is taken, then the label of that label, until nothing changes; the
    fixed point does not depend on the order in which pairs are met.

    Args:
        pairs: A frame with string columns ``id`` and ``match``.

    Returns:
        A collected frame (id, cluster).
    """
    column = engine.daft().col
    there = pairs.select(column("id").alias("a"), column("match").alias("b"))
    back = pairs.select(column("match").alias("a"), column("id").alias("b"))
    edges = there.concat(back).distinct().collect()
    labels = edges.select(column("a").alias("id")).distinct().with_column("cluster", column("id")).collect()
    while True:
        following = jump(spread(edges, labels)).collect()
        before = labels.select(column("id"), column("cluster").alias("old"))
        changed = following.join(before, on="id").where(column("cluster") != column("old")).count_rows()
        labels = following
        if changed == 0:
            return labels


def spread(edges: Any, labels: Any) -> Any:
    """Give every id the smallest label among its own and its neighbours'."""
    column = engine.daft().col
    near = edges.join(labels, left_on="b", right_on="id").select(column("a").alias("id"), column("cluster"))
    return near.concat(labels).groupby("id").agg(column("cluster").min())


def jump(labels: Any) -> Any:
    """Replace every label by the label of the id it names."""
    column = engine.daft().col
    target = labels.select(column("id").alias("cluster"), column("cluster").alias("far"))
    return labels.join(target, on="cluster").select(column("id"), column("far").alias("cluster"))
