"""Speed of full-width layers on one GPU: tokens per second and model TFLOP/s, by both counters.

Run ``python gpu_layers.py --layers 12 --length 16384`` on a machine with a GPU; ``--preset zgcm-1-tiny
--device cpu --length 512 --layers 6`` tries the script without one.
"""

import argparse
import time

import torch

from zgcm_model import Decoder, ModelConfig, flops_per_token, initialize


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="zgcm-1-7b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    options = parse()
    config = ModelConfig.preset(options.preset, num_layers=options.layers)
    with torch.device("meta"):
        decoder = Decoder(config, kernel=options.kernel)
    decoder = initialize(decoder.bfloat16().to_empty(device=options.device), 0)
    row = torch.randint(0, config.vocab_size, (1, options.length + 1), device=options.device)
    mask = torch.ones(1, options.length, dtype=torch.bool, device=options.device)

    def step() -> float:
        start = time.perf_counter()
        total, count = decoder.lm_terms(decoder(row[:, :-1]), row[:, 1:], mask)
        (total / count).backward()
        decoder.zero_grad()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    step()
    seconds = min(step() for _ in range(options.steps))
    flops, speed = flops_per_token(config, options.length), options.length / seconds
    print(
        f"{config.num_parameters() / 1e9:.3f} B parameters, kernel {decoder.kernel.name}, T={options.length}"
    )
    print(f"{speed:,.0f} tokens/s, {speed * flops.total / 1e12:.2f} TFLOP/s of the model")
    print(f"{speed * flops.total_if_all_full / 1e12:.2f} TFLOP/s by a counter that ignores windows")
    if options.device == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB at most")


if __name__ == "__main__":
    main()
