#include "../ops.h"
#include "common.h"

namespace scute::cpu {
namespace {

// The parts of a block, one after the other.
struct Parts {
  const Arena& tensors;
  int64_t at;

  template <typename U>
  const U* next(int64_t count) {
    const U* part = tensors.at<U>(at, count);
    at += aligned(count * static_cast<int64_t>(sizeof(U)));
    return part;
  }
};

// y[l, o] += sum over p of w1[p][l] * (sum over q of x[p, q] w2[q][o]); with factors of w2 in two steps.
template <typename T>
void kronecker(const Structure& s, Parts parts, const T* x, T* y) {
  const auto [l, p, o, q, r] = s.kronecker;
  const T* w1 = parts.next<T>(static_cast<int64_t>(p) * l);
  const T* right = parts.next<T>(static_cast<int64_t>(q) * (r ? r : o));
  const T* left = r ? parts.next<T>(static_cast<int64_t>(r) * o) : nullptr;
  std::vector<float> inner(r), products(o), sums(static_cast<int64_t>(l) * o);
  for (int64_t i = 0; i < p; ++i) {
    std::vector<float>& first = r ? inner : products;
    std::fill(first.begin(), first.end(), 0.0f);
    for (int64_t k = 0; k < q; ++k)
      for (size_t j = 0; j < first.size(); ++j)
        first[j] += static_cast<float>(x[i * q + k]) * static_cast<float>(right[k * first.size() + j]);
    if (r) {
      std::fill(products.begin(), products.end(), 0.0f);
      for (int64_t k = 0; k < r; ++k)
        for (int64_t j = 0; j < o; ++j) products[j] += inner[k] * static_cast<float>(left[k * o + j]);
    }
    for (int64_t row = 0; row < l; ++row)
      for (int64_t j = 0; j < o; ++j) sums[row * o + j] += static_cast<float>(w1[i * l + row]) * products[j];
  }
  for (size_t j = 0; j < sums.size(); ++j) y[j] = static_cast<T>(static_cast<float>(y[j]) + sums[j]);
}

// y[j] += the sum of row j's values times the inputs that they are for.
template <typename T, typename Index>
void sparse(int64_t outputs, int64_t inputs, const int32_t* bounds, const Index* columns, const T* values, const T* x,
            T* y) {
  for (int64_t j = 0; j < outputs; ++j) {
    float sum = 0;
    for (int64_t k = bounds[j]; k < bounds[j + 1]; ++k) {
      TORCH_CHECK(static_cast<int64_t>(columns[k]) < inputs && columns[k] >= 0, "a sparse matrix names input ",
                  columns[k], "; want it below x's ", inputs);
      sum += static_cast<float>(values[k]) * static_cast<float>(x[columns[k]]);
    }
    y[j] = static_cast<T>(static_cast<float>(y[j]) + sum);
  }
}

// Output a of a group and output a + group / 2 are a pair: y + y (f1 - 1) + f2 (-the other, or the other).
template <typename T>
void mix(const Structure& s, Parts parts, T* y) {
  const auto [outputs, group, one_each] = s.mix;
  const int64_t half = group / 2, count = one_each ? outputs / 2 : outputs;
  const T *f1 = parts.next<T>(count), *f2 = parts.next<T>(count);
  for (int64_t pair = 0; pair < outputs / 2; ++pair) {
    const int64_t first = pair / half * group + pair % half, second = first + half;
    const int64_t i = one_each ? pair : first, j = one_each ? pair : second;
    const float a = static_cast<float>(y[first]), b = static_cast<float>(y[second]);
    y[first] = static_cast<T>(a + (a * static_cast<float>(f1[i]) - b * static_cast<float>(f2[i])));
    y[second] = static_cast<T>(b + (b * static_cast<float>(f1[j]) + a * static_cast<float>(f2[j])));
  }
}

int64_t outputs_of(const Structure& s) {
  if (s.kind == kKronecker) return static_cast<int64_t>(s.kronecker.l) * s.kronecker.o;
  return s.kind == kSparse ? s.sparse.outputs : s.mix.outputs;
}

int64_t inputs_of(const Structure& s, int64_t any) {
  if (s.kind == kKronecker) return static_cast<int64_t>(s.kronecker.p) * s.kronecker.q;
  return s.kind == kSparse ? s.sparse.inputs : any;
}

}  // namespace

void structured(const Tensor& x, const Tensor& row_slot, const Tensor& arena, const Tensor& table, int64_t module,
                IntArrayRef columns, Tensor& y) {
  check_structured(x, row_slot, arena, table, module, columns, y);
  if (x.size(0) == 0) return;
  const Arena tensors(arena);
  const Entries entries(table, module);
  const int64_t slices = columns.size() - 1, inputs = x.size(1);

  SCUTE_DISPATCH(x.scalar_type(), "scute::structured", [&] {
    for_each_tile_slice(x.size(0), slices, [&](int64_t row, int64_t slice) {
      const int32_t slot = row_slot.const_data_ptr<int32_t>()[row];
      const Entry* entry = entries.of(slot);
      if (!entry || entry[slice].structure == kAbsent) return;
      Parts parts{tensors, entry[slice].structure};
      const Structure& s = *parts.next<Structure>(1);
      TORCH_CHECK(s.kind >= kKronecker && s.kind <= kBlockAffine, "slot ", slot, " has a structured block of kind ",
                  s.kind, "; want 1 to 5");
      if (s.kind >= kHadamard) return;  // reweigh's
      const int64_t width = columns[slice + 1] - columns[slice];
      TORCH_CHECK(outputs_of(s) == width, "slot ", slot, " has a structured block of ", outputs_of(s),
                  " outputs; want slice ", slice, "'s ", width);
      TORCH_CHECK(inputs_of(s, inputs) == inputs, "slot ", slot, " has a structured block of ", inputs_of(s, inputs),
                  " inputs; want x's ", inputs);
      const scalar_t* from = x.const_data_ptr<scalar_t>() + row * x.stride(0);
      scalar_t* to = y.data_ptr<scalar_t>() + row * y.stride(0) + columns[slice];
      if (s.kind == kKronecker) {
        kronecker(s, parts, from, to);
      } else if (s.kind == kSparse) {
        const int32_t* bounds = parts.next<int32_t>(width + 1);
        const int64_t count = s.sparse.values;
        TORCH_CHECK(bounds[0] == 0 && bounds[width] == count && std::is_sorted(bounds, bounds + width + 1), "slot ",
                    slot, " has a sparse matrix whose rows do not follow one another");
        if (s.sparse.index_bytes == 2) {
          const uint16_t* index = parts.next<uint16_t>(count);
          sparse(width, inputs, bounds, index, parts.next<scalar_t>(count), from, to);
        } else {
          const int32_t* index = parts.next<int32_t>(count);
          sparse(width, inputs, bounds, index, parts.next<scalar_t>(count), from, to);
        }
      } else {
        const int32_t group = s.mix.group;
        TORCH_CHECK(group >= 2 && group % 2 == 0 && width % group == 0, "slot ", slot, " mixes groups of ", group,
                    " outputs; want an even divisor of ", width);
        mix(s, parts, to);
      }
    });
  });
}

}  // namespace scute::cpu
