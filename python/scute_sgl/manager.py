"""The adapters of one scheduler process: loads and unloads them, and prepares every forward pass.

A subclass of SGLang's LoRAManager for the calls that the scheduler makes; stock pool, layers and adapter classes
are not used. Nothing that an adapter's files or a request hold makes a method here raise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import generate_sequence_lengths, get_lm_head_pruned_lens

from scute_sgl import build, hooks, image, invocation, ops, targets
from scute_sgl.backend import built_by_manager
from scute_sgl.checkpoint import max_file_bytes, read_adapter
from scute_sgl.config import LAST_NORM
from scute_sgl.errors import AdapterError
from scute_sgl.fold import agree, fold_adapter, live_slots, needs_base_weight
from scute_sgl.hub import local_folder
from scute_sgl.layers import attach
from scute_sgl.metrics import TenantMetrics
from scute_sgl.options import Options
from scute_sgl.pool import Pool
from scute_sgl.ranks import Ranks
from scute_sgl.slots import Adapter, Slots, Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tenant:
    """What is known of a loaded adapter besides its image."""

    name: str
    method: str
    live: list[str]  # names of its slots, as in the normal form
    nbytes: int
    needs_base: bool  # whether its folded tensors depend on the base's
    targets: tuple[Target, ...]  # what it changes
    invocation: tuple[int, ...]  # tokens from which on it does so; () for all of a request


class PoolSurface:
    """What the rest of SGLang reads of a LoRA memory pool: metrics."""

    def __init__(self, pool: Pool, slots: int):
        self._pool, self.max_loras_per_batch = pool, slots

    @property
    def uid_to_buffer_id(self) -> dict[str, int]:
        return self._pool.uid_to_slot


class ScuteManager(LoRAManager):
    """LoRAManager with the same surface towards the scheduler; ``tenants`` by lora_id."""

    def __init__(self, *args, **kwargs):
        with built_by_manager():
            super().__init__(*args, **kwargs)

    def init_state(self, max_lora_rank=None, target_modules=None, lora_paths=None) -> None:
        """Called at the end of SGLang's constructor, before the KV cache takes the memory that is left."""
        build.check(ops.build_info(), self.device, self.dtype)
        self.configs, self.loras, self.lora_refs, self.num_pinned_loras = {}, {}, {}, 0
        self.tenants: dict[str, Tenant] = {}
        names = "forwards max_tenants_in_forward max_methods_in_forward rank_checks not_invoked".split()
        self.stats = dict.fromkeys(names, 0)
        self.ranks = Ranks()
        self.metrics: TenantMetrics | None = None
        options = Options.read()
        self.check_ranks = options.check_ranks
        sites = targets.find_sites(self.base_model)
        if not sites:
            raise ValueError("--lora-backend scute found no layer in this model that adapters could change")
        self.targets = {target.path: target for site in sites for target in site.targets}
        self.base_shape = targets.base_shape(self.base_model, sites, self.dtype, self.base_hf_config)
        if self.lora_backend.gives_hidden_states:
            self.base_shape.norms.pop(LAST_NORM, None)
        self.site_of = {t.module: site.module for site in sites for t in site.targets}
        arena_bytes = self.ranks.min(options.arena_bytes(self.device))  # GPUs of one model may differ a little
        self.max_file_bytes = max_file_bytes(arena_bytes * self.ranks.size // self.dtype.itemsize, self.base_shape)
        self.first_pass_checked = False
        self.pool = Pool(
            arena_bytes,
            self.max_loras_per_batch,
            len(self.targets),
            self.device,
            self.dtype,
            options.poison,
        )
        self.memory_pool = PoolSurface(self.pool, self.max_loras_per_batch)
        self.lora_backend.start(self.pool, options.graph_rank)
        attach(self.base_model, sites, self.lora_backend)
        logger.info(f"scute: {len(self.targets)} modules, {self.pool.stats()['arena_bytes'] >> 20} MiB for adapters")
        for ref in lora_paths or []:
            result = self._load_lora_adapter(ref)
            if not result.success:
                raise RuntimeError(result.error_message)

    # Loading and unloading

    def _load_lora_adapter(self, ref: LoRARef):
        begin = time.perf_counter()
        try:
            self._load(ref)
        except AdapterError as error:
            return self.create_lora_update_result(False, str(error.named(ref.lora_name)))
        except Exception as error:
            logger.exception(f"loading adapter {ref.lora_name!r} failed")
            return self.create_lora_update_result(False, str(AdapterError.of(error).named(ref.lora_name)))
        self._tell("loaded", self.tenants[ref.lora_id], begin)
        return self.create_lora_update_result(True)

    @torch.no_grad()
    def _load(self, ref: LoRARef) -> None:
        """Read, fold and pack an adapter, and make it known. If any rank refuses it, all do."""
        share = self.ranks.first_refusal
        adapter = agree(lambda: self._read(ref), share)
        folded = fold_adapter(adapter, self.targets, self.ranks.sum, share, adds_bias=self.ranks.rank == 0)
        changed = tuple(target for target, _ in folded.values())
        agree(lambda: self._check_reached(ref.lora_name, changed), share)
        pin = self.device.type == "cuda"
        packed = agree(lambda: image.pack(folded, self.dtype, pin), share)
        block_bytes = self.ranks.max(packed.nbytes)  # equal on all ranks, and so is every later decision
        agree(lambda: self.pool.register(ref.lora_id, packed, bool(ref.pinned), block_bytes), share)
        live = live_slots([f for _, f in folded.values()])
        needs_base = any(self._reads_base(path, slots) for path, slots in adapter.modules.items())
        needs_base = needs_base or bool(adapter.norms)
        known = ref.lora_name, adapter.method, live, packed.nbytes, needs_base, changed, adapter.invocation
        self.tenants[ref.lora_id] = Tenant(*known)
        self.lora_refs[ref.lora_id] = ref

    def _read(self, ref: LoRARef) -> Adapter:
        return read_adapter(local_folder(ref.lora_path), self.base_shape, self.max_file_bytes)

    def _check_reached(self, name: str, changed: Iterable[Target]) -> None:
        """Some models never call a layer of theirs, but multiply by its weight: an adapter there would be ignored.

        That shows in the first forward pass, which SGLang's warm-up makes before a server is ready.
        """
        reached = self.lora_backend.reached
        for target in changed if reached else ():
            if target.kind not in ("head", "embedding") and self.site_of[target.module] not in reached:
                hint = "the model's forward pass does not call this layer, so an adapter could not change it"
                raise AdapterError("wrong_base", hint, adapter=name, module=target.path)

    def _reads_base(self, path: str, slots: Slots) -> bool:
        """Whether another base weight or bias would give other folded tensors of a module."""
        target = self.targets[path]
        vectors = (slots.scale, slots.magnitude, slots.gain, slots.base_bias, slots.input_scale)
        scaled = [target, self.targets.get(target.gated_by, target)]  # fold_gates moves an input scale there
        has_bias = any(t.bias() is not None for t in scaled)
        return needs_base_weight(slots) or (has_bias and any(vector is not None for vector in vectors))

    def _unload_lora_adapter(self, ref: LoRARef):
        begin = time.perf_counter()
        try:
            if ref.lora_id not in self.tenants:
                raise AdapterError("not_found", "not loaded")
            self.pool.forget(ref.lora_id)
        except AdapterError as error:
            return self.create_lora_update_result(False, str(error.named(ref.lora_name)))
        tenant = self.tenants.pop(ref.lora_id)
        del self.lora_refs[ref.lora_id]
        self._tell("unloaded", tenant, begin)
        return self.create_lora_update_result(True)

    def load_lora_adapter_from_tensors(self, lora_ref: LoRARef, *args, **kwargs):
        refusal = AdapterError("unsafe_file", "save the adapter and load its folder", adapter=lora_ref.lora_name)
        return self.create_lora_update_result(False, str(refusal))

    def start_metrics(self) -> None:
        """Ranks decide alike: the first one tells for all."""
        if self.ranks.rank == 0:
            self.metrics = TenantMetrics()
            self.metrics.show(len(self.tenants), self.pool.stats())

    def _tell(self, what: str, tenant: Tenant, begin: float) -> None:
        """One log line, from the first rank, of what happened to a tenant since ``begin``."""
        if self.ranks.rank == 0:
            milliseconds = 1e3 * (time.perf_counter() - begin)
            logger.info(f"scute: {what} {tenant.name!r}, {tenant.method}, {tenant.nbytes} bytes, {milliseconds:.1f} ms")
        if self.metrics is not None:
            self.metrics.show(len(self.tenants), self.pool.stats())

    def tied_to_base(self) -> list[str]:
        """Names of loaded adapters that would be wrong after a change of base weights."""
        return sorted(tenant.name for tenant in self.tenants.values() if tenant.needs_base)

    # Forward passes

    def validate_lora_batch(self, lora_ids: set[str | None]) -> bool:
        """Whether these can be in one batch: slots and bytes. Ids of dead requests take no room."""
        return self.pool.can_hold(self._known(lora_ids))

    def fetch_new_loras(self, new_loras: set[str | None], running_loras: set[str | None] = frozenset()) -> None:
        begin, before = time.perf_counter(), self.pool.swap_ins
        evicted = self.pool.ensure(self._known(set(new_loras) | set(running_loras)))
        if self.metrics is not None and self.pool.swap_ins > before:
            self.metrics.swapped_in(time.perf_counter() - begin)
            self.metrics.show(len(self.tenants), self.pool.stats())
        for uid in evicted:
            self._tell("evicted", self.tenants[uid], begin)

    def prepare_lora_batch(self, forward_batch, *args, **kwargs) -> None:
        if self.lora_backend.reached and not self.first_pass_checked:
            self.first_pass_checked = True
            for tenant in self.tenants.values():  # loaded before there was a pass to learn from
                self._check_reached(tenant.name, tenant.targets)
        lengths = generate_sequence_lengths(forward_batch, device=torch.device("cpu")).tolist()
        prefixes, heads = forward_batch.extend_prefix_lens_cpu, get_lm_head_pruned_lens(forward_batch)
        uids, lengths, heads = invocation.split(forward_batch.lora_ids, lengths, prefixes, heads)
        known = self._known(set(uids))
        slots = [self.pool.slot_of(uid) if uid in known else -1 for uid in uids]
        self.lora_backend.begin(slots, lengths, heads, decode=forward_batch.forward_mode.is_decode())
        if self.check_ranks:
            self.ranks.check_equal("the batch's adapters or their places", self._decisions(slots, lengths, heads))
            self.stats["rank_checks"] += 1
        self._count(known)
        if self.metrics is not None:
            self.metrics.count_rows((self.tenants[uid].method if uid in known else "base" for uid in uids), lengths)

    def _decisions(self, *batch) -> bytes:
        """Whatever of a forward pass must be the same on all ranks, the slot table on the device included."""
        return repr((batch, self.lora_backend.live)).encode() + self.pool.decisions()

    def _known(self, uids: set[str | None]) -> set[str]:
        """An aborted request may outlive its adapter by a pass; its rows compute what nobody reads."""
        return {uid for uid in uids if uid in self.tenants}

    def _count(self, uids: set[str]) -> None:
        methods = {self.tenants[uid].method for uid in uids}
        self.stats["forwards"] += 1
        self.stats["max_tenants_in_forward"] = max(self.stats["max_tenants_in_forward"], len(uids))
        self.stats["max_methods_in_forward"] = max(self.stats["max_methods_in_forward"], len(methods))

    def state(self) -> dict:
        """Counters and tenants, for /server_info."""
        resident = self.pool.uid_to_slot
        tenants = {
            t.name: {"method": t.method, "live": t.live, "bytes": t.nbytes, "resident": uid in resident}
            for uid, t in self.tenants.items()
        }
        variant = self.lora_backend.variant
        graphs = {"captured": variant.captured, "replays": variant.replays}
        sizes = {"slots": self.max_loras_per_batch, "modules": len(self.targets), "hooks": hooks.count()}
        return {**self.stats, **graphs, **sizes, "pool": self.pool.stats(), "tenants": tenants}
