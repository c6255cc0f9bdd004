"""Real processes that load adapters together over gloo: same sums, same refusals, same places in the arena."""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from fakes import EMBEDDING, LM_HEAD, FakeModel, random_slots

from scute_sgl import image
from scute_sgl.errors import AdapterError
from scute_sgl.fold import agree, fold, fold_adapter
from scute_sgl.pool import Pool
from scute_sgl.ranks import Ranks
from scute_sgl.slots import Adapter

MODEL = FakeModel()
WHOLE = MODEL.targets()
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
O_PROJ, Q_PROJ, DOWN = ATTENTION + "o_proj", ATTENTION + "q_proj", MLP + "down_proj"
DORA = {path: random_slots(WHOLE[path], "terms", "magnitude", "bias") for path in (Q_PROJ, O_PROJ, DOWN)}
FROM_WEIGHT = {
    ATTENTION + "k_proj": random_slots(WHOLE[ATTENTION + "k_proj"], "left", "bias"),
    O_PROJ: random_slots(WHOLE[O_PROJ], "right", "magnitude"),
    DOWN: random_slots(WHOLE[DOWN], "left"),
}
DIFFERS = "the base weight in the file differs from the served one"
EVERY_KIND = {
    EMBEDDING: random_slots(WHOLE[EMBEDDING], "terms", "magnitude"),
    LM_HEAD: random_slots(WHOLE[LM_HEAD], "terms", "rotation"),
    DOWN: random_slots(WHOLE[DOWN], "input_scale", "base_bias"),
}
SHARING = {ATTENTION + "k_proj": random_slots(WHOLE[ATTENTION + "k_proj"], "shared", "gain")}


class Rank:
    """What a scheduler process does when it loads an adapter and runs a batch, without SGLang."""

    def __init__(self, rank: int, size: int, rendezvous: str):
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
        group = SimpleNamespace(
            rank_in_group=rank, world_size=size, ranks=list(range(size)), cpu_group=dist.group.WORLD
        )
        self.ranks, self.targets = Ranks(group), MODEL.targets(rank, size)
        self.pool = Pool(64 << 10, 8, len(WHOLE), "cpu", torch.float16)

    def load(self, uid: str, modules: dict) -> dict:
        share = self.ranks.first_refusal
        folded = fold_adapter(Adapter("", modules), self.targets, self.ranks.sum, share, adds_bias=self.ranks.rank == 0)
        packed = agree(lambda: image.pack(folded, torch.float16), share)
        # Ranks whose images differ in size, as those of a vocabulary that they share unequally.
        packed = replace(packed, data=torch.cat([packed.data, packed.data.new_zeros(256 * self.ranks.rank)]))
        agree(lambda: self.pool.register(uid, packed, block_bytes=self.ranks.max(packed.nbytes)), share)
        return folded

    def refusal(self, modules: dict) -> str:
        try:
            self.load("bad", modules)
        except Exception as error:
            return str(AdapterError.of(error).named("bad"))
        return "accepted"

    def check(self) -> None:
        self.ranks.check_equal("their arenas", self.pool.decisions())

    def is_last(self) -> bool:
        return self.ranks.rank == self.ranks.size - 1


def good_loads(rank: Rank) -> dict:
    """The scales of row-parallel modules, whose norms need every rank's part."""
    folded = rank.load("dora", DORA)
    rank.load("every kind", EVERY_KIND)
    rank.load("sharing", SHARING)
    rank.load("of the weight", FROM_WEIGHT)
    for batch in (["dora"], ["every kind", "dora"], ["sharing", "every kind"], ["of the weight", "every kind"]):
        rank.pool.ensure(batch)
        rank.check()
    # numpy: a tensor would travel through a file descriptor that dies with this process
    return {path: folded[WHOLE[path].module][1].scale.numpy() for path in (O_PROJ, DOWN)}


def refused_by_the_last(rank: Rank) -> list[str]:
    """What the loads of three adapters say that are bad in the last rank's part alone; the rank goes on."""
    before = rank.pool.decisions()
    other_base = WHOLE[O_PROJ].weight().clone()
    other_base[:, -1] += 1  # the last input: only the last rank holds it
    too_large = random_slots(WHOLE[Q_PROJ], "terms")
    too_large.terms[0].B[-1] = 1e6  # beyond float16, in the last output
    refusals = [
        rank.refusal(DORA | {O_PROJ: replace(DORA[O_PROJ], base_weight=other_base)}),
        rank.refusal({Q_PROJ: too_large}),
    ]
    unforeseen = rank.targets[O_PROJ]
    if rank.is_last():
        rank.targets[O_PROJ] = replace(unforeseen, weight=lambda: 1 / 0)
    refusals.append(rank.refusal(DORA))
    rank.targets[O_PROJ] = unforeseen
    assert rank.pool.decisions() == before
    rank.load("next", EVERY_KIND)  # nobody waits for a sum that never comes
    rank.check()
    return refusals


def divergence(rank: Rank) -> str:
    rank.check()
    if rank.is_last():
        rank.pool.ensure(["dora"])
    try:
        rank.check()
    except RuntimeError as error:
        return str(error)
    return "not seen"


def of_the_weight(rank: Rank) -> tuple[dict, str]:
    """This rank's terms of W, and what the load of a method says that needs all of it."""
    folded = rank.load("terms", FROM_WEIGHT)
    folded = {path: folded[WHOLE[path].module][1] for path in FROM_WEIGHT}
    terms = {path: (f.A.numpy(), f.B.numpy()) for path, f in folded.items()}
    refusal = rank.refusal(FROM_WEIGHT | {O_PROJ: random_slots(WHOLE[O_PROJ], "whole")})
    rank.load("after it", EVERY_KIND)
    rank.check()
    return terms, refusal


def all_jobs(rank: Rank) -> tuple:
    return good_loads(rank), refused_by_the_last(rank), of_the_weight(rank), divergence(rank)


def _process(number: int, size: int, rendezvous: str, job, results) -> None:
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():  # as SGLang's scheduler
            results.put((number, job(Rank(number, size, rendezvous))))
        dist.barrier()  # no peer is still reading
    except Exception:
        results.put((number, RuntimeError(traceback.format_exc())))
    os._exit(0)  # gloo's threads may abort a process that tears them down


def on_ranks(job, size: int, folder) -> list:
    """What the job returns on every rank."""
    results = multiprocessing.get_context("spawn").SimpleQueue()
    arguments = (size, str(folder / "meet"), job, results)
    processes = multiprocessing.start_processes(_process, arguments, size, join=False)
    answers = dict(results.get() for _ in range(size))
    while not processes.join(timeout=60):
        pass
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return [answers[rank] for rank in range(size)]


@pytest.fixture(scope="module", params=[2, 4])
def answers(request, tmp_path_factory):
    return on_ranks(all_jobs, request.param, tmp_path_factory.mktemp("ranks"))


def test_ranks_load_and_place_adapters_alike(answers):
    for scales, *_ in answers:
        for path, scale in scales.items():
            want = fold(DORA[path], WHOLE[path]).scale
            torch.testing.assert_close(torch.from_numpy(scale), want, rtol=0, atol=1e-6)


def test_what_one_rank_refuses_is_refused_by_all_in_its_words(answers):
    *others, last = [refusals for _, refusals, *_ in answers]
    assert last == [
        f"adapter 'bad' refused [wrong_base]: {O_PROJ} base_weight: {DIFFERS}",
        f"adapter 'bad' refused [bad_config]: {Q_PROJ} B: largest value 1e+06 is not finite in float16",
        "adapter 'bad' refused [bad_config]: ZeroDivisionError: division by zero",
    ]
    assert others == [[f"{text} (on tensor-parallel rank {len(others)})" for text in last]] * len(others)


def test_ranks_make_the_terms_of_the_whole_weight(answers):
    for rank, (_, _, (terms, refusal), _) in enumerate(answers):
        for path, t in MODEL.targets(rank, len(answers)).items():
            if path not in terms:
                continue
            whole = fold_adapter(Adapter("", {path: FROM_WEIGHT[path]}), WHOLE)[WHOLE[path].module][1]
            A, B = map(torch.from_numpy, terms[path])
            want = (whole.B @ whole.A)[slice(*t.outputs), slice(*t.inputs)]
            torch.testing.assert_close(B @ A, want, rtol=1e-5, atol=1e-6)
        assert refusal.startswith(f"adapter 'bad' refused [unsupported_method]: {O_PROJ}: this method needs all")


def test_ranks_that_diverge_say_so(answers):
    says = {divergence for *_, divergence in answers}
    assert len(says) == 1
    text = says.pop()
    assert text.startswith("tensor-parallel ranks disagree on their arenas: rank 0 has ")
    hashes = [part.partition(" has ")[2] for part in text.split(", ")]
    assert len(hashes) == len(answers) and len(set(hashes)) == 2


def test_one_rank_asks_nobody():
    alone = Ranks(SimpleNamespace(rank_in_group=0, world_size=1))
    refusal, part = AdapterError("bad_shape", "too wide"), torch.ones(2)
    assert alone.first_refusal(refusal) is refusal and alone.first_refusal(None) is None
    assert alone.sum(part) is part and alone.min(3) == alone.max(3) == 3
    alone.check_equal("anything", b"")
