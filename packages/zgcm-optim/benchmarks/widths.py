"""Show how the cost of one step grows with the width of a matrix, beside torch.optim.Muon.

    python benchmarks/widths.py --rounds 9

Processor time of one thread; the best of all rounds, taken in turns.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence

import torch
from compare import times
from peers import CANDIDATES, parameters

WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024, 1536)
ASPECTS = (1.0, 2.6875)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line for each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--count", type=int, default=4, help="matrices of each shape")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for width in WIDTHS:
        for aspect in ASPECTS:
            shape = (options.count, width, round(width * aspect))
            optimizers = {
                name: CANDIDATES[name](parameters([shape])) for name in ("zgcm-optim", "torch.optim.Muon")
            }
            best = {
                name: min(found)
                for name, found in times(optimizers, options.rounds, time.process_time).items()
            }
            ours = best["zgcm-optim"]
            row = {
                "shape": shape[1:],
                "ms": round(ours / options.count * 1e3, 2),
                "torch": round(best["torch.optim.Muon"] / ours, 2),
            }
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
