"""Whether SGLang's all-reduce works between this machine's GPUs: eagerly, and in several graphs of one capture.

    python benchmarks/tp_links.py --tp 2 --out benchmarks/results

Every captured size has four graphs, as our decode graphs have variants, all captured in one session and
replayed in another order. Writes links_tpN.json. Exit status: 0 it works, 2 it does not (serve with
--disable-custom-all-reduce), 3 unknown. It also compiles SGLang's kernels, which later engines then find ready.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import random
import socket
import subprocess
import sys
import traceback
from pathlib import Path

import record
import torch

SECONDS = 150
SIZES = (1, 16, 300)  # rows; several of all-reduce's algorithms
WIDTH, VARIANTS, REPLAYS = 4096, 4, 100
WORKS, BROKEN, UNKNOWN = 0, 2, 3
SAFETY = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS")


def rank(number: int, size: int, port: int, results) -> None:
    status = UNKNOWN
    try:
        torch.cuda.set_device(number)
        from sglang.srt.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
        from sglang.srt.utils import monkey_patch_p2p_access_check

        monkey_patch_p2p_access_check()  # as SGLang does
        place = {"world_size": size, "rank": number, "local_rank": number}
        init_distributed_environment(backend="nccl", distributed_init_method=f"tcp://127.0.0.1:{port}", **place)
        initialize_model_parallel(tensor_model_parallel_size=size)
        group = get_tp_group()
        status = BROKEN
        check_eager(group, number)
        check_graphs(group, number)
        method = "NCCL" if group.ca_comm is None or group.ca_comm.disabled else type(group.ca_comm).__name__
        results.put((WORKS, method))
    except Exception:
        results.put((status, traceback.format_exc()))


def part(number: int, rows: int, seed: int) -> torch.Tensor:
    """This rank's summand: whole numbers, so that every order of summation gives the same."""
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.randint(-8, 9, (rows, WIDTH), generator=generator).half().cuda()


def total(size: int, rows: int, seed: int) -> torch.Tensor:
    return sum(part(number, rows, seed) for number in range(size))


def check_eager(group, number: int) -> None:
    for seed, rows in enumerate(SIZES):
        got = group.all_reduce(part(number, rows, seed))
        if not torch.equal(got, total(group.world_size, rows, seed)):
            raise RuntimeError(f"a wrong sum of {rows} rows")


@torch.no_grad()
def check_graphs(group, number: int) -> None:
    inputs = {rows: torch.zeros(rows, WIDTH, dtype=torch.float16, device="cuda") for rows in SIZES}
    graphs, pool = [], torch.cuda.graph_pool_handle()
    with group.graph_capture() as capture:
        for rows in reversed(SIZES):
            for variant in range(VARIANTS):

                def forward(x=inputs[rows], factor=variant + 1):
                    return group.all_reduce(x * factor)  # noqa: B023 - called within this turn of the loop

                for _ in range(2):
                    forward()
                torch.cuda.synchronize()
                group.barrier()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=capture.stream):
                    output = forward()
                graphs.append((rows, variant + 1, graph, output))
    rng = random.Random(0)  # the same on all ranks
    for seed in range(REPLAYS):
        rows, factor, graph, output = rng.choice(graphs)
        inputs[rows].copy_(part(number, rows, seed))
        graph.replay()
        if not torch.equal(output, factor * total(group.world_size, rows, seed)):
            raise RuntimeError(f"a wrong sum of {rows} rows in a replayed graph")


def run(size: int) -> tuple[int, list[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=rank, args=(n, size, port, results), daemon=True) for n in range(size)]
    for process in processes:
        process.start()
    answers = []
    try:
        while len(answers) < size and all(status == WORKS for status, _ in answers):  # after one fails, others hang
            answers.append(results.get(timeout=SECONDS))
    except queue.Empty:
        answers.append((BROKEN, f"no answer within {SECONDS} s"))
    for process in processes:
        process.kill()
    return max(status for status, _ in answers), [text for _, text in answers]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="folder for the result file")
    args = parser.parse_args(argv)
    topology = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False).stdout
    status, texts = run(args.tp)
    row = {"tp": args.tp, "works": status == WORKS, "status": status, "ranks": texts}
    environment = {name: os.environ.get(name) for name in SAFETY}
    record.save(args.out / f"links_tp{args.tp}.json", [row], environment=environment, topology=topology.splitlines())
    print("\n".join([topology, *texts, f"status {status}"]))
    return status


if __name__ == "__main__":
    sys.exit(main())
