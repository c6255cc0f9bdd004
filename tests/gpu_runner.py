"""SGLang's ModelRunner with its captured decoding graphs, driven batch by batch; see gpu_worker.py.

Where a server decides which requests meet in a batch, here a test does: a batch is a list of :class:`Row`, each at a
place of its own in a KV cache filled with random numbers.
"""

from __future__ import annotations

import dataclasses
import os
import random
from contextlib import contextmanager, nullcontext

import torch
from gpu_worker import SIZES, start_model_runner

SPAN = 64  # KV places of a row
ARENA_MB = 11  # holds the test's adapters once, but not all that its storm loads


@dataclasses.dataclass(frozen=True)
class Row:
    tenant: str | None
    token: int
    length: int  # with this token


class Runner:
    def __init__(self, backend: str, base: str, device: str):
        os.environ.setdefault("SCUTE_ARENA_MB", str(ARENA_MB))
        os.environ.setdefault("SCUTE_POISON", "1")
        torch.manual_seed(0)
        self.device = device
        self.runner = start_model_runner(backend, base, device)
        self.graphs = self.runner.decode_cuda_graph_runner if device == "cuda" else None
        self.manager = self.runner.lora_manager if backend == "scute" else None
        self.vocabulary = self.runner.model_config.vocab_size
        self.ids: dict[str | None, str | None] = {None: None}  # tenant -> SGLang's id of what it is now
        places = torch.arange(max(SIZES) * SPAN, device=device).view(-1, SPAN) + 1
        self.places = torch.cat([torch.zeros_like(places[:1]), places])  # request 0, place 0: what padding uses
        self.runner.req_to_token_pool.req_to_token[: len(self.places), :SPAN] = self.places
        for buffer in (*self.runner.token_to_kv_pool.k_buffer, *self.runner.token_to_kv_pool.v_buffer):
            buffer.normal_()

    # Adapters

    def load(self, tenant: str, folder: str) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        ref = LoRARef(lora_name=tenant, lora_path=folder, pinned=False)
        result = self.manager.load_lora_adapter(ref)
        assert result.success, result.error_message
        self.ids[tenant] = ref.lora_id

    def unload(self, tenant: str) -> None:
        result = self.manager.unload_lora_adapter(self.manager.lora_refs[self.ids.pop(tenant)])
        assert result.success, result.error_message

    def state(self) -> dict:
        return self.manager.state()

    # Forward passes

    def prepare(self, rows: list[Row]):
        """What SGLang's ForwardBatch.init_new makes of a decoding batch, adapters fetched and planned."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

        lengths = torch.tensor([row.length for row in rows], dtype=torch.int64)
        requests = torch.arange(1, len(rows) + 1, device=self.device)
        on_device = lengths.to(self.device)
        ids = [self.ids[row.tenant] for row in rows]
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(rows),
            input_ids=torch.tensor([row.token for row in rows], dtype=torch.int64, device=self.device),
            req_pool_indices=requests,
            seq_lens=on_device,
            seq_lens_cpu=lengths,
            seq_lens_sum=int(lengths.sum()),
            orig_seq_lens=on_device.int(),
            out_cache_loc=self.places[requests, on_device - 1],
            positions=on_device - 1,
            lora_ids=ids if self.manager else None,
            spec_algorithm=self.runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )
        if self.manager:
            self.manager.fetch_new_loras(set(ids))
            self.manager.prepare_lora_batch(batch)
        return batch

    def logits(self, rows: list[Row]):
        """The rows' next-token logits as the server would compute them: by a graph, if there are graphs."""
        with torch.no_grad():
            output = self.runner.forward(self.prepare(rows))
        assert output.can_run_graph == (self.graphs is not None)
        return output.logits_output.next_token_logits.clone()

    def eager_logits(self, rows: int, label: int):
        """The pass just replayed once more without its graph: the same padded inputs, the same variant."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        bucket = next(size for size in SIZES if size >= rows)
        batch, attention, _ = self.graphs.capture_prepare(bucket)  # views of the static inputs, as they are now
        context = forward_context(ForwardContext(attn_backend=attention))
        with torch.no_grad(), context, self.manager.lora_backend.variant.forcing(label):
            attention.init_forward_metadata_out_graph(batch, in_capture=True)
            output = self.runner.model.forward(batch.input_ids, batch.positions, batch)
        return output.next_token_logits[:rows]

    # What the tests ask

    def greedy(self, tenants: list[str | None], steps: int):
        """Logits, float32 (rows, steps, vocabulary), of greedy decoding with one row for each of these tenants."""
        rows, chosen = [Row(tenant, token=3 + i, length=8 + i) for i, tenant in enumerate(tenants)], []
        for _ in range(steps):
            chosen.append(self.logits(rows).float())
            tokens = chosen[-1].argmax(-1).tolist()
            rows = [Row(row.tenant, token, row.length + 1) for row, token in zip(rows, tokens, strict=True)]
        return torch.stack(chosen, 1).cpu().numpy()

    def replays(self, steps: int, seed: int) -> dict:
        """Replays with tenants, methods and batch size changing every step, each against its eager twin."""
        from scute_sgl.graphs import variant_of

        rng, bad, seen = random.Random(seed), self._counter(), {}
        for _ in range(steps):
            rows = self._random_rows(rng, rng.randint(1, max(SIZES)))
            replayed = self.logits(rows)
            label = variant_of(self.manager.lora_backend.live)
            bad += (replayed != self.eager_logits(len(rows), label)).any(1).sum()
            seen[label] = seen.get(label, 0) + 1
        return {"mismatches": int(bad), "steps_by_label": seen, "pool": self.manager.pool.stats()}

    def neighbours(self, steps: int, seed: int) -> dict:
        """One row among other tenants and among rows of the base, everything else equal: bucket, variant, lengths."""
        from scute_sgl.graphs import VARIANTS

        rng, bad = random.Random(seed), self._counter()
        for _ in range(steps):
            mixed = self._random_rows(rng, rng.choice(SIZES[1:]), base_rows=0.1)
            place = rng.randrange(len(mixed))
            mixed[place] = dataclasses.replace(mixed[place], tenant=rng.choice(self._tenants()))
            alone = [dataclasses.replace(row, tenant=None) for row in mixed]
            alone[place] = mixed[place]
            with self.manager.lora_backend.variant.forcing(VARIANTS[0]):
                bad += (self.logits(mixed)[place] != self.logits(alone)[place]).any()
        return {"mismatches": int(bad)}

    def effects(self, tenants: list[str]) -> dict[str, float]:
        """Largest change of a logit by each adapter, as many in a batch as the largest graph has rows."""
        changes = {}
        for begin in range(0, len(tenants), max(SIZES)):
            batch = tenants[begin : begin + max(SIZES)]
            rows = [Row(tenant, token=3 + i, length=8 + i) for i, tenant in enumerate(batch)]
            base = self.logits([dataclasses.replace(row, tenant=None) for row in rows])
            changes |= zip(batch, (self.logits(rows) - base).abs().amax(1).tolist(), strict=True)
        return changes

    def storm(self, folders: dict[str, str], residents: list[str], steps: int, seed: int) -> dict:
        """Loads and unloads of ``folders`` between replays that nobody waits for; answers against those of calm."""
        rng, bad, loaded = random.Random(seed), self._counter(), []
        places = [Row(tenant, 5 + i, 9 + i) for i, tenant in enumerate([*residents, *folders])]
        calm = {}
        for tenant, folder in folders.items():
            self.load(tenant, folder)
            calm |= self._answers(places, {tenant, *residents})
            self.unload(tenant)
        with self._own_stream() as stream:
            for _ in range(steps):
                chosen = {*residents, *rng.sample(loaded, rng.randint(0, min(3, len(loaded))))}
                if not self.manager.validate_lora_batch({self.ids[tenant] for tenant in chosen}):
                    chosen = {*residents}  # as the scheduler: the others would wait
                with stream():
                    answers = self._answers(places, chosen)
                    for tenant, answer in answers.items():
                        bad += (answer != calm[tenant]).any()
                if loaded and rng.random() < 0.45:
                    self.unload(loaded.pop(rng.randrange(len(loaded))))
                elif len(loaded) < len(folders):
                    loaded.append(rng.choice([tenant for tenant in folders if tenant not in loaded]))
                    self.load(loaded[-1], folders[loaded[-1]])
        for tenant in loaded:
            self.unload(tenant)
        return {"mismatches": int(bad), "pool": self.manager.pool.stats()}

    def kernels(self, rows: int) -> list[str]:
        """Names of what one replay without adapters runs on the GPU, in order."""
        from torch.profiler import ProfilerActivity, profile

        replay = self._replay(rows)
        for _ in range(2):  # the first profile of a process may miss its beginning
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                replay()
                torch.cuda.synchronize()
        events = [event for event in profiler.events() if event.device_type.name == "CUDA"]
        return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]

    def milliseconds(self, rows: int, repeats: int = 300) -> float:
        """Time of one replay without adapters, from many back to back."""
        replay, begin, end = self._replay(rows), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / repeats

    # Parts

    def _replay(self, rows: int):
        """The graph replay alone of a batch without adapters, its inputs in place."""
        batch = self.prepare([Row(None, 3 + i, 8 + i) for i in range(rows)])
        self.runner.forward(batch)
        return lambda: self.graphs.backend.replay(self.graphs._replay_graph_key, batch)

    def _answers(self, places: list[Row], tenants: set[str]) -> dict:
        """Logits by tenant of one batch with these tenants at their own places and the base everywhere else."""
        rows = [row if row.tenant in tenants else dataclasses.replace(row, tenant=None) for row in places]
        logits = self.logits(rows)
        return {row.tenant: answer for row, answer in zip(places, logits, strict=True) if row.tenant in tenants}

    def _random_rows(self, rng: random.Random, count: int, base_rows: float = 0.2) -> list[Row]:
        """Rows of a random handful of tenants: all methods, some or none."""
        tenants = self._tenants()
        tenants = rng.sample(tenants, rng.randint(0, len(tenants)))
        rows = []
        for _ in range(count):
            tenant = None if not tenants or rng.random() < base_rows else rng.choice(tenants)
            rows.append(Row(tenant, rng.randrange(self.vocabulary), rng.randint(1, SPAN)))
        return rows

    def _tenants(self) -> list[str]:
        return [tenant for tenant in self.ids if tenant]

    def _counter(self):
        return torch.zeros((), dtype=torch.int64, device=self.device)

    @contextmanager
    def _own_stream(self):
        """Forward passes on a stream of their own, as the scheduler's; joined at the end."""
        if self.device == "cpu":
            yield nullcontext
            return
        own = torch.cuda.Stream()
        own.wait_stream(torch.cuda.current_stream())
        yield lambda: torch.cuda.stream(own)
        torch.cuda.current_stream().wait_stream(own)
