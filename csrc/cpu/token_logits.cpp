#include "../ops.h"
#include "common.h"

namespace scute::cpu {

void token_logits(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
                  Tensor& y) {
  check_token_logits(x, row_slot, arena, table, module, y);
  const Arena tensors(arena);
  const Entries entries(table, module);
  const int64_t inputs = x.size(1);

  SCUTE_DISPATCH(x.scalar_type(), "scute::token_logits", [&] {
    at::parallel_for(0, x.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int32_t slot = row_slot.const_data_ptr<int32_t>()[row];
        const Entry* entry = entries.of(slot);
        if (!entry || entry->tokens == kAbsent) continue;
        const Tokens<scalar_t> own(tensors, entry->tokens, inputs);
        const scalar_t* from = x.const_data_ptr<scalar_t>() + row * x.stride(0);
        scalar_t* to = y.data_ptr<scalar_t>() + row * y.stride(0);
        for (int64_t k = 0; k < own.count; ++k) {
          TORCH_CHECK(own.ids[k] >= 0 && own.ids[k] < y.size(1), "slot ", slot, " has a row for token ", own.ids[k],
                      "; want one of y's ", y.size(1), " columns");
          to[own.ids[k]] = static_cast<scalar_t>(dot(from, own.rows + k * inputs, inputs));
        }
      }
    });
  });
}

}  // namespace scute::cpu
