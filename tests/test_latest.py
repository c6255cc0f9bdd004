"""The tests that also pass on the newest SGLang release (make test-latest): start, exactness, names, unloads, where
an activated LoRA begins."""

from test_bad_adapters import (  # noqa: F401
    test_a_bad_name_or_path_is_refused,
    test_a_changed_base_is_refused_while_a_fold_depends_on_it,
)
from test_invocation import (  # noqa: F401
    test_mixed_with_others_it_equals_peft,
    test_prefixes_are_reused_on_the_same_side_of_the_invocation_only,
)
from test_loads import (  # noqa: F401
    test_a_storm_of_loads_and_unloads_changes_no_answer,
    test_beyond_max_loaded_loras_the_least_recently_used_is_unloaded,
    test_unload_does_not_wait_for_requests_that_are_over,
)
from test_names import (  # noqa: F401
    test_models_are_listed_and_answered_one_by_one,
    test_names_of_a_tenant,
    test_other_names_are_not_found,
)
from test_plugin import (  # noqa: F401
    test_a_hook_whose_target_has_changed_is_named,
    test_refused_settings_exist,
    test_start_up_stops_naming_a_missing_hook,
)
from test_server import (  # noqa: F401
    test_36_rows_of_12_tenants_on_8_slots_equal_single_runs,
    test_decoding_equals_peft_greedy_for_32_tokens,
    test_five_methods_in_one_batch_equal_peft,
)

from test_bad_adapters import before  # noqa: F401  isort: skip  fixtures
from test_invocation import chunked  # noqa: F401  isort: skip
from test_plugin import no_hooks  # noqa: F401  isort: skip
