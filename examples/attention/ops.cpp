// custom_ops::fused_attention: softmax(q k^T / sqrt(width)) v over blocks of queries.
//
// Written out in a model, attention makes three tensors of queries x keys, and each passes through memory. Here the
// scale is part of the product, and the scores of one block of queries stay in the cache until they are used up.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

constexpr int64_t kBlockBytes = 1 << 18;  // of the scores of one block: they stay in a core's second cache
constexpr int64_t kFewestQueries = 32;    // in a block: below it products are too thin to be fast
constexpr int64_t kSmallBytes = 1 << 20;  // of all scores: one batched product for all heads costs less than blocks

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  TORCH_CHECK(q.dim() >= 2 && k.dim() == q.dim() && v.dim() == q.dim(),
              "fused_attention: q, k and v have ", q.dim(), ", ", k.dim(), " and ", v.dim(), " dimensions");
  TORCH_CHECK(q.scalar_type() == k.scalar_type() && q.scalar_type() == v.scalar_type(),
              "fused_attention: q, k and v are of one type");
}

at::Tensor fused_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check(q, k, v);
  const int64_t queries = q.size(-2), keys = k.size(-2), width = q.size(-1), value = v.size(-1);
  for (int64_t i = 0; i < q.dim() - 2; ++i) {
    TORCH_CHECK(q.size(i) == k.size(i) && q.size(i) == v.size(i), "fused_attention: batches or heads differ");
  }
  TORCH_CHECK(k.size(-1) == width && v.size(-2) == keys, "fused_attention: widths or keys differ");
  std::vector<int64_t> shape(q.sizes().begin(), q.sizes().end());
  shape.back() = value;
  at::Tensor out = at::empty(shape, q.options());
  if (out.numel() == 0 || keys == 0 || width == 0) {
    return out.zero_();
  }
  const int64_t heads = out.numel() / (queries * value);
  const at::Tensor q3 = q.reshape({heads, queries, width});
  const at::Tensor kt = k.reshape({heads, keys, width}).transpose(1, 2);
  const at::Tensor v3 = v.reshape({heads, keys, value});
  at::Tensor out3 = out.view({heads, queries, value});
  const double scale = 1.0 / std::sqrt(static_cast<double>(width));
  const int64_t of_one_query = keys * static_cast<int64_t>(q.element_size());
  if (heads * queries * of_one_query <= kSmallBytes) {
    at::Tensor scores = at::empty({heads, queries, keys}, q.options());
    scores.baddbmm_(q3, kt, /*beta=*/0, /*alpha=*/scale);
    at::bmm_out(out3, at::softmax(scores, -1), v3);
    return out;
  }
  const int64_t block = std::min(queries, std::max(kFewestQueries, kBlockBytes / of_one_query));
  const int64_t blocks = (queries + block - 1) / block;
  at::parallel_for(0, heads * blocks, 1, [&](int64_t first, int64_t last) {
    at::AutoDispatchBelowADInplaceOrView guard;  // a worker thread does not know of the caller's no_grad
    for (int64_t i = first; i < last; ++i) {
      const int64_t head = i / blocks, start = i % blocks * block;
      const int64_t count = std::min(block, queries - start);
      at::Tensor scores = at::empty({count, keys}, q.options());
      scores.addmm_(q3.select(0, head).narrow(0, start, count), kt.select(0, head), /*beta=*/0, /*alpha=*/scale);
      at::Tensor result = out3.select(0, head).narrow(0, start, count);
      at::mm_out(result, at::softmax(scores, -1), v3.select(0, head));
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(custom_ops, m) {
  m.def("fused_attention(Tensor q, Tensor k, Tensor v) -> Tensor");
}

TORCH_LIBRARY_IMPL(custom_ops, CPU, m) {
  m.impl("fused_attention", fused_attention);
}

#if TORCH_VERSION_MAJOR >= 2  // before it there is no torch.export to ask for shapes
namespace {

at::Tensor without_data(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check(q, k, v);
  std::vector<c10::SymInt> shape(q.sym_sizes().begin(), q.sym_sizes().end());
  shape.back() = v.sym_size(-1);
  return at::empty_symint(shape, q.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(custom_ops, Meta, m) {
  m.impl("fused_attention", without_data);
}
#endif
