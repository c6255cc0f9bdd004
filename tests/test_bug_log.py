"""The project's log of public bug reports about adapters, and where each is tried here.

Ids are the log's: B for reports, R for what was read in other sources. A test may stand for several.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = {
    # Methods refused, half-supported or computed wrongly
    "B01": "test_server::test_five_methods_in_one_batch_equal_peft",
    "B02": "test_methods::test_dora_magnitude_key_with_and_without_weight",
    "B04": "test_server::test_every_adapter_equals_peft",  # dora_embed, dora_head; experts: B115; quantised: B109
    "B05": "test_methods::test_reads_without_a_base",
    "B07": "test_fold::test_a_dora_scale_follows_its_magnitude_and_its_base",
    "B08": "test_fold::test_a_dora_scale_follows_its_magnitude_and_its_base",
    "B10": "test_methods::test_equals_peft",  # dora_rslora
    "B11": "test_server::test_36_rows_of_12_tenants_on_8_slots_equal_single_runs",
    "B13": "test_method_formats::test_ia3_shape_decides_and_the_config_must_agree",
    "B14": "test_engine::test_a_mixed_batch_on_another_base_equals_peft",  # ia3_no_ff on Qwen2
    "B16": "test_methods::test_vera_draws_what_peft_draws_on_this_dtype",
    "B17": "test_targets::test_quantised_layers_stop_the_start",
    "B19": "test_method_formats::test_oft_before_018_uses_its_own_series",
    "B20": "test_stock_table::test_adapter_is_exact_beside_base_rows",  # oft
    "B22": "test_methods::test_equals_peft",  # boft, boft_factors
    "B23": "test_server::test_every_adapter_equals_peft",  # boft; its rotation on CUDA: test_ops_cuda
    "B25": "test_methods::test_equals_peft",  # adalora has a module of rank 0
    "B26": "test_methods::test_equals_peft",  # adalora_unpruned
    "B28": "test_method_refusals::test_rank_pattern_against_the_tensor",
    "B29": "test_method_refusals::test_lora_init_that_changes_the_base_is_refused",
    # Scale and pattern
    "B31": "test_stock_table::test_adapter_is_exact_beside_base_rows",  # lora_rslora
    "B32": "test_bad_adapters::test_tensors_over_the_network_are_refused",  # so there is one path, one scale
    "B34": "test_methods::test_equals_peft",
    "B35": "test_stock_table::test_adapter_is_exact_beside_base_rows",  # lora_rank_pattern
    # Names and module subsets
    "B37": "test_method_refusals::test_paths_of_a_wrapped_base",
    "B38": "test_method_refusals::test_no_module_applied",
    "B40": "test_method_refusals::test_lora_tensors_that_do_not_fit",
    "B41": "test_engine::test_a_mixed_batch_on_another_base_equals_peft",
    "B43": "test_stock_table::test_adapter_is_exact_beside_base_rows",  # lora_q, lora_kv, lora_layers
    "B44": "test_targets::test_a_linear_layer_of_any_name_is_adaptable",
    "B46": "test_bad_adapters::test_a_bad_adapter_is_refused_and_changes_nothing",  # a fused qkv_proj is refused by name
    "B47": "test_method_refusals::test_targets_only_confirm_the_tensors",
    "B49": "test_method_refusals::test_paths_of_a_wrapped_base",
    "B50": "test_server::test_every_adapter_equals_peft",  # lora_full_paths
    # Embeddings, heads, vocabulary
    "B52": "test_bad_adapters::test_a_bad_adapter_is_refused_and_changes_nothing",  # and lora_head, which stores them
    "B53": "test_image::test_a_vocabulary_of_any_size_fits",
    "B55": "test_method_refusals::test_field_that_changes_the_result_is_refused_by_name",
    "B56": "test_checkpoint::test_added_tokens",
    "B58": "test_method_refusals::test_field_that_changes_the_result_is_refused_by_name",
    "B59": "test_method_refusals::test_field_that_changes_the_result_is_refused_by_name",
    # Tensor and data parallel
    "B61": "test_targets::test_every_rank_names_what_it_holds",
    "B62": "test_targets::test_every_rank_names_what_it_holds",
    "B64": "test_shard::test_shards_rebuild_the_whole_result",
    "B65": "test_shard::test_shards_of_a_gated_input_scale_rebuild_the_whole_mlp",
    "B67": "test_layers::test_an_idle_pass_after_a_live_one_is_the_bases",
    "B68": "test_plugin::test_what_cannot_be_exact_is_refused_by_its_flag",
    # CUDA graphs
    "B70": "test_ops_cuda::test_graph_replays_are_the_eager_run",
    "B71": "test_gpu_graphs::test_adapters_loaded_after_capture_take_effect",
    "B73": "test_gpu_graphs::test_replays_equal_the_same_pass_run_eagerly",
    # Batch composition and numerics
    "B74": "test_ops_shrink::test_neighbours_change_no_bit",
    "B76": "test_method_refusals::test_lora_init_that_keeps_the_base_is_plain_lora",
    "B77": "test_server::test_36_rows_of_12_tenants_on_8_slots_equal_single_runs",
    "B79": "test_server::test_36_rows_of_12_tenants_on_8_slots_equal_single_runs",  # ranks 1, 4, 8 and 200
    "B80": "test_ops_plan::test_slot_past_the_table",
    "B82": "test_plugin::test_what_cannot_be_exact_is_refused_by_its_flag",
    "B83": "test_plugin::test_what_cannot_be_exact_is_refused_by_its_flag",
    # Prefix cache
    "B85": "test_server::test_a_reloaded_name_does_not_reuse_the_old_prefixes",
    "B86": "test_server::test_a_reloaded_name_does_not_reuse_the_old_prefixes",
    "B88": "test_server::test_prefix_cache_is_shared_within_a_tenant_only",
    "B89": "test_server::test_a_reloaded_name_does_not_reuse_the_old_prefixes",
    # Load, unload, eviction
    "B91": "test_server::test_a_reloaded_name_does_not_reuse_the_old_prefixes",
    "B92": "test_loads::test_a_storm_of_loads_and_unloads_changes_no_answer",
    "B94": "test_server::test_36_rows_of_12_tenants_on_8_slots_equal_single_runs",
    "B95": "test_bad_adapters::test_a_bad_adapter_is_refused_and_changes_nothing",
    "B97": "test_loads::test_an_unloaded_adapter_leaves_no_bytes_behind",
    "B98": "test_loads::test_memory_does_not_grow_with_loads",
    "B100": "test_loads::test_a_name_is_free_while_its_old_adapter_finishes",  # no refresh in place: unload, load
    "B101": "test_bad_adapters::test_a_bad_adapter_is_refused_and_changes_nothing",
    # Data types
    "B103": "test_methods::test_files_of_16_bit_are_not_rounded_again",
    "B104": "test_sixteen_bit::test_an_adapter_is_as_exact_as_in_peft",  # lora_fp16_file on bf16
    "B106": "test_server::test_five_methods_in_one_batch_equal_peft",
    "B107": "test_ops_shrink::test_is_the_reference",
    # Quantised bases
    "B109": "test_targets::test_quantised_layers_stop_the_start",
    "B110": "test_targets::test_quantised_layers_stop_the_start",
    "B112": "test_targets::test_quantised_layers_stop_the_start",
    # Mixtures of experts
    "B113": "test_method_refusals::test_field_that_changes_the_result_is_refused_by_name",
    "B115": "test_targets::test_experts_stay_out_and_the_layers_around_them_do_not",
    "B116": "test_targets::test_experts_stay_out_and_the_layers_around_them_do_not",
    # Security and bad files
    "B118": "test_method_refusals::test_readers_do_not_import_peft_or_sglang",
    "B119": "test_bad_adapters::test_a_bad_name_or_path_is_refused",
    "B121": "test_checkpoint::test_pickle_alone_is_never_opened",
    "B122": "test_safetensors::test_pickle_named_safetensors",
    "B124": "test_names::test_other_names_are_not_found",
    "B125": "test_safetensors::test_bad_header_entries",
    # Selecting an adapter, configuration, observability
    "B127": "test_names::test_other_names_are_not_found",
    "B128": "test_names::test_an_adapter_may_have_any_name_that_is_not_the_bases",
    "B130": "test_names::test_names_of_the_base",
    "B131": "test_checkpoint::test_no_permission",
    "B133": "test_checkpoint::test_no_config",  # sub-folders are named; the hub serves one revision, its main one
    "B134": "test_method_refusals::test_unknown_field_that_is_off_is_accepted",
    "B137": "test_engine::test_a_mixed_batch_on_another_base_equals_peft",
    "B139": "test_server::test_every_adapter_equals_peft",  # lora_r200, lora_r500
    "B140": "test_plugin::test_start_up_stops_naming_a_missing_hook",
    # Read from source
    "R1": "test_stock_table::test_adapter_is_exact_beside_base_rows",
    "R2": "test_stock_table::test_adapter_is_exact_beside_base_rows",
    "R3": "test_method_refusals::test_lora_tensors_that_do_not_fit",
    "R4": "test_bad_adapters::test_a_bad_adapter_is_refused_and_changes_nothing",  # seq_proj
    "R5": "test_checkpoint::test_method_that_is_not_served",
    "R6": "test_stock_table::test_adapter_is_exact_beside_base_rows",
    "R7": "test_checkpoint::test_pickle_alone_is_never_opened",
    "R8": "test_server::test_36_rows_of_12_tenants_on_8_slots_equal_single_runs",
    "R9": "test_method_refusals::test_lora_tensors_that_do_not_fit",
}
LATER = {"B136": "no command takes an adapter's folder for a base yet"}


@pytest.mark.parametrize("bug", TESTS)
def test_a_reported_bug_has_a_test(bug):
    module, _, name = TESTS[bug].partition("::")
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert bug not in LATER
