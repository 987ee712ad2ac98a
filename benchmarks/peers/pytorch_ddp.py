"""PyTorch's DistributedDataParallel on ResNet-20: the time of every training step on N processes, in one line of JSON.

    python benchmarks/peers/pytorch_ddp.py --processes=2 --batch=128

It runs in an environment of its own (requirements.txt beside it) and needs nothing else of this repository. ResNet-20 is that
of He et al. 2016, 4.2, with shortcuts without parameters. One batch in memory is repeated. One process has no wrapper.
"""

import argparse
import ctypes
import datetime
import json
import os
import resource
import signal
import statistics
import sys
import time

import torch
from torch import distributed, nn
from torch.nn import functional as F

WEIGHT_DECAY = 1e-4
TIMEOUT = datetime.timedelta(seconds=60)


class Block(nn.Module):
    """Two 3x3 convolutions; the shortcut takes every `stride`-th pixel, with zeros as new channels (option A)."""

    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.stride, self.missing = stride, filters - channels

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.missing:
            half = self.missing // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, half, self.missing - half))
        return F.relu(x + y)


def resnet20(classes=10):
    blocks = []
    for stage, filters in enumerate((16, 32, 64)):
        for i in range(3):
            first = i == 0 and stage > 0
            blocks.append(Block(filters // 2 if first else filters, filters, 2 if first else 1))
    head = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*head, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight)
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--processes", type=int, default=1, help="on 127.0.0.1, joined by gloo")
    parser.add_argument("--batch", type=int, default=128, help="images of a step over all processes")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads of a process; one inter-op thread")
    parser.add_argument("--steps", type=int, default=30, help="steps that are timed")
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--nosync_buffers", action="store_true", help="do not send rank 0's statistics before each step")
    options = parser.parse_args()
    if options.batch % options.processes:
        parser.error(f"--processes={options.processes} does not divide --batch={options.batch}")
    os.environ |= {"OMP_NUM_THREADS": str(options.threads), "GLOO_SOCKET_IFNAME": "lo"}
    if options.processes == 1:
        return run(0, options, None)
    store = distributed.TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)  # 0: the system chooses
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that spawn ends the others
    torch.multiprocessing.spawn(run, (options, store.port, os.getpid()), options.processes)
    return None


def run(rank, options, port, parent=None):
    """The work of one process; rank 0 prints the line."""
    if parent:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent, however that ends (Linux)
        if os.getppid() != parent:
            sys.exit("the parent has ended")
    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    torch.manual_seed(0)
    model = resnet20().to(memory_format=torch.channels_last)
    parameters = sum(p.numel() for p in model.parameters())
    kernels = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    if port:
        store = distributed.TCPStore("127.0.0.1", port, None, False, TIMEOUT)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=options.processes, timeout=TIMEOUT)
        model = nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, **({"forward_sync_buffers": False} if options.nosync_buffers else {})
        )
    groups = [{"params": kernels, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    size = options.batch // options.processes
    images = torch.randn(options.batch, 3, 32, 32)[rank * size :][:size].contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (options.batch,))[rank * size :][:size]
    ends, cpu = [], []
    for _ in range(options.warmup + options.steps + 1):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()
        ends.append(time.perf_counter())
        cpu.append(time.process_time())
    if rank == 0:
        ends = ends[options.warmup :]
        step_time_s = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        found = {
            "images_per_sec": options.batch / statistics.median(step_time_s),
            "step_time_s": step_time_s,
            "cpu_s_per_step": (cpu[-1] - cpu[options.warmup]) / options.steps,
            "batch": options.batch,
            "side": "PyTorch DDP" if port else "PyTorch",
            "model": "resnet20",
            "parameters": parameters,
            "processes": options.processes,
            "threads": options.threads,
            "sync_buffers": not options.nosync_buffers,
            "torch": torch.__version__,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "load_average": os.getloadavg()[0],
        }
        print(json.dumps(found), flush=True)
    if port:
        distributed.barrier()
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
