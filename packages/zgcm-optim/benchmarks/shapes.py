"""Sets of matrix shapes, (count, rows, columns), that the benchmarks run over."""

Shapes = list[tuple[int, int, int]]


def zgcm(width: int, layers: int) -> Shapes:
    """Return the matrices of ``layers`` layers of ZGCM-1 shrunk to ``width``.

    Args:
        width: model width; 4096 is the published one.
        layers: number of layers; five of six carry a gate.

    Returns:
        Query, output and gate; key and value; gate and up; down.

    Source: published ZGCM-1 configuration (4096 wide, 1024 key/value, 11008 feed-forward).
    """
    key, inner = width // 4, round(width * 11008 / 4096 / 16) * 16
    square = 2 * layers + layers - layers // 6
    return [
        (square, width, width),
        (2 * layers, key, width),
        (2 * layers, inner, width),
        (layers, width, inner),
    ]


SETS: dict[str, Shapes] = {
    "zgcm-1 at width 1024, 2 layers": zgcm(1024, 2),
    "zgcm-1 at width 768, 2 layers": zgcm(768, 2),
    "one layer at width 768": [(3, 768, 768), (2, 192, 768), (2, 2064, 768), (1, 768, 2064)],
    "eight layers at width 768": [(24, 768, 768), (16, 192, 768), (16, 2064, 768), (8, 768, 2064)],
    "aspect 2.6 and more": [(2, 192, 768), (2, 2064, 768), (1, 768, 2064)],
    "aspect 2.6 and more, eight layers": [(16, 192, 768), (16, 2064, 768), (8, 768, 2064)],
    "squares": [(3, 768, 768)],
}
