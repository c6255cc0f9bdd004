"""The tests that also pass on the newest SGLang release (make test-latest): start, exactness, names, unloads."""

from test_plugin import (  # noqa: F401
    test_a_hook_whose_target_has_changed_is_named,
    test_refused_settings_exist,
    test_start_up_stops_naming_a_missing_hook,
)
from test_server import (  # noqa: F401
    test_a_changed_base_is_refused_while_a_fold_depends_on_it,
    test_decoding_equals_peft_greedy_for_32_tokens,
    test_five_methods_in_one_batch_equal_peft,
    test_more_tenants_than_slots_equal_single_runs,
    test_names_of_a_tenant,
    test_other_names_are_not_found,
    test_refused_loads_have_their_status_and_change_nothing,
    test_unload_does_not_wait_for_requests_that_are_over,
)

from test_plugin import no_hooks  # noqa: F401  isort: skip  a fixture
