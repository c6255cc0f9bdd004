// A tenant's own rows of the vocabulary, as the kernels for them find it.
#pragma once
#include "common.cuh"
#include "tenants.cuh"

namespace scute::cuda {

template <typename T>
struct Tokens {
  int count;  // 0: nobody's row, or a tenant without any
  const int32_t* ids;
  const T* rows;  // [count][width]
};

// Of a row's tenant. Reads what may be read before pdl_wait alone.
template <typename T>
__device__ __forceinline__ Tokens<T> tokens_of(const Tenants& t, int64_t row, int width) {
  const int slot = t.row_slot[row];
  if (slot < 0 || slot >= t.slots) return {0, nullptr, nullptr};
  const int64_t offset = t.table[static_cast<int64_t>(slot) * t.modules].tokens;
  if (offset == kAbsent) return {0, nullptr, nullptr};
  const char* block = t.arena + offset;
  const int count = reinterpret_cast<const TokenRows*>(block)->count;
  return {count, reinterpret_cast<const int32_t*>(block + sizeof(TokenRows)),
          reinterpret_cast<const T*>(block + token_rows_at(count))};
}

}  // namespace scute::cuda
