"""A step of a large cluster on paper, from measured parts: docs/scale.md's table.

    python -m benchmarks.scale --images_per_sec=2500

Nothing is measured here. Compute is what one GPU does alone; the reduction moves 2 (N-1)/N of the gradients through each
GPU's link, in `--ordered` times the time of a ring all-reduce, plus a time for each message of the all-to-all and the
all-gather; reading is the bytes, and the cores that decoding takes.
"""

import argparse


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images_per_sec", type=float, default=2500, help="of one GPU alone, forward and backward")
    parser.add_argument("--values", type=float, default=25_557_032 + 53_120, help="float32 values in a reduction")
    parser.add_argument("--ordered", type=float, default=1.2, help="time of the ordered reduction over a ring all-reduce's")
    parser.add_argument("--message_us", type=float, default=5, help="of each message to send")
    parser.add_argument("--packs", type=int, default=4, help="of the reduction")
    parser.add_argument("--image_kb", type=float, default=110, help="of a JPEG file")
    parser.add_argument("--decoded_per_core", type=float, default=620, help="images a second that a core decodes and augments")
    parser.add_argument("--batch", type=int, default=0, help="B for all N; 0: 256 on each GPU")
    options = parser.parse_args()
    columns = ("GPUs", "B", "Gbit/s", "compute, ms", "reduction, ms", "no overlap", "full overlap", "images/s at best")
    columns += ("reading, GB/s", "cores a GPU")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for gpus in (8, 64, 512):
        batch = options.batch or 256 * gpus
        compute = 1e3 * batch / gpus / options.images_per_sec
        for gigabits in (25, 100, 400):
            wire = 1e3 * 2 * (gpus - 1) / gpus * 4 * options.values / (gigabits * 1e9 / 8)
            reduction = options.ordered * wire + 2 * options.packs * (gpus - 1) * options.message_us / 1e3
            serial, overlapped = compute / (compute + reduction), compute / max(compute, compute / 3 + reduction)
            speed = batch / max(compute, compute / 3 + reduction) * 1e3  # the forward pass, a third, overlaps with nothing
            print(
                f"| {gpus} | {batch:,} | {gigabits} | {compute:.1f} | {reduction:.1f} | {serial:.0%} | {overlapped:.0%} | "
                f"{speed:,.0f} | {speed * options.image_kb / 1e6:.2f} | {speed / gpus / options.decoded_per_core:.1f} |"
            )


if __name__ == "__main__":
    main()
