#include "../ops.h"
#include "common.h"

namespace scute::cpu {

void token_rows(const Tensor& ids, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
                Tensor& y) {
  check_token_rows(ids, row_slot, arena, table, module, y);
  const Arena tensors(arena);
  const Entries entries(table, module);
  const int64_t width = y.size(1);

  SCUTE_DISPATCH(y.scalar_type(), "scute::token_rows", [&] {
    at::parallel_for(0, ids.size(0), 16, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const Entry* entry = entries.of(row_slot.const_data_ptr<int32_t>()[row]);
        if (!entry || entry->tokens == kAbsent) continue;
        const Tokens<scalar_t> own(tensors, entry->tokens, width);
        const int64_t id = ids.const_data_ptr<int64_t>()[row];
        const int32_t *last = own.ids + own.count, *found = std::lower_bound(own.ids, last, id);
        if (found == last || *found != id) continue;
        std::copy_n(own.rows + (found - own.ids) * width, width, y.data_ptr<scalar_t>() + row * y.stride(0));
      }
    });
  });
}

}  // namespace scute::cpu
